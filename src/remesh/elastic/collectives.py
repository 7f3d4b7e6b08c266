"""Wake a process that waits in a collective whose partners are gone.

In gloo only the neighbours of a dead rank get an error; the others wait for the group's timeout.
`abort` of the gloo backend does not wake them, and `destroy_process_group` leaves the connections
open while modules hold the group. What wakes a thread in a collective is that another operation of
its group times out: gloo then fails all that is pending in the group and closes its connections,
so the collectives of the peers raise as well. A receive of a message that no rank sends does it. To
shut the connections down would not be enough: while one has a message for a receive that has failed
already, gloo does not read it, and does not notice its end.

A process may also wait at the store of the world for a rank that has died. Its connections to the
store are shut down. And one that makes a group waits until each rank that has a smaller address
has connected, which a dead one never does. It gets connections that end at once in their place.

NCCL's communicators are aborted at the same time, each in a thread: one frees memory of the device,
which waits for what another one still has running there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import Any

log = logging.getLogger(__name__)

_TAG = 0x7E3E5
"""Of the message that no rank sends."""
_SHORT = timedelta(milliseconds=1)
WORKER_SECONDS = 0.1
"""How long a worker of a data loader may take to end by itself."""

_left: list[Any] = []
"""The backends of gloo of the world that was left last.

An old model in DistributedDataParallel holds its group, and destroys it with Python's lock held,
which the threads of the group may need to end. So it is never the last to hold it.
"""


def break_collectives(store_port: int) -> None:
    """Let all collectives of gloo in this process raise, and what waits for the store."""
    for backend in _backends("cpu", "ProcessGroupGloo"):
        torch: Any = sys.modules["torch"]
        for peer in set(range(backend.size())) - {backend.rank()}:
            with contextlib.suppress(RuntimeError):  # it times out, or this connection has failed
                backend.recv([torch.empty(1, device="cpu")], peer, _TAG).wait(_SHORT)
    _shut_down_connections(store_port)
    _connect_for_peers(store_port)


def abort_nccl() -> None:
    """Abort the communicators of NCCL, if any group of this process has one.

    What waits for a device goes on then, as if their collectives were done.
    """
    backends = _backends("cuda", "ProcessGroupNCCL")
    threads = [threading.Thread(target=backend.abort, daemon=True) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _backends(device: str, kind: str) -> list[Any]:
    """The backends of a class of torch that the groups of this process have for a device."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    wanted = getattr(c10d, kind, None)
    if wanted is None:  # torch is not loaded, or was built without it
        return []
    found = []
    for group in list(c10d._world.pg_names):  # noqa: SLF001 - there is no public list
        with contextlib.suppress(RuntimeError):  # a group without a backend for the device
            backend = group._get_backend(sys.modules["torch"].device(device))  # noqa: SLF001
            backend = getattr(backend, "wrapped_pg", backend)  # that of TORCH_DISTRIBUTED_DEBUG
            if isinstance(backend, wanted):
                found.append(backend)
    return found


def is_within(frame: FrameType | None, name: str) -> bool:
    """True if a frame is of a function of this name, or of what it has called."""
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def without_patience() -> Iterator[None]:
    """Have data loaders that are freed end their workers, also in the midst of a batch.

    Torch waits for each of them first, for 5 s, and all that may take longer than the agent waits.
    """
    utils: Any = sys.modules.get("torch.utils.data._utils", SimpleNamespace())
    usual = getattr(utils, "MP_STATUS_CHECK_INTERVAL", None)
    utils.MP_STATUS_CHECK_INTERVAL = WORKER_SECONDS
    try:
        yield
    finally:
        utils.MP_STATUS_CHECK_INTERVAL = usual


def leave_groups() -> None:
    """Destroy the process groups of this process, if there are any."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return
    if not dist.is_initialized():
        # A group whose making was interrupted has taken a number. The next one would be called by
        # another number than that of new processes, and all would wait for each other.
        dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - the counter of all groups
        return
    _left[:] = _backends("cpu", "ProcessGroupGloo")
    try:
        dist.destroy_process_group()
    except Exception:  # a group whose partners are gone; the next one does not depend on it
        log.warning("a process group was not destroyed", exc_info=True)
        dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - forgets all groups


def _shut_down_connections(port: int) -> None:
    """Shut down the connections of this process that have a port at either end."""
    for one in _sockets():
        with contextlib.suppress(OSError):  # it is not connected
            if port in (one.getsockname()[1], one.getpeername()[1]):
                one.shutdown(socket.SHUT_RDWR)


def _connect_for_peers(store_port: int) -> None:
    """If the main thread makes a group, connect to what listens here as the peers of gloo would.

    A peer says first for which pair of ranks a connection is; gloo counts those of a group.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - public
    for listener in _sockets() if is_within(frame, "_new_process_group_helper") else ():
        address = listener.getsockname()
        is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if is_listening and address[1] != store_port:
            with contextlib.suppress(OSError):  # one of another library may take no more
                for pair in range(int(os.environ.get("WORLD_SIZE", "1"))):
                    with socket.socket(listener.family) as peer:
                        peer.settimeout(0.2)
                        peer.connect(address)
                        peer.sendall(struct.pack("n", pair))


def _sockets() -> Iterator[socket.socket]:
    """The internet sockets of this process, each to be used until the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6):
                        yield one
