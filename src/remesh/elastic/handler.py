"""`torchrun --rdzv-backend=remesh`: worlds formed by a remesh master, in an unchanged torchrun.

torchrun finds it through `remesh.elastic.torchrun`. What the master needs to know and torchrun has
no flag for comes by `--rdzv-conf`: `name`, `node_id`, `node_unit`, `last_call`, `join_timeout`,
`token_file`, `tls_ca`, `beat_seconds`, `master_patience`, and `nproc`, because torchrun does not
tell a handler how many processes it starts.

torchrun asks for the next round after every stop of its processes, and looks several times a second
whether nodes wait; the answer to the last heartbeat serves for that. Each round has a store of its
own, in the launcher of the first node, so that no key of an earlier round is ever found.
"""

from __future__ import annotations

import datetime as dt
import logging
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

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
from remesh.elastic.node import JobOverError, Node, NodeBarredError, NodeOptions
from remesh.elastic.protocol import Placed
from remesh.elastic.rendezvous import Outcome, Settings
from remesh.errors import MasterError

log = logging.getLogger(__name__)

BACKEND = "remesh"
STORE_SECONDS = 60.0
"""How long the nodes of a round wait for the first one's store."""
PATIENCE = 3600.0
"""How long a launcher waits for a master that is away, where that holds up the node."""


def check_address(address: str) -> None:
    """Refuse an address of this node that it cannot resolve itself: its peers would hang.

    Raises:
        ValueError: If it cannot be resolved.
    """
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"the address {address!r} of this node cannot be resolved ({error}); give --local-addr "
            "a name or an address that all nodes can reach"
        ) from error


class Handler(RendezvousHandler):
    """What torchrun asks for worlds.

    Args:
        node: This node.
        run_id: Names the job.
    """

    def __init__(self, node: Node, run_id: str) -> None:
        self.node = node
        self._run_id = run_id
        # torch keeps no reference to a store inside a PrefixStore.
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """The name by which torchrun knows the handler."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Workers make a store of their own: no key of theirs meets one of the launchers'."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round and open its store.

        Raises:
            RendezvousClosedError: If the job has failed, or does not want this node.
            RendezvousConnectionError: If the master or the first node cannot be reached.
            SystemExit: If the job has succeeded without this node.
        """
        while True:
            try:
                placed = self.node.join()
            except JobOverError as over:
                if over.outcome is Outcome.SUCCEEDED:
                    log.info("%s", over)
                    raise SystemExit(0) from over
                raise RendezvousClosedError(str(over)) from over
            except NodeBarredError as barred:
                raise RendezvousClosedError(f"this node is not used: {barred}") from barred
            except MasterError as error:
                raise RendezvousConnectionError(str(error)) from error
            try:
                return self._meet(placed)
            except MasterError as error:
                if not self._is_over():
                    raise RendezvousConnectionError(str(error)) from error
                log.info("the round broke while it began: %s", self.node.reply.reason)

    def _meet(self, placed: Placed) -> RendezvousInfo:
        """Open the round's store and learn from it where the processes meet.

        Raises:
            MasterError: If the store is not to be had. If that is because the round is over, a
                heartbeat has said so by then.
        """
        address = self.node.options.address
        try:
            store = self._open_store(placed.round, placed.rank, placed.leader.address)
            prefixed = PrefixStore(f"round {placed.round}", store)
            meeting = RendezvousStoreInfo.build(placed.rank, prefixed, local_addr=address)
        except (MasterError, RuntimeError) as error:
            # The first node has died, say. The master knows that after its silence, not before.
            deadline = time.monotonic() + STORE_SECONDS + placed.heartbeat_timeout
            while not self._is_over() and time.monotonic() < deadline:
                time.sleep(0.1)
            raise MasterError(f"round {placed.round} has no store: {error}") from error
        return RendezvousInfo(prefixed, placed.rank, placed.num_nodes, meeting)

    def _is_over(self) -> bool:
        """Whether the master has said that the round, or the job, is over."""
        reply = self.node.reply
        return reply.restart is not None or reply.over is not None

    def _open_store(self, number: int, rank: int, address: str) -> TCPStore:
        """The round's store: the first node makes it and says where it is."""
        limit = dt.timedelta(seconds=STORE_SECONDS)
        if rank == 0:
            store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit)
            self.node.put(number, "store", f"{address}:{store.port}")
        else:
            host, _, port = self.node.get(number, "store", STORE_SECONDS).rpartition(":")
            try:
                store = TCPStore(host, int(port), is_master=False, timeout=limit)
            except RuntimeError as error:
                raise MasterError(f"the first node's store at {host}:{port}: {error}") from error
        self._store = store
        return store

    def num_nodes_waiting(self) -> int:
        """More than 0 if the processes should stop and meet again."""
        return int(self.node.reply.restart is not None)

    def is_closed(self) -> bool:
        """Whether the job has ended."""
        return self.node.reply.over is not None

    def set_closed(self) -> None:
        """End the job for this node."""
        self.shutdown()

    def get_run_id(self) -> str:
        """The job's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """Say that this node goes; torchrun does not tell how it ended, but it may be raising."""
        error = sys.exc_info()[1]
        outcome = Outcome.SUCCEEDED if error is None else Outcome.FAILED
        reason = "" if error is None else f"{type(error).__name__}: {error}"[:500]
        try:
            self.node.leave(outcome, reason)
        except MasterError as problem:
            log.warning("the master does not know that this node goes: %s", problem)
            return False
        finally:
            self.node.close()
        return True


def make_node(parameters: RendezvousParameters, test: Callable[..., Any]) -> Node:
    """This node, as torchrun's rendezvous options describe it.

    Raises:
        ValueError: If an option is missing or wrong; the message names it.
    """
    client = Client(
        parameters.endpoint,
        token=read_token(parameters.get("token_file")),
        tls_ca=parameters.get("tls_ca"),
        patience=float(parameters.get("master_patience", PATIENCE)),
    )
    node_id = parameters.get_as_int("node_id")
    address = parameters.local_addr or client.local_address()
    check_address(address)
    settings = Settings(
        min_nodes=parameters.min_nodes,
        max_nodes=parameters.max_nodes,
        node_unit=parameters.get_as_int("node_unit", 1) or 1,
        last_call=float(parameters.get("last_call", 5.0)),
        join_timeout=float(parameters.get("join_timeout", 600.0)),
    )
    options = NodeOptions(
        name=parameters.get("name") or (f"node-{node_id}" if node_id is not None else _host_name()),
        node_id=node_id,
        address=address,
        num_processes=parameters.get_as_int("nproc", 1) or 1,
        settings=settings,
        max_restarts=parameters.get_as_int("max_restarts", 3) or 0,
        beat_seconds=float(parameters.get("beat_seconds", 1.0)),
    )
    return Node(client, options, test)


def _host_name() -> str:
    return socket.gethostname()
