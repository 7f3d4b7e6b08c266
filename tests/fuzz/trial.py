"""Opening, listing, loading and verifying one damaged checkpoint, and what must not happen then.

Whatever is in the files: the only errors are remesh's own, no module is imported, no code is run or
compiled, no file is opened for writing or outside the checkpoint, no process is started, no socket
is opened, and the memory that is taken is bounded by the size of the input.
"""

from __future__ import annotations

import copy
import importlib
import os
import signal
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from click.testing import CliRunner

import remesh
from remesh.checkpoint.optimizer_names import LiveOptimizer
from remesh.cli import cli
from remesh.cli.output import EXIT_FAULT
from remesh.errors import MismatchError, RemeshError
from tests.formats.auditing import MayOpen, audited
from tests.fuzz.files import Files, files_in, in_memory, write_files

MEMORY = 160 << 20
"""Bytes that may be taken beside what the input accounts for: mostly buffers of fixed size."""
MEMORY_FACTOR = 200
"""Bytes that may be taken for each byte of input; Python's objects are much larger than text."""
_MOST_READ = 1 << 20
"""Bytes of a tensor that is read; what damaged files claim may be larger than the memory."""
CPU_SECONDS = 60
"""CPU time after which a trial is called endless; the checkpoints are of kilobytes."""

_FORBIDDEN = (
    "exec", "compile", "import", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn",
    "os.startfile", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink",
    "os.chmod", "os.putenv", "subprocess.Popen", "socket.connect", "socket.bind", "ctypes.dlopen",
    "pty.spawn", "shutil.rmtree", "code.__new__", "function.__new__", "pickle.find_class",
)  # fmt: skip


def _may_open(folder: str) -> MayOpen:
    """Whether a file may be opened: to read, inside a folder, or as Python and remesh do."""

    def may_open(path: Any, flags: int) -> bool:
        if isinstance(path, int):
            return True
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        text = os.fsdecode(path)
        is_inside = bool(folder) and text.startswith(folder)
        # Sources for a traceback or a warning; what says whether the file system is remote.
        return not writes and (is_inside or text.endswith((".py", "/mountinfo")))

    return may_open


_IMPORTED_LATE = (
    "encodings.cp437",  # zipfile: names that are not in Unicode
    "numpy.ma",
    "remesh.cli.show",
    "torch._subclasses.schema_check_mode",  # torch: when it first prints a tensor
)
"""Modules that are imported when they are first needed, by whatever needs them."""


class Endless(BaseException):
    """A trial took longer than an input of its size may take."""


@contextmanager
def _bounded_time() -> Iterator[None]:
    """Raise `Endless` when the process has used up its time; it is that of processors."""

    def stop(_number: int, _frame: object) -> None:
        raise Endless(f"more than {CPU_SECONDS} seconds of CPU time")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def attempt(files: Files, state: Any, *, by_command: bool) -> str:
    """Do all that can be done with a checkpoint; the classes of errors that there were, or `read`.

    The state is what the sound one holds, as the target of a load; a copy is loaded into. All is
    done by the library in memory, or by the command line on files. What must not happen is an
    AssertionError that says what it was, or any error that is not remesh's own.
    """
    size = sum(map(len, files.values()))
    tracemalloc.start(1)
    try:
        with _bounded_time():
            end = _by_command(files) if by_command else _by_library(files, state)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY + MEMORY_FACTOR * size, f"{peak} bytes of memory for {size} bytes"
    return end


def _by_library(files: Files, state: Any, *, is_warming: bool = False) -> str:
    """Open, read and load."""
    storage, target = in_memory(files), copy.deepcopy(state)
    errors: list[RemeshError] = []
    with audited(_FORBIDDEN, _may_open(""), all_threads=True) as seen:
        checkpoint = _try(lambda: remesh.Checkpoint(storage), errors)
        if checkpoint is not None:
            _read_all(checkpoint, errors)
        _try(lambda: remesh.load(target, storage), errors)
        if any(isinstance(error, MismatchError) for error in errors):
            _try(lambda: remesh.load(target, storage, missing="keep"), errors)
    assert is_warming or not seen, seen
    return _end_of(errors)


