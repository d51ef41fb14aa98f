"""``python -m fsdp2`` is the command ``fsdp2``; torchrun starts it so: ``torchrun -m fsdp2 …``."""

import sys

from fsdp2.command.main import main

if __name__ == "__main__":
    sys.exit(main())
