"""Megatron's own unit tests for `dist_checkpointing`, run from a checkout of its repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import remesh
from tests.compat.megatron.own_tests.reasons import reason_of

NUM_RANKS = 8
LIMIT = 1800.0
"""Seconds for a file of tests; the longest takes ten minutes on eight quiet processors."""
FOLDER = Path("tests/unit_tests/dist_checkpointing")
HERE = Path(__file__).parent
SOURCE = Path(remesh.__file__).parents[1]


@dataclass(frozen=True)
class Result:
    """What became of a test: what is worst of what the ranks say, and why."""

    outcome: str
    why: str


Results = dict[str, Result]
"""Name of a test → what became of it."""

_WORST_LAST = ["passed", "skipped", "failed", "cannot start", "ended"]


def files_of_tests(sources: Path) -> list[str]:
    """The files of tests of a checkout."""
    return [
        str(path.relative_to(sources)) for path in sorted((sources / FOLDER).rglob("test_*.py"))
    ]


def run_files(
    sources: Path, names: list[str], package: str, *, only: str = "", limit: float = LIMIT
) -> Iterator[tuple[str, Results]]:
    """Run files of tests on all ranks; what became of the tests of each file, as it is done.

    `package` is `remesh` or `own`, `only` what pytest's `-k` takes, `limit` seconds for each file.
    """
    distributed: Any = torch.distributed
    store = distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10)
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "pytest.ini").write_text(
            "[pytest]\nmarkers =\n  internal\n  flaky\n  flaky_in_dev\n"
        )
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (sources, HERE, SOURCE))),
            "OWN_TESTS_STORE": f"127.0.0.1:{store.port}",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            # Megatron makes dozens of groups for each test, and uses few of them.
            "TORCH_GLOO_LAZY_INIT": "1",
        }
        command = [
            *(sys.executable, str(HERE / "ranks.py")),
            *(package, scratch, only, str(limit), *names),
        ]
        with (folder / "log").open("w") as log:
            ranks = subprocess.Popen(
                command, cwd=sources, env=environment, text=True, stdout=subprocess.PIPE, stderr=log
            )
        assert ranks.stdout is not None
        for number, name in enumerate(names):
            # What else is printed is not the name of a file.
            while (line := ranks.stdout.readline()) and line.strip() != name:
                pass
            results = folder / str(number)
            yield name, _collected(results if line else folder)
        ranks.wait()


def _collected(folder: Path) -> Results:
    results: Results = {}
    for rank in range(NUM_RANKS):
        path = folder / f"{rank}.json"
        if not path.exists():
            logs = [folder / f"{rank}.log", folder / "log"]
            log = next((one.read_text() for one in logs if one.exists()), "")
            results[f"rank {rank}"] = Result("ended", log[-3000:])
            continue
        for name, said in json.loads(path.read_text()).items():
            found = Result(said["outcome"], f"rank {rank}: {said['why']}")
            known = results.get(name)
            if known is None or _severity(found) > _severity(known):
                results[name] = found
    return results


def _severity(result: Result) -> int:
    # A collective that another rank has left says less than what that rank says.
    is_consequence = any(word in result.why for word in ("gloo", "Timed out", "closed by peer"))
    return 2 * _WORST_LAST.index(result.outcome) + (not is_consequence)


def report(name: str, results: Results, *, verbose: bool = False) -> str:
    """The counts of a file, and each test that did not pass, with the reason or the last line."""
    lines = [f"{name}: {dict(Counter(result.outcome for result in results.values()))}"]
    for test, result in results.items():
        if result.outcome != "passed":
            why = result.why.strip().splitlines() or [""]
            text = result.why if verbose else reason_of(test) or why[-1][:300]
            lines.append(f"  {result.outcome} {test.rpartition('::')[2]}: {text}")
    return "\n".join(lines)
