"""An interpreter that has imported what the training imports, and forks its processes.

`fork_server.py CHANNEL AGENT MODULES SCRIPT...`

Importing torch takes seconds. The agent starts this file once, with the interpreter of the
training, and asks it for processes by messages over a socket (`warm`). A process that it forks is
a child of the agent, as if the agent had started it: it is forked twice, and the agent adopts it
when the process between the two has ended. So signals, exit codes and the end with the agent are
those of any child, and the death of this server ends no training.

What is imported here must be safe to fork: after each module it is looked whether a thread runs or
a device was opened, and if so the server ends and says which module it was. Threads of numpy's
linear algebra are no obstacle: its library ends and starts them anew around a fork.

The forked process gets the environment, directory and log files of its request, a session of its
own, and random numbers that were not drawn before. The kernel goes on showing the environment
of this server for it, so the process writes the name of its socket there (`guard`).

The file is run by path with the interpreter of the training, which may not have remesh, so it
imports nothing but the standard library, and `child` and `script`, by path as well.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

AGENT_SOCKET = "REMESH_AGENT_SOCKET"
SERVER = "fork-server"
"""The name of a socket that the kernel shows for this server; others are no longer."""
GO = b"go"
"""The agent knows the process, which may begin."""
MAX_MESSAGE = 4 << 20
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/davinci", "/dev/accel")


def serve(channel: socket.socket, agent: int, shown: ctypes.Array[ctypes.c_char]) -> None:
    """Fork processes until the agent closes the channel."""
    while message := channel.recv(MAX_MESSAGE):
        asked = json.loads(message)
        try:
            pid_of, tell_pid = os.pipe()
            may_go, let_go = os.pipe()
            middle = os.fork()
            if middle == 0:
                pid = os.fork()
                if pid:
                    os.write(tell_pid, str(pid).encode())
                    os._exit(0)
                channel.close()
                for descriptor in (pid_of, tell_pid, let_go):
                    os.close(descriptor)
                _become(asked, may_go, agent, shown)
            for descriptor in (tell_pid, may_go):
                os.close(descriptor)
            os.waitpid(middle, 0)  # from now on it is the agent's child
            pid = int(os.read(pid_of, 32))
            channel.send(json.dumps({"pid": pid}).encode())
            if channel.recv(len(GO)) != GO:
                return  # the agent does without: the process ends with this one
            os.write(let_go, GO)
        except OSError as error:
            channel.send(json.dumps({"error": str(error)}).encode())
            return
        for descriptor in (pid_of, let_go):
            os.close(descriptor)


def _become(
    asked: dict[str, Any], may_go: int, agent: int, shown: ctypes.Array[ctypes.c_char]
) -> NoReturn:
    try:
        os.setsid()
        if os.read(may_go, len(GO)) != GO:
            os._exit(1)  # the agent has given it up; the log files may be those of another by now
        os.close(may_go)
        argv = asked["argv"]
        _child.show_name(argv[1] if argv[0] == "-m" else argv[0])
        _child.redirect(asked["outputs"])
        _child.end_with(agent)
        os.chdir(asked["directory"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        # Have the kernel show the socket in the environment of this process.
        shown.raw = os.fsencode(os.environ[AGENT_SOCKET]).ljust(len(shown), b"\0")
        _draw_anew()
    except BaseException as error:  # noqa: BLE001 - nothing may return into the server's loop
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        else:
            print(error, file=sys.stderr)  # noqa: T201 - the process's own words
        os._exit(1)
    _script.run(argv)
    raise AssertionError("it ends the process")


def _draw_anew() -> None:
    """Seed what draws random numbers from the state that all forks would share."""
    numpy: Any = sys.modules.get("numpy")
    if "numpy.random" in sys.modules:
        numpy.random.seed()  # Python's own module does it by itself, torch begins with a constant


def preload(modules: Sequence[str]) -> None:
    """Import modules; one that fails is left to the script.

    A RuntimeError if a process could not be forked any more.
    """
    num_threads = _num_threads()  # an allocator may have some from the beginning
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever a module raises
            print(f"remesh: {name} is not preloaded: {error}", file=sys.stderr)  # noqa: T201
            continue
        if name == "numpy":
            num_threads = _num_threads()
        if threading.active_count() > 1 or _num_threads() > num_threads:
            raise RuntimeError(f"importing {name} starts a thread")
        device = _open_device()
        if device:
            raise RuntimeError(f"importing {name} opens {device}")


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _open_device() -> str:
    """An accelerator that this process has opened; empty if none."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # that of the listing itself
        if target.startswith(_DEVICES):
            return target
    return ""


def _load(name: str) -> ModuleType:
    """A module that lies beside this file: remesh need not be installed for this interpreter."""
    path = Path(__file__).resolve().with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_remesh_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(arguments: list[str]) -> None:
    """Preload, say so, and serve."""
    number, agent, modules, *argv = arguments
    channel = socket.socket(fileno=int(number))
    channel.set_inheritable(False)
    _child.end_with(int(agent))
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    room = len(os.fsencode(os.environ[AGENT_SOCKET]))
    shown = (ctypes.c_char * room).from_address(getenv(AGENT_SOCKET.encode()))
    if not sys.flags.safe_path:
        # As it will be for the script; now it is the directory of this file.
        sys.path[0] = os.getcwd() if argv[0] == "-m" else str(Path(argv[0]).resolve().parent)
    try:
        preload(modules.split(",") if modules else [])
    except RuntimeError as error:
        channel.send(json.dumps({"error": str(error)}).encode())
        return
    gc.collect()
    gc.freeze()  # collections would copy the pages that all processes share
    channel.send(b"{}")  # ready
    serve(channel, int(agent), shown)


if __name__ == "__main__":
    _child, _script = _load("child"), _load("script")
    main(sys.argv[1:])
