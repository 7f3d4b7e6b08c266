"""Run Megatron's own unit tests of `dist_checkpointing` against the drop-in, on the CPU.

`python -m tests.compat.megatron.own_tests SOURCES [--packages remesh own] [-k WHICH] [FILE...]`

SOURCES is a checkout of Megatron-LM (https://github.com/NVIDIA/Megatron-LM, for example at tag
`core_v0.15.0`); the tests are run from there, unchanged, by 8 ranks over gloo. `--packages` says
what they are run against: the drop-in, Megatron's own package to compare, or one after the other.
A table of how many of the tests of each file pass is printed last.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.compat.megatron.own_tests import (
    LIMIT,
    Results,
    files_of_tests,
    report,
    run_files,
    table,
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.compat.megatron.own_tests")
    parser.add_argument("sources", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("files", nargs="*", help="parts of names of files to run; default: all")
    parser.add_argument("--packages", nargs="+", choices=["remesh", "own"], default=["remesh"])
    parser.add_argument("-k", default="", dest="only", help="which tests, as pytest's -k")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for each file")
    parser.add_argument("--verbose", action="store_true", help="print why each test failed")
    arguments = parser.parse_intermixed_args()
    chosen = arguments.files or [""]
    files = [
        name for name in files_of_tests(arguments.sources) if any(part in name for part in chosen)
    ]
    if not files:
        sys.exit(f"{arguments.sources}: there are no such tests of dist_checkpointing")
    found: dict[str, dict[str, Results]] = {}
    for package in arguments.packages:
        for name, results in run_files(
            arguments.sources, files, package, only=arguments.only, limit=arguments.limit
        ):
            found.setdefault(name, {})[package] = results
            print(package, report(name, results, verbose=arguments.verbose), flush=True)
    print(table(arguments.sources, found, arguments.packages))


if __name__ == "__main__":
    main()
