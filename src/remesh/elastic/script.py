"""Run a script as Python does, but end the process without finalising the interpreter.

`python -m remesh.elastic.script [-m] SCRIPT [ARGS]...`

While Python finalises its interpreter, a thread of torch may free the last reference to a Python
object; gloo's worker threads do so with the last collective of a training. Python ends a thread
that then asks for the interpreter's lock, C++ does not allow that where it happens, and the process
dies by SIGABRT ("terminate called without an active exception") although its work is done.

So this module runs the script in a `__main__` of its own, waits for its threads, runs its exit
handlers and flushes its files as the interpreter would, and then leaves with the script's exit code
while the interpreter is still whole. Objects that are alive at the end are not destroyed: what has
to happen at the end belongs into a `with` block or an exit handler, not into `__del__`.

`remesh run` starts scripts by the path of this file, with any Python, so it imports the standard
library alone.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import io
import os
import runpy
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NoReturn

__all__ = ["finish"]

_USAGE = "usage: python -m remesh.elastic.script [-m] SCRIPT [ARGS]..."
_EXIT_USAGE = 2
_EXIT_NOT_FLUSHED = 120
"""What Python ends with if standard output cannot be flushed."""


def finish(status: int = 0) -> NoReturn:
    """End this process as Python would, but without finalising the interpreter.

    Waits for the threads that are not daemons, runs the exit handlers, and flushes all files.
    Processes that `torch.multiprocessing` started may call it as their last act.

    Args:
        status: The exit code.
    """
    status = _wind_up(status)
    os._exit(status & 0xFF)


def _wind_up(status: int) -> int:
    """Do what Python does before it finalises the interpreter; the exit code."""
    _guarded(threading._shutdown)  # type: ignore[attr-defined] # noqa: SLF001 - as multiprocessing
    _guarded(atexit._run_exitfuncs)  # noqa: SLF001 - as multiprocessing does
    return _flush(status)


def _guarded(call: Callable[[], object]) -> None:
    """Call a function whose failure does not change how the process ends, as in Python."""
    try:
        call()
    except BaseException:  # noqa: BLE001 - a Ctrl-C, say; the next thing is still to be done
        traceback.print_exc()


def _flush(status: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError) as error:
            status = _EXIT_NOT_FLUSHED
            _complain(f"remesh.elastic.script: cannot flush {stream}: {error}")
    # Text first: its bytes go into the buffers that are flushed after it.
    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
        for file in [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]:
            with contextlib.suppress(OSError, ValueError):  # closed, or what Python ignores too
                file.flush()
    ctypes.CDLL(None).fflush(None)  # of C and C++
    return status


def run(argv: Sequence[str]) -> NoReturn:
    """Run a script to its end and leave.

    Args:
        argv: `-m` and a module, or the path of a script; then its arguments.
    """
    try:
        if argv[0] == "-m":
            _run_module(argv[1], argv[2:])
        else:
            _run_script(argv[0], argv[1:])
        status = 0
    except KeyboardInterrupt as error:
        _wind_up(_report(error))
        # Shells and schedulers see from the signal that it was interrupted.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(128 + signal.SIGINT)
    except BaseException as error:  # noqa: BLE001 - Python itself would get it
        status = _report(error)
    finish(status)


def _run_module(name: str, arguments: Sequence[str]) -> None:
    sys.argv = ["-m", *arguments]
    _set_first_path(str(Path.cwd()))
    _fresh_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined] # noqa: SLF001 - as `python -m`


def _run_script(path: str, arguments: Sequence[str]) -> None:
    sys.argv = [path, *arguments]
    main = _fresh_main()
    file = str(Path(path).absolute())
    _set_first_path(str(Path(path).resolve().parent))
    main.__dict__.update(__file__=file, __cached__=None)
    main.__loader__ = SourceFileLoader("__main__", file)
    try:
        with io.open_code(file) as stream:
            source = stream.read()
    except OSError as error:
        _complain(
            f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}"
        )
        raise SystemExit(_EXIT_USAGE) from error
    code = compile(source, file, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 - the user's script


def _fresh_main() -> types.ModuleType:
    """A `__main__` that holds nothing of this module."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def _set_first_path(path: str) -> None:
    """Put the script's directory where Python has put that of this module."""
    if not sys.flags.safe_path:
        sys.path[0] = path


def _report(error: BaseException) -> int:
    """Print an exception as Python does; the exit code."""
    if isinstance(error, SystemExit):
        return _status_of(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as leaving:
        return _status_of(leaving)
    except BaseException:  # noqa: BLE001 - the hook is the user's
        _complain("Error in sys.excepthook:")
        traceback.print_exc()
        _complain("\nOriginal exception was:")
        sys.__excepthook__(type(error), error, trace)
    return 1


def _status_of(leaving: SystemExit) -> int:
    code = leaving.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code if -(2**63) <= code < 2**63 else -1
    _complain(str(code))
    return 1


def _complain(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # there is nowhere else to say it
            print(text, file=sys.stderr)  # noqa: T201 - the process's own words


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1:] == ["-m"]:
        _complain(_USAGE)
        sys.exit(_EXIT_USAGE)
    run(sys.argv[1:])
