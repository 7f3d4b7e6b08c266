"""The command line as a process: what it loads, what it prints where, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import remesh
from remesh.storage.workers import run_threads
from tests.engine.small_checkpoint import without_privileges
from tests.waiting import wait_until

from .conftest import Run, data_files

REMESH = [sys.executable, "-c", "from remesh.cli import main; main()"]


def remesh_process(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, both outputs piped."""
    environment = os.environ | options.pop("env", {})
    return subprocess.run(
        [*REMESH, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=environment,
        **options,
    )


# ----- what it loads -----


@pytest.fixture
def torch_checkpoint(tmp_path: Path) -> Path:
    """A checkpoint that holds torch's own values."""
    state = {
        "w": torch.arange(6, dtype=torch.bfloat16),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    remesh.save(state, tmp_path / "torch_ck")
    return tmp_path / "torch_ck"


COMMANDS = [
    ("ls {path} --values", "torch.bfloat16"),
    ("ls {root}", "torch_ck\n"),
    ("show {path} w", "[0. 1. 2. 3. 4. 5.]"),
    ("show {path} dtype", "torch.bfloat16"),
    ("show {path} device", "torch.device('cpu')"),
    ("verify {path}", "sound"),
    ("ls {theirs}", "float32"),
    ("diff {theirs} {theirs}", "nothing differs"),
    ("--help", "demo"),
    ("demo --help", "Usage: remesh demo"),
    ("--version", f"remesh {remesh.__version__}"),
]
"""Commands, and what each prints."""


def test_torch_is_never_loaded(torch_checkpoint: Path) -> None:
    """Not by the first command, nor by a later one of the same process."""
    theirs = torch_checkpoint.parent / "theirs"
    remesh.save({"w": torch.ones(4, 2)}, theirs, format="huggingface")
    program = (
        "import contextlib, io, json, sys\n"
        "from remesh.cli import main\n"
        "def run(arguments):\n"
        "    sys.argv[1:] = arguments\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        try:\n"
        "            main()\n"
        "        except SystemExit as end:\n"
        "            return end.code or 0, out.getvalue(), 'torch' in sys.modules\n"
        "print(json.dumps([run(line.split()) for line in sys.argv[1:]]))\n"
    )
    places = {"path": torch_checkpoint, "root": torch_checkpoint.parent, "theirs": theirs}
    lines = [line.format(**places) for line, _ in COMMANDS]

    done = subprocess.run(
        [sys.executable, "-c", program, *lines], capture_output=True, text=True, check=False
    )

    assert done.stderr == ""
    for (line, expected), (code, out, is_loaded) in zip(
        COMMANDS, json.loads(done.stdout), strict=True
    ):
        assert (code, is_loaded) == (0, False), line
        assert expected in out


# ----- errors -----


def test_an_error_is_one_line(run: Run, tmp_path: Path) -> None:
    done = remesh_process("show", tmp_path, "w")

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"error: {tmp_path}: no checkpoint there, the directory is empty\n"


def test_debug_adds_the_traceback(run: Run, tmp_path: Path) -> None:
    result = run("--debug", "show", tmp_path, "w")

    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback (most recent call last):\n")
    assert "CheckpointNotFoundError" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    "error", [OSError(5, "some other failure"), IndexError("some other failure")], ids=repr
)
def test_a_fault_of_remesh_has_a_code_of_its_own(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_place: str, **_options: object) -> remesh.Checkpoint:
        raise error

    monkeypatch.setattr("remesh.cli.show.Checkpoint", fail)
    result = run("show", checkpoint, "step")

    assert (result.exit_code, result.stdout) == (70, "")
    first, *_, last = result.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last.startswith(
        f"error: a fault of remesh, not of what it was given ({type(error).__name__}"
    )
    assert "some other failure" in last
    assert "report it" in last


def test_a_port_that_there_is_not() -> None:
    done = remesh_process("master", "--port", 99999)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: cannot listen on 127.0.0.1:99999: " in done.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("diff a b --atol nan", "'--atol': nan is not finite."),
        ("diff a b --rtol inf", "'--rtol': inf is not finite."),
        ("master --heartbeat-timeout nan", "'--heartbeat-timeout': nan is not finite."),
        ("master --heartbeat-timeout 0", "'--heartbeat-timeout': 0.0 is not in the range x>0."),
        ("master --save-grace -1", "'--save-grace': -1.0 is not in the range x>=0."),
        ("master --tls-key key.pem", "--tls-key is the key of a certificate: give --tls-cert, too"),
    ],
)
def test_options_that_cannot_be(run: Run, words: str, problem: str) -> None:
    result = run(*words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert problem in result.stderr


@pytest.mark.parametrize("target", ["directory", "record", "data"])
def test_no_permission(run: Run, target: str) -> None:
    run("--help")  # Modules are loaded while they can be.
    with without_privileges() as place:
        path = place / "ck"
        remesh.save({"w": np.zeros(3)}, path)
        locked = {"directory": path, "record": path / "remesh.json", "data": data_files(path)[0]}
        locked[target].chmod(0)
        shown = run("show", path, "w")
        verified = run("verify", path)
        listed = run("ls", place)
        above = run("show", place, "w")

    for result in (shown, verified):
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("error: cannot read")
        assert "Permission denied" in result.stderr
    assert (above.exit_code, above.stdout) == (2, "")
    assert above.stderr.startswith(f"error: {place}: not a ")
    if target == "data":
        # Listing asks for sizes only.
        assert "committed" in listed.stdout
    else:
        assert listed.exit_code == 0
        assert "unreadable" in listed.stdout
        assert "Permission denied" in listed.stdout


# ----- interrupts and broken pipes -----


def test_ctrl_c_ends_quietly(checkpoint: Path) -> None:
    program = (
        "import signal, sys, time\n"
        "from remesh.cli import main, verify\n"
        # A shell starts what runs in the background with Ctrl-C ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def check(path):\n"
        "    print('checking', flush=True)\n"
        "    time.sleep(60)\n"
        "verify.check = check\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "verify", str(checkpoint)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "checking\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=240)

    assert (process.returncode, stdout, stderr) == (130, "", "")


def main_thread_joins() -> bool:
    main = threading.main_thread().ident
    assert main is not None
    stack = traceback.walk_stack(sys._current_frames()[main])
    return any(frame.f_code is threading.Thread.join.__code__ for frame, _ in stack)


@pytest.mark.parametrize("when", ["at once", "when they are waited for"])
def test_ctrl_c_ends_the_threads_that_work(when: str) -> None:
    """Else they write into what others use by then."""
    first = threading.Lock()
    stopped = threading.Event()
    begun: list[int] = []
    ended: list[int] = []

    def work() -> None:
        begun.append(threading.get_ident())
        if first.acquire(blocking=False):
            if when != "at once":
                wait_until(main_thread_joins, "the main thread")
            os.kill(os.getpid(), signal.SIGINT)
        stopped.wait()
        time.sleep(0.1)  # Whoever does not wait for it has gone on by then.
        ended.append(threading.get_ident())

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_threads(3, work, stopped.set)
        assert sorted(ended) == sorted(begun)
    finally:
        signal.signal(signal.SIGINT, before)
        stopped.set()


@pytest.mark.parametrize("arguments", [["ls", "{path}"], ["ls", "{path}", "--json"]])
def test_a_reader_that_went_away(checkpoint: Path, arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [*REMESH, *(argument.format(path=checkpoint) for argument in arguments)],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=240,
        )
    finally:
        os.close(write_end)

    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_behind_the_output(checkpoint: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*REMESH, "ls", checkpoint], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr == "error: the output cannot be written: the disk that it goes to is full\n"


# ----- terminals, pipes, encodings -----


def read_terminal(master: int) -> bytes:
    """Everything a process writes to a terminal until it closes it."""
    content = b""
    while select.select([master], [], [], 240)[0]:
        try:
            chunk = os.read(master, 1 << 16)
        except OSError:
            break
        if not chunk:
            break
        content += chunk
    return content


def on_terminal(stream: str, *args: object) -> tuple[str, str, int]:
    """Run a command with one of its outputs on a terminal of 80 columns: that, the other, code."""
    master, slave = pty.openpty()
    other = "stderr" if stream == "stdout" else "stdout"
    pipes: dict[str, Any] = {stream: slave, other: subprocess.PIPE}
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    command = [*REMESH, *map(str, args)]
    with subprocess.Popen(command, env=environment, **pipes) as process:
        os.close(slave)
        shown = read_terminal(master)
        os.close(master)
        piped = getattr(process, other).read()
        process.wait(240)
    return shown.decode(), piped.decode(), process.returncode


def test_pipes_get_plain_text(checkpoint: Path) -> None:
    done = remesh_process("ls", checkpoint, env={"COLUMNS": "20", "TERM": "xterm-256color"})

    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "int64    [6]          1   48 B  model.tied -> model.head\n" in done.stdout


def test_terminals_get_colours_and_whole_names(tmp_path: Path) -> None:
    name = ".".join(["a_very_long_module_name"] * 8)
    remesh.save({name: np.zeros(3)}, tmp_path / "ck")

    shown, errors, code = on_terminal("stdout", "ls", tmp_path / "ck")

    assert (code, errors) == (0, "")
    assert "\x1b[1m" in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert name in plain


def test_progress_is_shown_on_terminals_only(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMESH_PROGRESS", "on")
    shown, results, code = on_terminal("stderr", "verify", checkpoint)

    assert code == 0
    assert results.startswith(f"{checkpoint}: sound")
    assert "\x1b" not in results
    assert "100%" in shown

    assert remesh_process("verify", checkpoint).stderr == ""


def test_names_that_the_encoding_lacks(tmp_path: Path) -> None:
    remesh.save({"schlüssel.ω": np.zeros(3), "a": 1}, tmp_path / "ck")

    done = remesh_process("ls", tmp_path / "ck", env={"PYTHONIOENCODING": "ascii"})
    as_json = remesh_process("ls", tmp_path / "ck", "--json", env={"PYTHONIOENCODING": "ascii"})

    assert done.returncode == 0
    assert r"schl\xfcssel.\u03c9" in done.stdout
    assert r"schl\u00fcssel.\u03c9" in as_json.stdout
