"""How a launcher gets into a round; the node, and the master behind it, do as the test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousInfo

from remesh.elastic import handler
from remesh.elastic.handler import Handler
from remesh.elastic.node import NodeClient
from remesh.elastic.nodes import Node
from remesh.elastic.protocol import Assignment, Content, Stop
from remesh.errors import MasterError

ADDRESS = "127.0.0.1"


class Unlucky:
    """A node whose first round has no store; some looks later an instruction may say why."""

    address = ADDRESS

    def __init__(self, *, num_looks: int | None, silence: float = 0.0) -> None:
        self._num_looks = num_looks
        self.heartbeat_timeout = silence
        self._round = 0
        self.problem = ""

    def join(self) -> Assignment:
        if self.problem:
            raise MasterError(self.problem)
        self._round += 1
        # Nobody listens at port 1.
        first = Node(id=0, incarnation="a", name="", address=ADDRESS, port=1, num_processes=1)
        rank = 1 if self._round == 1 else 0
        return Assignment(self._round, rank, 2 - self._round // 2, rank, 2, first)

    @property
    def content(self) -> Content | None:
        if self._num_looks is None or self._round > 1:
            return None
        self._num_looks -= 1
        return Stop(1, "node 0 left or died") if self._num_looks < 0 else None


def next_round(node: Unlucky) -> RendezvousInfo:
    """The next round of a node, which tries once to connect to a store."""
    store = handler.open_store(ADDRESS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "STORE_SECONDS", 0.0)
        patch.setattr(handler, "CONNECT_SECONDS", 0.1)
        return Handler(cast("NodeClient", node), store, "job").next_rendezvous()


def test_a_round_that_breaks_up_while_it_begins_is_left_for_the_next() -> None:
    met = next_round(Unlucky(num_looks=3, silence=60.0))
    assert (met.rank, met.world_size) == (0, 1)
    assert met.bootstrap_store_info is not None
    assert met.bootstrap_store_info.master_addr == ADDRESS


def test_a_store_that_is_not_to_be_had_is_an_error() -> None:
    missing = "round 1 has no store: the first node's store at 127.0.0.1:1"
    with pytest.raises(RendezvousConnectionError, match=missing):
        next_round(Unlucky(num_looks=None))


def test_a_round_is_not_given_up_before_the_master_can_know_that_a_node_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 100 * seconds

    monkeypatch.setattr(handler, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert next_round(Unlucky(num_looks=20, silence=600.0)).world_size == 1
    assert now > 60


def test_a_master_that_refuses_a_node_is_asked_once() -> None:
    node = Unlucky(num_looks=0)  # it is to stop the round before
    node.problem = "the token is missing or wrong"
    with pytest.raises(RendezvousConnectionError, match="token is missing or wrong"):
        next_round(node)


def test_an_address_that_cannot_be_resolved_is_refused() -> None:
    handler.check_address("127.0.0.1")
    for wrong in ("no such host", "a..b"):
        with pytest.raises(ValueError, match=r"(?s)cannot be resolved .*\n.*--local-addr"):
            handler.check_address(wrong)
