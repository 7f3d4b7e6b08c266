"""What a training process and the agent that watches it tell each other, through small files.

The process writes its `Heartbeat` to a file that the agent named (`RunInfo.heartbeat_file`). The
agent reads it whenever it likes: the file is replaced in one step, so it is never half written. If
the agent wants the state saved (the node is about to leave, say), it puts a request beside it, in
`<heartbeat file>.request`. The training reads that between two steps, saves, and removes it. After
a `save-and-hold` it waits instead until the agent removes the request. After a `hold` it waits
without a save, if its state in memory is good enough for what comes.

When a job hangs, the agent wants to know where its processes are. A process that called
`answer_stack_requests` writes the stacks of its threads to a third file, `<heartbeat file>.stacks`,
whenever it gets `STACK_SIGNAL`: faulthandler does that in C, also when the interpreter is stuck in
a collective. That the file is there tells the agent that the signal does no harm.

A process whose agent has ended must end as well, since another may train in its place. The kernel
sees to that for the process that the agent has started. One that a wrapper script has started in a
process group of its own notices it by the `AgentLock`: the agent holds a lock on its directory
while it lives, and removes the directory when it ends in order. A process that does not find the
directory knows that the agent has removed it if it sees the directory in which it was made, whose
`directory_mark` is part of its name.

All these files are hints of the moment and not worth a disk's time: they are not synced, and one
that a loss of power has spoiled is taken for none. A request may also lie in a file of any name,
for people and scripts: `read_request_file`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import hashlib
import logging
import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import msgspec

from remesh._repr import short_repr
from remesh.errors import StorageError

__all__ = ["Heartbeat", "read_heartbeat", "request", "write_heartbeat"]

StrPath = str | os.PathLike[str]

_LOGGER = logging.getLogger(__name__)

Request = Literal["save", "save-and-stop", "save-and-hold", "hold"]
"""What an agent may ask for: a save, a save after which the training ends, a save after which the
training waits until the request is removed, or that it waits without a save."""

HOLDS = ("save-and-hold", "hold")
"""Requests after which the training waits."""

STACK_SIGNAL = signal.SIGUSR2
"""Asks a process for the stacks of its threads."""


class Heartbeat(msgspec.Struct, frozen=True):
    """The progress of a training process."""

    step: int
    """The last step that is done."""
    saved_step: int | None
    """The step of the newest checkpoint that this process knows to be committed; None if there is
    none."""
    time: float
    """When this was written, in seconds since the epoch."""
    step_seconds: float | None
    """How long this process's own work of the last step took, or the whole step if that is not
    measured; None if neither is known yet."""
    waits: bool = False
    """Whether the process waits, as `save-and-hold` (then all work is saved) or `hold` asks it to.
    """

    __repr__ = short_repr


def write_heartbeat(path: StrPath, beat: Heartbeat) -> None:
    """Replace the heartbeat.

    Args:
        path: The heartbeat file; its directory must exist.
        beat: The heartbeat to write.

    Raises:
        StorageError: If the file cannot be written.
    """
    _replace(Path(path), msgspec.json.encode(beat))


def read_heartbeat(path: StrPath) -> Heartbeat | None:
    """Read a heartbeat; None if the file is missing or not a heartbeat.

    Raises:
        StorageError: If the file is there and cannot be read.
    """
    data = _read(Path(path))
    try:
        return None if data is None else msgspec.json.decode(data, type=Heartbeat)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class HeartbeatReader:
    """Reads heartbeats for an agent, which no unreadable file ends: that is logged once a file."""

    def __init__(self) -> None:
        self._unreadable: set[StrPath] = set()  # files that could not be read last

    def read(self, path: StrPath) -> Heartbeat | None:
        """As `read_heartbeat`; None also if the file cannot be read."""
        try:
            beat = read_heartbeat(path)
        except StorageError as error:
            if path not in self._unreadable:
                self._unreadable.add(path)
                _LOGGER.warning("a process is taken for one that reports nothing: %s", error)
            return None
        self._unreadable.discard(path)
        return beat


def request(path: StrPath, what: Request) -> None:
    """Request a save from the process that writes a heartbeat.

    Args:
        path: The heartbeat file.
        what: The request; it replaces an earlier request.

    Raises:
        StorageError: If the file cannot be written.
    """
    _replace(request_file(path), what.encode())


def request_file(path: StrPath) -> Path:
    """The file with the request to the process that writes a heartbeat."""
    return Path(f"{os.fspath(path)}.request")


def clear_request(path: StrPath) -> None:
    """Remove the request to the process that writes a heartbeat, if there is one."""
    clear_request_file(request_file(path))


def read_request_file(file: StrPath) -> Request | Literal[""] | None:
    """The request in a file, or None if it is not there.

    An empty one asks for a save (`touch`), unless it is still being written.
    """
    data = _read(Path(file))
    if data is None:
        return None
    text = data.decode(errors="replace").strip()
    if not text:
        return ""
    for known in get_args(Request):
        if text == known:
            return known  # type: ignore[no-any-return]
    raise StorageError(
        f"{file} asks for {text[:40]!r}; write one of {', '.join(get_args(Request))} into it, or "
        "remove it"
    )


def clear_request_file(file: StrPath) -> None:
    """Remove a file with a request, if it is there."""
    try:
        Path(file).unlink(missing_ok=True)
    except OSError as error:
        raise _cannot("remove", file, error) from error


def directory_mark(parent: StrPath) -> str:
    """A part of the name of an agent's directory: it says in which directory it was made.

    It is the same for all processes that see that directory, in containers too, and another for any
    other directory, also that of the same path on another machine.
    """
    status = os.stat(parent)
    boot = _read(Path("/proc/sys/kernel/random/boot_id"))
    identity = f"{boot!r}:{status.st_dev}:{status.st_ino}"
    return hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


class AgentLock:
    """The lock that the agent of this process holds while it lives.

    If the directory (`RunInfo.agent_dir`) is empty, or was made where this process does not see it
    (in a container, say), nothing is known of the agent.
    """

    def __init__(self, directory: str) -> None:
        self._descriptor: int | None = None
        self._is_removed = False
        if not directory:
            return
        try:
            self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            parent, name = os.path.split(directory)
            with contextlib.suppress(OSError):
                self._is_removed = directory_mark(parent) in name
        except OSError:
            pass  # nothing is known

    def is_free(self) -> bool:
        """True if the agent has ended. False if nothing is known of it."""
        if self._descriptor is None:
            return self._is_removed
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # it is held, or the file system knows no locks
            return False
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Give the descriptor back; nothing is known of the agent after that."""
        self._is_removed = False
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def stacks_file(path: StrPath) -> Path:
    """Where the process that writes a heartbeat writes its stacks when it is asked."""
    return Path(f"{os.fspath(path)}.stacks")


