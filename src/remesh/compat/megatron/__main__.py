"""Run a script with the drop-in in the place of Megatron's own package.

`python -m remesh.compat.megatron [-m] SCRIPT [ARGS]...`

The script runs as Python runs it, `torchrun --module remesh.compat.megatron SCRIPT` included.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from remesh.compat.megatron import install

_USAGE = "usage: python -m remesh.compat.megatron [-m] SCRIPT [ARGS]..."


def main(args: list[str]) -> None:
    """Run what the arguments name."""
    as_module = args[:1] == ["-m"]
    rest = args[1:] if as_module else args
    if not rest or rest[0].startswith("-"):
        raise SystemExit(_USAGE)
    install()
    sys.argv = rest
    if as_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(rest[0]).resolve().parent)
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
