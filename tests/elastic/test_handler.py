"""How a launcher gets into a round; the node, and the master behind it, do as the test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from remesh.elastic import handler
from remesh.elastic.handler import Handler
from remesh.elastic.node import NodeClient
from remesh.elastic.protocol import Assignment, BeatReply
from remesh.elastic.rendezvous import Change, Node
from remesh.errors import MasterError

ADDRESS = "127.0.0.1"


class Unlucky:
    """A node whose first round has no store; some heartbeats later it may hear why."""

    address = ADDRESS

    def __init__(self, *, num_beats: int | None, silence: float = 0.0) -> None:
        self._num_beats = num_beats
        self._silence = silence
        self._round = 0
        self.answer = BeatReply()
        self.problem = ""

    def join(self) -> Assignment:
        if self.problem:
            raise MasterError(self.problem)
        self._round += 1
        first = Node(id=0, incarnation="a", name="", address=ADDRESS, num_processes=1)
        rank = 1 if self._round == 1 else 0
        return Assignment(1, self._round, rank, 2 - self._round // 2, rank, 2, first, self._silence)

    @property
    def reply(self) -> BeatReply:
        if self._num_beats is None:
            return self.answer
        self._num_beats -= 1
        return BeatReply(restart=Change.LOST if self._num_beats < 0 else None)

    def get(self, number: int, _key: str, _seconds: float) -> str:
        raise MasterError(f"round {number} is over; join again")

    def put(self, _number: int, _key: str, _value: str) -> None:
        pass


def test_a_round_that_breaks_up_while_it_begins_is_left_for_the_next() -> None:
    node = cast("NodeClient", Unlucky(num_beats=3))
    met = Handler(node, "job").next_rendezvous()
    assert (met.rank, met.world_size) == (0, 1)
    assert met.bootstrap_store_info is not None
    assert met.bootstrap_store_info.master_addr == ADDRESS


def test_a_store_that_is_not_to_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "STORE_SECONDS", 0.5)
    node = cast("NodeClient", Unlucky(num_beats=None))
    with pytest.raises(RendezvousConnectionError, match="round 1 has no store: round 1 is over"):
        Handler(node, "job").next_rendezvous()


def test_a_round_is_not_given_up_before_the_master_can_know_that_a_node_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(handler, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    node = cast("NodeClient", Unlucky(num_beats=2000, silence=600.0))
    assert Handler(node, "job").next_rendezvous().world_size == 1
    assert now > handler.STORE_SECONDS


def test_a_master_that_refuses_a_node_is_asked_once() -> None:
    node = Unlucky(num_beats=None)
    node.answer = BeatReply(restart=Change.LOST)  # of the round before
    node.problem = "the token is missing or wrong"
    with pytest.raises(RendezvousConnectionError, match="token is missing or wrong"):
        Handler(cast("NodeClient", node), "job").next_rendezvous()


def test_an_address_that_cannot_be_resolved_is_refused() -> None:
    handler.check_address("127.0.0.1")
    for wrong in ("no such host", "a..b"):
        with pytest.raises(ValueError, match=r"(?s)cannot be resolved .*\n.*--local-addr"):
            handler.check_address(wrong)


def refuse(*_: object) -> None:
    """No node is tested."""
    raise AssertionError
