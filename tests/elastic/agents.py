"""Agents without processes: real sessions with a master, which say what a test wants said."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from remesh.elastic.client import Client
from remesh.elastic.failures import ProcessFailure
from remesh.elastic.job import Policy
from remesh.elastic.journal import Journal
from remesh.elastic.master import Master
from remesh.elastic.nodes import Outcome, Settings
from remesh.elastic.progress import RankProgress
from remesh.elastic.protocol import (
    PROTOCOL_VERSION,
    Assignment,
    Beat,
    Content,
    JobEnded,
    Join,
    Leave,
    Rejected,
    ReportFailures,
    Sender,
    Stop,
    Waiting,
)
from remesh.elastic.server import ServerOptions, ServerThread
from remesh.elastic.session import Session
from remesh.elastic.status import Status
from remesh.errors import MasterError
from tests.waiting import wait_until

SETTINGS = Settings(min_nodes=2, max_nodes=4, node_unit=1, last_call=0.2, join_timeout=60)
PATIENCE = 120.0

K = TypeVar("K")


def join_of(number: int, **changes: Any) -> Join:
    """A node of one process joins."""
    join = Join(
        name=f"host-{number}",
        node_id=number,
        incarnation=f"{number}a",
        address="127.0.0.1",
        num_processes=1,
        settings=SETTINGS,
    )
    return msgspec.structs.replace(join, **changes)


def failure_of(node_id: int, **changes: Any) -> ProcessFailure:
    """The process of such a node fails in the first round."""
    failure = ProcessFailure(
        node_id=node_id, round=1, rank=node_id, local_rank=0, exit_code=1, time=1.0
    )
    return msgspec.structs.replace(failure, **changes)


class Clock:
    """Time that passes as the test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class SilentAgent:
    """An agent that sends nothing by itself."""

    def __init__(self, url: str, number: int, *, token: str = "", incarnation: str = "") -> None:
        self.number = number
        self.incarnation = incarnation or f"{number}a"
        self.round = self._seen = 0
        client = Client(url, token=token)
        self._beats: list[Beat] = []
        self.session = Session(client, self._next_beat, lambda: 3600.0)

    def _next_beat(self) -> Beat | None:
        return self._beats.pop() if self._beats else None

    def sender(self) -> Sender:
        return Sender(node_id=self.number, incarnation=self.incarnation, round=self.round)

    def say_join(self, **changes: Any) -> None:
        own = {"incarnation": self.incarnation, "num_processes": 2, "after_round": self.round}
        self.session.say(join_of(self.number, **{**own, **changes}))

    def next_content(self) -> Content:
        """The content of an instruction that came since this was called last."""
        seen = self._seen
        newest = self.session.wait(lambda one: one if one.number > seen else None, PATIENCE)
        self._seen = newest.number
        return newest.content

    def shown(self, kind: type[K]) -> K:
        """The content of the newest instruction, once it is of a kind."""

        def content(newest: Any) -> K | None:
            return newest.content if isinstance(newest.content, kind) else None

        return self.session.wait(content, PATIENCE)

    def placed(self) -> Assignment:
        """The assignment to the next round."""

        def next_one(newest: Any) -> Assignment | None:
            content = newest.content
            is_next = isinstance(content, Assignment) and content.round > self.round
            return content if is_next else None

        found = self.session.wait(next_one, PATIENCE)
        self.round = found.round
        self.session.forget()
        return found

    def join(self, **changes: Any) -> Assignment:
        self.say_join(**changes)
        return self.placed()

    def beat(self, ranks: dict[int, RankProgress] | None = None) -> None:
        self._beats.append(Beat(**self.sender(), ranks=ranks or {}))
        self.session.hurry()

    def report(self, *failures: ProcessFailure) -> Stop | Rejected | JobEnded:
        """Report failures; what follows from them."""

        def end_of_world(newest: Any) -> Any:
            content = newest.content
            return content if isinstance(content, Stop | Rejected | JobEnded) else None

        self.session.say(ReportFailures(**self.sender(), failures=failures))
        found: Stop | Rejected | JobEnded = self.session.wait(end_of_world, PATIENCE)
        return found

    def failure(self, rank: int, exit_code: int = -9, **changes: Any) -> ProcessFailure:
        own = {"round": self.round, "rank": rank, "local_rank": rank % 2, "exit_code": exit_code}
        return failure_of(self.number, **{**own, **changes})

    def leave(self, outcome: Outcome) -> None:
        self.session.say(Leave(**self.sender(), outcome=outcome))

    def waiting(self) -> Waiting:
        return self.shown(Waiting)

    def waits_as(self) -> int:
        """The id under which it waits."""
        return self.session.wait(
            lambda newest: newest.node_id if isinstance(newest.content, Waiting) else None, PATIENCE
        )


class Served:
    """A master that serves, and agents of it."""

    def __init__(self, server: ServerThread, master: Master, token: str) -> None:
        self.server = server
        self.master = master
        self.url = server.url
        self.token = token
        self.agents: dict[int, SilentAgent] = {}

    def agent(self, number: int, incarnation: str = "") -> SilentAgent:
        """An agent of a node; another one if it has another incarnation."""
        known = self.agents.get(number)
        if known is None or (incarnation and known.incarnation != incarnation):
            if known is not None:
                known.session.end(0.0)
            agent = SilentAgent(self.url, number, token=self.token, incarnation=incarnation)
            self.agents[number] = agent
        return self.agents[number]

    def join_all(self, numbers: Iterable[int], **changes: Any) -> dict[int, Assignment]:
        """Let nodes join the next round together."""
        agents = [self.agent(number) for number in numbers]
        for agent in agents:
            agent.session.forget()
            agent.say_join(**changes)
        return {agent.number: agent.placed() for agent in agents}

    def beat(self, number: int, ranks: dict[int, RankProgress] | None = None) -> None:
        """Let a node send a heartbeat, and wait until the master has it."""
        before = self.master.num_messages
        self.agent(number).beat(ranks)
        wait_until(lambda: self.master.num_messages > before, "the heartbeat")

    def get(self, name: str) -> tuple[int, Any]:
        return ask(self.url, name, token=self.token)

    def close(self) -> None:
        for agent in self.agents.values():
            agent.session.end(0.0)


@contextlib.contextmanager
def serving(
    journal: Any = ":memory:",
    options: ServerOptions | None = None,
    *,
    clock: Clock | None = None,
    on_excluded: str | None = None,
    **policy: Any,
) -> Iterator[Served]:
    """A master with its sockets."""
    options = options or ServerOptions()
    policy.setdefault("heartbeat_timeout", 600.0)
    master = Master(Policy(**policy), Journal(journal), clock, on_excluded)
    with ServerThread(master, options) as server:
        served = Served(server, master, options.token)
        try:
            yield served
        finally:
            served.close()


def patient_status(client: Client) -> Status:
    """The status, of a master that may be about to start."""
    ends = time.monotonic() + PATIENCE
    while True:
        try:
            return client.status()
        except MasterError:
            if time.monotonic() > ends:
                raise
        time.sleep(0.1)


def ask(
    url: str, name: str, body: object = None, token: str = "", version: int = PROTOCOL_VERSION
) -> tuple[int, Any]:
    """The HTTP status and the body of a reply to a person's request."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=900)
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    with contextlib.closing(connection):
        method = "GET" if body is None else "POST"
        sent = None if body is None else json.dumps(body)
        connection.request(method, f"{parts.path}/v{version}/{name}", sent, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
