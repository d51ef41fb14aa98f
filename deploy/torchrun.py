"""torchrun, whose exit code says whether a signal has ended a run that was saved.

    python deploy/torchrun.py ARGUMENTS OF TORCHRUN…

torchrun leaves with 1 whatever its workers leave with. Schedulers tell by the exit code whether to
start a job again, and whether that counts as a failure: this leaves with 143 where the workers have
(`fsdp2.checkpoint.Preemption`), or where a signal has ended the agent. It hands SIGUSR1 on to the
workers, too, and gives them time to save: TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds, 120 by default
(torch 2.11 knows no other than 30).
"""

import sys

from fsdp2.examples.launch import torchrun

if __name__ == "__main__":
    sys.exit(torchrun(sys.argv[1:]))
