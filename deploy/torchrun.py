"""torchrun, whose exit code says whether a signal has ended a run that was saved.

    python deploy/torchrun.py ARGUMENTS OF TORCHRUN…

torchrun leaves with 1 whatever its workers leave with. Schedulers tell by the exit code whether to
start a job again, and whether that counts as a failure: this leaves with 143 where the workers have
(`fsdp2.checkpoint.Preemption`), or where a signal has ended the agent. It hands SIGUSR1 on to the
workers, too, and gives them time to save: TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds, 120 by default
(torch 2.11 knows no other than 30).
"""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, run

PREEMPTED = 143
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def main() -> int:
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    try:
        run(get_args_parser().parse_args([f"--signals-to-handle={SIGNALS}", *sys.argv[1:]]))
    except SignalException as error:
        print(f"torchrun: {error}", file=sys.stderr)
        return PREEMPTED
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return PREEMPTED if error.get_first_failure()[1].exitcode == PREEMPTED else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