def _try(action: Callable[[], object], errors: list[RemeshError]) -> Any:
    try:
        return action()
    except RemeshError as error:
        errors.append(error)
        str(error)
        return None


def _end_of(errors: list[RemeshError]) -> str:
    return "+".join(sorted({type(error).__name__ for error in errors})) or "read"


def _read_all(checkpoint: remesh.Checkpoint, errors: list[RemeshError]) -> None:
    names = list(checkpoint.index)
    sizes = {name: checkpoint.tensor(name).num_bytes for name in names}
    for name in names[:50]:
        checkpoint.index.pieces(name)
    _try(lambda: checkpoint.values, errors)
    _try(lambda: checkpoint.lists, errors)
    _try(lambda: checkpoint.objects, errors)
    _try(lambda: repr((checkpoint, checkpoint.metadata)), errors)
    is_small = all(size <= _MOST_READ for size in sizes.values())
    whole = _try(checkpoint.state, errors) if is_small else None
    # A tensor alone is read in the same way, unless another one is what fails.
    for name in names[: 50 if whole is None else 1]:
        if sizes[name] <= _MOST_READ:
            _try(partial(checkpoint.read_array, name), errors)
    _try(checkpoint.verify, errors)


def _by_command(files: Files, *, is_warming: bool = False) -> str:
    """`ls`, `show` and `verify`, in one process."""
    codes = []
    with tempfile.TemporaryDirectory(dir=_shm()) as folder:
        write_files({path: data for path, data in files.items() if _is_path(path)}, Path(folder))
        single = [path for path in files if path.endswith(".pt")]
        place = f"{folder}/{single[0]}" if len(files) == 1 and single else folder
        with audited(_FORBIDDEN, _may_open(folder), all_threads=True) as seen:
            for command in (
                ["ls", place, "--values"],
                ["ls", place, "--values", "--json"],
                ["show", place, "w"],
                ["show", place, "iteration"],
                ["verify", place, "--json"],
            ):
                result = CliRunner().invoke(cli, command)
                if result.exception is not None and not isinstance(result.exception, SystemExit):
                    raise result.exception
                assert result.exit_code != EXIT_FAULT, result.stderr
                codes.append(str(result.exit_code))
    assert is_warming or not seen, seen
    return f"exit codes {'/'.join(codes)}"


def _is_path(path: str) -> bool:
    return "\0" not in path and not path.startswith("/") and ".." not in path.split("/")


def _shm() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def import_late_modules() -> None:
    """Import what is imported when it is first needed, lest a trial be blamed for it."""
    for module in _IMPORTED_LATE:
        importlib.import_module(module)
    # msgspec compiles the annotations of a type when it first meets it.
    msgspec.msgpack.Decoder(LiveOptimizer)
    with tempfile.TemporaryDirectory() as folder:
        remesh.save({"w": np.zeros(2), "step": 1}, f"{folder}/step_1")
        files = files_in(Path(folder) / "step_1")
    for some in (files, {"x": b"x"}, {"remesh.json": b"{}"}, {"metadata.json": b"{}"}):
        _by_command(some, is_warming=True)
        _by_library(some, {}, is_warming=True)


def sound_state(files: Files) -> Any:
    """What a sound checkpoint holds, as a target; also loads all modules that reading it takes."""
    checkpoint = remesh.Checkpoint(in_memory(files))
    state = checkpoint.state()
    import_late_modules()
    for name, element in checkpoint._contents.document.objects.items():
        state[name] = remesh.sharding.ShardedObject(
            element.name, None, element.shape, element.offset
        )
    remesh.load(copy.deepcopy(state), in_memory(files), missing="keep")
    return state
