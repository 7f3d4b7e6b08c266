"""`torchrun --rdzv-backend=remesh`: worlds formed by a remesh master, in an unchanged torchrun.

torchrun finds it through `remesh.elastic.torchrun`. Options that torchrun has no flag for come by
`--rdzv-conf`: `name`, `node_id`, `node_unit`, `last_call`, `join_timeout`,
`token_file`, `tls_ca`, `beat_seconds`, `master_patience`, and `nproc`, because torchrun does not
pass the number of processes to a handler.

torchrun requests the next round after every stop of its processes, and polls several times a
second whether nodes wait; the newest instruction serves for that. Each launcher has a TCPStore, and
gives its port when it joins. The nodes of a round, or of a test, meet in that of the first of them,
under a prefix of their own, so that no key of an earlier round is found.
"""

from __future__ import annotations

import datetime as dt
import logging
import socket
import sys
import time
import uuid
from collections.abc import Callable

from torch.distributed import (  # type: ignore[attr-defined] # re-exported without saying so
    PrefixStore,
    TCPStore,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from remesh.elastic.client import Client, read_token
from remesh.elastic.lifecycle import exit_of
from remesh.elastic.node import NodeClient
from remesh.elastic.nodes import Outcome, Settings
from remesh.elastic.protocol import Assignment, JobEnded, Join, NodeTest, Rejected, Stop, TestResult
from remesh.errors import MasterError

log = logging.getLogger(__name__)

BACKEND = "remesh"
STORE_SECONDS = 60.0
"""How long the nodes of a round wait for the first one's TCPStore."""
CONNECT_SECONDS = 5.0
"""How long one attempt takes; between two, the round may prove to be over."""
PATIENCE = 3600.0
"""How long a launcher repeats a request that the node cannot go on without."""


def check_address(address: str) -> None:
    """Refuse an address of this node that it cannot resolve itself: its peers would hang."""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"the address {address!r} of this node cannot be resolved ({error})\nGive --local-addr "
            "a name or an address that all nodes can reach"
        ) from error


class Handler(RendezvousHandler):
    """torchrun's rendezvous, by a remesh master."""

    def __init__(self, node: NodeClient, store: TCPStore, run_id: str) -> None:
        self.node = node
        self.store = store
        self._run_id = run_id
        # torch keeps no reference to a store inside a PrefixStore.
        self._found: TCPStore | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """False: workers make a store of their own, apart from the keys of the launchers."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round and open its store.

        Raises:
            RendezvousClosedError: If the job has failed, or rejects this node.
            RendezvousConnectionError: If the master or the first node cannot be reached.
            SystemExit: If the job has succeeded without this node.
        """
        try:
            found = self.enter()
        except MasterError as error:
            raise RendezvousConnectionError(str(error)) from error
        if isinstance(found, RendezvousInfo):
            return found
        end = exit_of(found)
        if end.code == 0:
            log.info("%s", end.reason)
            raise SystemExit(0)
        raise RendezvousClosedError(end.reason)

    def enter(self) -> RendezvousInfo | Rejected | JobEnded:
        """The same, or why there is no next round for this node.

        Raises:
            MasterError: If the master or the first node cannot be reached.
        """
        while True:
            content = self.node.join()
            if not isinstance(content, Assignment):
                return content
            found = self._meet(content)
            if found is not None:
                return found
            log.info("round %d broke while it began", content.round)

    def _meet(self, assignment: Assignment) -> RendezvousInfo | None:
        """Read from the round's TCPStore where the processes connect; None if the round is over."""
        number, rank, first = assignment.round, assignment.node_rank, assignment.leader
        # The first node may have died. The master knows that after the heartbeat timeout.
        deadline = time.monotonic() + STORE_SECONDS + self.node.heartbeat_timeout
        while not self._is_over():
            try:
                self._found = self.store if rank == 0 else connect_store(first.address, first.port)
                store = PrefixStore(f"round {number}", self._found)
                info = RendezvousStoreInfo.build(rank, store, local_addr=self.node.address)
            except RuntimeError as error:
                if time.monotonic() >= deadline:
                    where = f"the first node's store at {first.address}:{first.port}"
                    raise MasterError(f"round {number} has no store: {where}: {error}") from error
                time.sleep(0.1)
            else:
                self._found.set_timeout(dt.timedelta(seconds=STORE_SECONDS))
                return RendezvousInfo(store, rank, assignment.num_nodes, info)
        return None

    def _is_over(self) -> bool:
        """True if the round, or the job, is over, by the newest instruction."""
        return isinstance(self.node.content, Stop | Rejected | JobEnded)

    def num_nodes_waiting(self) -> int:
        """More than 0 if the processes should stop and the node should join again."""
        return int(isinstance(self.node.content, Stop | Rejected))

    def is_closed(self) -> bool:
        return isinstance(self.node.content, JobEnded)

    def set_closed(self) -> None:
        self.shutdown()

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Leave the job. An exception that is being handled means that this node failed."""
        error = sys.exc_info()[1]
        outcome = Outcome.SUCCEEDED if error is None else Outcome.FAILED
        reason = "" if error is None else f"{type(error).__name__}: {error}"[:500]
        try:
            self.node.leave(outcome, reason)
        except MasterError as problem:
            log.warning("the master does not know that this node leaves: %s", problem)
            return False
        finally:
            self.node.close()
        return True


def open_store(address: str) -> TCPStore:
    """A store of this node, in which others meet."""
    limit = dt.timedelta(seconds=STORE_SECONDS)
    return TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit)


def connect_store(host: str, port: int) -> TCPStore:
    """The store of another node."""
    limit = dt.timedelta(seconds=CONNECT_SECONDS)
    return TCPStore(host, port, is_master=False, timeout=limit)


def make_handler(
    parameters: RendezvousParameters, test: Callable[[NodeTest], TestResult]
) -> Handler:
    """The handler of this node, by torchrun's rendezvous options."""
    client = Client(
        parameters.endpoint,
        token=read_token(parameters.get("token_file")),
        tls_ca=parameters.get("tls_ca"),
        patience=float(parameters.get("master_patience", PATIENCE)),
    )
    node_id = parameters.get_as_int("node_id")
    usual_name = socket.gethostname() if node_id is None else f"node-{node_id}"
    address = parameters.local_addr or client.local_address()
    check_address(address)
    store = open_store(address)
    settings = Settings(
        min_nodes=parameters.min_nodes,
        max_nodes=parameters.max_nodes,
        node_unit=int(parameters.get("node_unit", 1)),
        last_call=float(parameters.get("last_call", 5.0)),
        join_timeout=float(parameters.get("join_timeout", 600.0)),
    )
    first = Join(
        name=parameters.get("name") or usual_name,
        node_id=node_id,
        incarnation=uuid.uuid4().hex,
        address=address,
        port=store.port,
        num_processes=parameters.get_as_int("nproc", 1) or 1,
        settings=settings,
        command=parameters.get("command") or "",
        max_restarts=parameters.get_as_int("max_restarts", 3) or 0,
    )
    beat_seconds = float(parameters.get("beat_seconds", 1.0))
    node = NodeClient(client, first, test, beat_seconds=beat_seconds)
    return Handler(node, store, parameters.run_id)
