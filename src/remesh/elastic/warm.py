"""Starts training processes from an interpreter that has imported their modules already.

The agent's side of `fork_server`. If there is no server, or it has died, or does not answer, the
log says why, and the process is started cold (`processes`); a server that has died is started again
a few times.

Which modules are preloaded: those that the user names (`--preload`), or, for a script that uses
`remesh.elastic`, what its first lines import of packages of which it is known that importing them
starts nothing and depends on nothing that the script could set before.
"""

from __future__ import annotations

import ast
import ctypes
import json
import logging
import os
import re
import select
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from remesh.elastic import fork_server

log = logging.getLogger(__name__)

KNOWN = ("torch", "numpy", "remesh")
"""Packages that may be preloaded without being asked for."""
LATER = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "remesh.training.manager",
    "remesh.training.survivors",
    "remesh.elastic.entries",
)
"""What a training imports with its first steps, where it has torch."""
READY_SECONDS = 120.0
"""How long processes wait for a server that is still importing."""
REPLY_SECONDS = 30.0
"""How long a server may take for a fork."""
NUM_BEFORE_SCRIPT = 3
"""Words of a command before those of the script: the interpreter, `-u`, and `script.py`."""
MAX_STARTS = 4
"""How often a server is started."""
_PR_SET_CHILD_SUBREAPER = 36


def modules_of(script: str, *, is_module: bool = False) -> tuple[str, ...]:
    """The modules that can be preloaded for a script without being asked for.

    None for a script that does not use `remesh.elastic`, or is no source.
    """
    path = Path(f"{script.replace('.', '/')}.py" if is_module else script)
    try:
        source = path.read_bytes()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return ()
    if not re.search(rb"\bremesh\b.{0,80}?\belastic\b", source, re.DOTALL):
        return ()
    found = dict.fromkeys(name for name in _first_imports(tree) if name.partition(".")[0] in KNOWN)
    if any(name.partition(".")[0] == "torch" for name in found):
        found |= dict.fromkeys(LATER)
        found = {"numpy": None} | found  # its threads are told from those of others
    else:
        log.warning(
            "new processes start cold, for %s does not import torch before all else\n"
            "Move its imports to the top, or name what to import by --preload",
            path,
        )
    return tuple(found)


def _first_imports(tree: ast.Module) -> Iterator[str]:
    """The modules that are imported before anything else happens."""
    for place, node in enumerate(tree.body):
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.Expr(value=ast.Constant()) if place == 0:
                pass  # the docstring
            case _:
                return


class Forked:
    """A child of this process that another has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


class Warm:
    """Forks processes with the modules that they import first."""

    def __init__(self, modules: Sequence[str], directory: str, command: Sequence[str]) -> None:
        self._modules = modules
        self._directory = directory
        self._python, self._argv = command[0], command[NUM_BEFORE_SCRIPT:]
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._is_ready = False
        self._starts_left = MAX_STARTS if modules else 0

    def look_after(self) -> None:
        """Start a server if there is none, or none any more; never waits."""
        if self._server is not None and self._server.poll() is None:
            return
        if self._server is not None:
            self._give_up(f"it ended with exit code {self._server.returncode}")
        if not self._starts_left:
            return
        self._starts_left -= 1
        try:
            self._start()
        except OSError as error:
            self._give_up(str(error))

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel, self._is_ready = ours, False
        with theirs:
            number = theirs.fileno()
            own = (str(number), str(os.getpid()), ",".join(self._modules))
            marks = {
                fork_server.AGENT_SOCKET: f"{self._directory}/{fork_server.SERVER}",
                # Asking whether there is a GPU must not open it.
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            }
            self._server = subprocess.Popen(  # noqa: S603 - our own file
                [self._python, "-u", fork_server.__file__, *own, *self._argv],
                env=os.environ | marks,
                pass_fds=[number],
                start_new_session=True,
            )

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], outputs: Sequence[str]
    ) -> Forked | None:
        """Have a process forked whose outputs go into files; a child of this process.

        None if there is no server that does it.
        """
        channel = self.wait()
        if channel is None:
            return None
        message = {
            "argv": command[NUM_BEFORE_SCRIPT:],
            "environment": dict(environment),
            "directory": str(Path.cwd()),
            "outputs": outputs,
        }
        try:
            with _adopting():
                channel.send(json.dumps(message).encode())
                pid = int(self._receive(channel, REPLY_SECONDS)["pid"])
                channel.send(fork_server.GO)  # without it, the process ends
                return Forked(pid)
        except (OSError, KeyError, ValueError) as error:
            self._give_up(str(error))
            return None

    def wait(self) -> socket.socket | None:
        """Wait until processes start warm; None if they will not."""
        self.look_after()
        channel = self._channel
        if channel is None or self._is_ready:
            return channel
        try:
            self._receive(channel, READY_SECONDS)
        except (OSError, ValueError) as error:
            self._give_up(str(error))
            return None
        log.info("processes start from an interpreter that has imported their modules")
        self._is_ready = True
        return channel

    def _receive(self, channel: socket.socket, seconds: float) -> dict[str, Any]:
        if not select.select([channel], [], [], seconds)[0]:
            raise TimeoutError(f"no answer within {seconds:g} s")
        data = channel.recv(fork_server.MAX_MESSAGE)
        if not data:
            raise ConnectionError("it ended")
        said: dict[str, Any] = json.loads(data)
        if "error" in said:
            self._starts_left = 0  # it would be the same again
            raise OSError(f"{said['error']}; name what to import by --preload")
        return said

    def _give_up(self, why: str) -> None:
        """Do without the server: the next process looks for another one."""
        log.warning("the interpreter for new processes does not work, they start cold: %s", why)
        self.close()

    def close(self) -> None:
        """End the server. The processes that it has forked stay."""
        if self._channel is not None:
            self._channel.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._channel = self._server = None


@contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of what descendants of this process leave behind, meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel lets no process adopt others")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
