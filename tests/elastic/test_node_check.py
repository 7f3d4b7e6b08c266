"""The test of nodes with real processes and stores."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from remesh.elastic.handler import open_store
from remesh.elastic.node_check import COMMAND, run_alone, run_test
from remesh.elastic.nodes import Node
from remesh.elastic.protocol import NodeTest, TestResult

pytestmark = pytest.mark.timeout(900)

DIES = (sys.executable, "-c", "import sys; sys.exit('the driver is gone')")
HANGS = (sys.executable, "-c", "import time; time.sleep(600)")
PASSES_THEN_DIES = (
    sys.executable,
    "-c",
    """print('{"passed": false, "broken": false}'); exit(5)""",
)


PASSED = '{"passed": true, "broken": false}'


def take_part(commands: Sequence[tuple[str, ...]], seconds: float = 240.0) -> list[TestResult]:
    """The outcomes on the nodes of a group, each of which starts its own command."""
    stores = [open_store("127.0.0.1") for _ in commands]
    group = tuple(
        Node(
            id=number,
            incarnation="a",
            name="",
            address="127.0.0.1",
            port=store.port,
            num_processes=1,
        )
        for number, store in enumerate(stores)
    )

    def of_node(number: int) -> TestResult:
        test = NodeTest(1, 1, 0, group, number)
        return run_test(test, command=commands[number], seconds=seconds)

    with ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(of_node, range(len(commands))))


def test_two_healthy_nodes_reduce_together() -> None:
    outcomes = take_part([COMMAND, COMMAND])
    assert [(outcome.passed, outcome.broken) for outcome in outcomes] == [(True, False)] * 2


def test_who_dies_of_its_own_probe_is_broken_and_the_other_is_told() -> None:
    for commands in ([COMMAND, DIES], [DIES, COMMAND]):
        outcomes = take_part(commands)
        broken = outcomes[commands.index(DIES)]
        other = outcomes[commands.index(COMMAND)]
        assert (broken.passed, broken.broken) == (False, True)
        assert broken.message == "the test ended with exit code 1: the driver is gone"
        assert (other.passed, other.broken) == (False, False)
        assert other.message == "the probe of a node of the group failed"


def test_who_dies_while_the_group_meets_is_not_proven_broken() -> None:
    outcomes = take_part([PASSES_THEN_DIES, PASSES_THEN_DIES])
    assert [(outcome.passed, outcome.broken) for outcome in outcomes] == [(False, False)] * 2
    assert {outcome.message.partition(":")[0] for outcome in outcomes} == {
        "the test ended with exit code 5"
    }


def test_who_hangs_is_broken() -> None:
    (outcome,) = take_part([HANGS], seconds=1.0)
    assert (outcome.passed, outcome.broken, outcome.late) == (False, True, True)
    assert outcome.elapsed >= 1.0
    assert outcome.message == "the test took more than 1 s"


def test_who_passes_and_then_dies_has_passed() -> None:
    assert run_alone(command=(sys.executable, "-c", f"print({PASSED!r}); exit(5)")).passed


PRINTS = """
import ctypes
from remesh.elastic import node_check

libc = ctypes.CDLL(None)

def probe():
    libc.printf(b"written when the process ends\\n")

node_check.probe = probe
node_check.main()
"""


def test_what_libraries_print_is_no_result() -> None:
    assert run_alone(command=(sys.executable, "-c", PRINTS)).passed