def answer_stack_requests(path: StrPath) -> Callable[[], None] | None:
    """Let this process write the stacks of its threads whenever it gets `STACK_SIGNAL`.

    Returns a function that ends this; None if the signal has a handler already, which is left
    alone.
    """
    if _is_handled(STACK_SIGNAL):
        return None
    file = stacks_file(path)
    try:
        stream = file.open("ab", buffering=0)
    except OSError as error:
        raise _cannot("write", file, error) from error
    faulthandler.register(STACK_SIGNAL, stream, all_threads=True)

    def end() -> None:
        # A handler that was set since stays; faulthandler would put the first one back.
        if signal.getsignal(STACK_SIGNAL) == signal.SIG_DFL:
            faulthandler.unregister(STACK_SIGNAL)
            stream.close()
        file.unlink(missing_ok=True)

    return end


def catches(status: bytes, number: signal.Signals) -> bool:
    """True if a process has a handler for a signal, by its `/proc/PID/status`."""
    caught = [line.split()[1] for line in status.splitlines() if line.startswith(b"SigCgt:")]
    return bool(caught) and bool(int(caught[0], 16) >> (number - 1) & 1)


def _is_handled(number: signal.Signals) -> bool:
    if signal.getsignal(number) != signal.SIG_DFL:
        return True
    # Handlers that were not set by the signal module are seen by the kernel alone.
    return catches(_read(Path("/proc/self/status")) or b"", number)


def _replace(path: Path, data: bytes) -> None:
    """Give a file new content in one step."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        try:
            beside.write_bytes(data)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot("write", path, error) from error


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _cannot("read", path, error) from error


def _cannot(action: str, path: StrPath, error: OSError) -> StorageError:
    return StorageError(
        f"cannot {action} {path}: {error.strerror}; check the directory and its permissions"
    )
