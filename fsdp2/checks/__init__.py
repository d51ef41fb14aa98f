"""Checks and explanations of errors.

For all users, at rare events:

    explain    adds an explanation to torch's errors about a sharded parameter
    optimizers the parameters that optimizers hold when they step
    registered parameters that modules register and that belong to no unit
    presence   every rank of a process group runs fsdp2, or none communicates
    replicas   replicas begin with equal weights

Enabled by `fsdp2.debug`:

    environment FSDP2_DEBUG, read by the first call of `fully_shard` or of `debug`
    groups     debug(…); groups that compare ranks, and check for NaN and lost writes
    freed      unsharded parameters that are kept and read after their memory is freed
    agreement  ranks compare each step, by notes on a board

Owns: the settings and the agreement of this process. Core does not import it: core sends notices
(`fsdp2.core.notices`), and reports parameters that will be sharded and new groups
(`fsdp2.core.schedule.observers`). The first five are notified from the import of fsdp2 on. `groups`
loads on request: by `debug`, or by the environment at the first call of `fully_shard`.
"""

from fsdp2.checks import environment, explain, optimizers, presence, registered, replicas
from fsdp2.core.schedule.observers import plan_checks

__all__ = ["environment", "explain", "optimizers", "presence", "registered", "replicas"]


def _load_groups(*_: object) -> None:
    if environment.asks_for_ranks():
        from fsdp2.checks import groups  # noqa: F401  # the next check: told of this plan, too


plan_checks.append(_load_groups)
