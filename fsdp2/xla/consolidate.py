"""A command that merges per-rank files into one full file.

python -m fsdp2.xla.consolidate --ckpt_prefix /tmp/mnist/final_ckpt --ckpt_suffix "_rank-*.pth"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fsdp2.xla.files import consolidate_sharded_model_checkpoints


def main(arguments: Sequence[str] | None = None) -> int:
    """Consolidate; on failure the exit status is 1, and stderr gives the reason."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2.xla.consolidate",
        description="Put the files of all ranks together to one that the unwrapped model loads.",
    )
    parser.add_argument("--ckpt_prefix", required=True, help="what the files' names begin with")
    parser.add_argument(
        "--ckpt_suffix", default="*.pth", help="what they go on with, a pattern (default: *.pth)"
    )
    parser.add_argument(
        "--save_path", default="", help="the full file (default: PREFIX_consolidated.pth)"
    )
    given = parser.parse_args(arguments)
    try:
        full, path = consolidate_sharded_model_checkpoints(
            given.ckpt_prefix, given.ckpt_suffix, given.save_path
        )
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"saved {len(full)} tensors to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
