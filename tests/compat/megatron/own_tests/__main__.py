"""Run Megatron's own unit tests of `dist_checkpointing` against the drop-in, on the CPU.

`python -m tests.compat.megatron.own_tests SOURCES [--packages remesh own] [-k WHICH] [FILE...]`

SOURCES is a checkout of Megatron-LM (https://github.com/NVIDIA/Megatron-LM, for example at tag
`core_v0.15.0`); the tests are run from there, unchanged, by 8 ranks over gloo. `--packages` says
what they are run against: the drop-in, Megatron's own package to compare, or one after the other.
How many of the tests of each file pass is printed last, and which pass with Megatron's own only.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tests.compat.megatron.own_tests import LIMIT, files_of_tests, report, run_files
from tests.compat.megatron.own_tests.reasons import reason_of


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.compat.megatron.own_tests")
    parser.add_argument("sources", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("files", nargs="*", default=[""], help="parts of names of files to run")
    parser.add_argument("--packages", nargs="+", choices=["remesh", "own"], default=["remesh"])
    parser.add_argument("-k", default="", dest="only", help="which tests, as pytest's -k")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for each file")
    parser.add_argument("--verbose", action="store_true", help="print why each test failed")
    asked = parser.parse_intermixed_args()
    files = [
        name for name in files_of_tests(asked.sources) if any(part in name for part in asked.files)
    ]
    table: dict[str, list[str]] = {name: [] for name in [*files, "all"]}
    passed: dict[str, set[str]] = {}
    for package in asked.packages:
        passed[package], num_tests = set(), 0
        for name, results in run_files(
            asked.sources, files, package, only=asked.only, limit=asked.limit
        ):
            print(package, report(name, results, verbose=asked.verbose), flush=True)
            own = {test for test, one in results.items() if one.outcome == "passed"}
            table[name].append(f"{len(own)} / {len(results)}")
            passed[package] |= own
            num_tests += len(results)
        table["all"].append(f"{len(passed[package])} / {num_tests}")
    print(f"\ntests that pass / all with {', '.join(asked.packages)}, torch {torch.__version__}")
    for name, cells in table.items():
        print(f"| {Path(name).stem} | {' | '.join(cells)} |")
    for test in sorted(passed.get("own", set()) - passed.get("remesh", set())):
        print(f"{test}: {reason_of(test) or 'not known'}")


if __name__ == "__main__":
    main()
