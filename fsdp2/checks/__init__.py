"""What fsdp2 refuses, and what it explains, beside what it does.

For everyone, at rare events:

    explain    torch's words on a sharded parameter, in a sentence
    optimizers what optimizers hold when they step
    registered what modules register that no unit has put there
    presence   every rank of a process group runs fsdp2, or none communicates
    layouts    what is logged of a root's units

What `fsdp2.debug` switches on:

    environment FSDP2_DEBUG, read by the first call of `fully_shard` or of `debug`
    switch     debug(…): what is checked, for all sharded models of this process
    groups     groups that agree, look for NaN and for lost writes, before they go on
    agreement  ranks agree on each step, by notes on a board

Owns: the settings and the agreement of this process. Core knows nothing of it: it gives notices
(`fsdp2.core.notices`), and tells of parameters that are to be sharded and of new groups
(`fsdp2.core.schedule.layers`). The first five are told from the import of fsdp2 on. `groups` loads
when somebody asks for it: by `debug`, or by the environment of the first call of `fully_shard`.
"""

from fsdp2.checks import environment, explain, layouts, optimizers, presence, registered
from fsdp2.core.schedule.layers import Watchers

__all__ = ["environment", "explain", "layouts", "optimizers", "presence", "registered"]


def _load_groups(*_: object) -> None:
    if environment.asks_for_ranks():
        from fsdp2.checks import groups  # noqa: F401  # the next watcher: told of this plan, too


Watchers.plans.append(_load_groups)
