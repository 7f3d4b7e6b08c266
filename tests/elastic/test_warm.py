"""Processes from an interpreter that has imported their modules: as good as those of `Popen`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig

from remesh.elastic import fork_server, guard, script
from remesh.elastic.process_socket import ProcessSockets
from remesh.elastic.processes import Processes
from remesh.elastic.warm import LATER, Warm, modules_of
from tests.elastic.cluster import kill
from tests.waiting import is_alive, wait_until

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import json, os, signal, sys, time

was_warm = "counted" in sys.modules
import counted, random
import numpy as np

print(json.dumps({
    "warm": was_warm, "words": sys.argv, "path": sys.path[0], "directory": os.getcwd(),
    "parent": os.getppid(), "session": os.getsid(0), "pid": os.getpid(),
    "environment": dict(os.environ), "drawn": [random.random(), np.random.rand()],
    "files": sorted(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{n}")),
    "shown": open("/proc/self/comm").read().strip(),
    "main": __name__, "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
}), flush=True)
print("to stderr", file=sys.stderr)
if sys.argv[1] == "wait":
    if os.fork() == 0:
        os.setsid() if sys.argv[2] == "apart" else None
        print(os.getpid(), flush=True)
    time.sleep(1000)
sys.exit(int(sys.argv[1]))
"""


TORCHRUN = (
    "LOCAL_WORLD_SIZE",
    "ROLE_NAME",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
"""Variables that a process has from torchrun, in any world."""


class Started:
    def __init__(self, processes: Processes, rank: int) -> None:
        self._processes = processes
        self._rank = rank
        self.pid = processes._all[rank].pid  # it may have ended already
        self.out, self.err = processes.logs(rank)

    def poll(self) -> int | None:
        if self._rank in self._processes.living:
            return None
        failed = self._processes.failed.get(self._rank)
        return 0 if failed is None else failed.exitcode

    def wait(self) -> int:
        wait_until(lambda: self.poll() is not None, "the end of the process")
        code = self.poll()
        assert code is not None
        return code

    def said(self) -> dict[str, Any]:
        """What the process said of itself."""
        wait_until(lambda: "\n" in text_of(self.out), "a word of the process")
        found: dict[str, Any] = json.loads(Path(self.out).read_text().splitlines()[0])
        return found


def text_of(path: str | Path) -> str:
    """What a process has written, which may not have made the file yet."""
    try:
        return Path(path).read_text()
    except FileNotFoundError:
        return ""


class Agent:
    def __init__(self, directory: Path, modules: tuple[str, ...]) -> None:
        self.directory = directory
        self.script = directory / "train.py"
        self.script.write_text(SCRIPT)
        place = directory / "sockets"
        place.mkdir()
        self.sockets = ProcessSockets(str(place), 2)
        self.warm = Warm(modules, str(place), self._command())
        self.started: list[Started] = []

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-u", script.__file__, str(self.script), *words]

    def start(self, *words: str) -> Started:
        rank = len(self.started)
        logs = DefaultLogsSpecs(str(self.directory / "logs"), redirects=Std.ALL)
        config = LaunchConfig(1, 1, rank + 1, logs_specs=logs)
        config.shutdown_timeout = 60  # no option before torch 2.13
        processes = Processes(
            config,
            self._command(*words),
            sockets=self.sockets,
            snapshots="/snapshots",
            warm=self.warm,
        )
        world = {"PYTHONPATH": str(self.directory), "ODD": "\udcff"}
        processes.start([rank], dict.fromkeys(range(rank + 1), world))
        self.started.append(Started(processes, rank))
        return self.started[rank]

    def close(self) -> None:
        self.warm.close()
        for one in self.started:
            kill_group(one.pid)  # with what the script has forked
            one.wait()
        self.sockets.close()


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    (tmp_path / "counted.py").write_text("with open('imports', 'a') as f: f.write('x')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = Agent(tmp_path, ("numpy", "counted"))
    yield made
    made.close()


def test_a_forked_process_is_like_one_that_was_started(agent: Agent) -> None:
    started = [agent.start("3", "--lr", "1"), agent.start("0")]
    assert [one.wait() for one in started] == [3, 0]
    first, second = (one.said() for one in started)
    assert (agent.directory / "imports").read_text() == "x"
    for number, said in enumerate((first, second)):
        assert said["warm"]
        assert said["shown"] == "train.py"
        assert said["main"] == "__main__"
        # A shell starts what it puts in the background with SIGINT ignored, tests too.
        assert said["sigint"] == (signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        assert said["parent"] == os.getpid()
        assert said["session"] == said["pid"] == started[number].pid
        assert said["path"] == said["directory"] == str(agent.directory)
        # As it would be in a process of its own, with what `child` says.
        own = {
            "LOCAL_RANK": str(number),
            "PYTHONPATH": str(agent.directory),
            "ODD": "\udcff",
            "REMESH_AGENT_SOCKET": agent.sockets.path_of(number),
            "REMESH_SNAPSHOT_DIR": "/snapshots",
        }
        shown = said["environment"]
        assert shown == dict(os.environ) | {name: shown[name] for name in TORCHRUN} | own
        outputs = [started[number].err, started[number].out]
        own_files = [name for name in said["files"] if name.startswith(str(agent.directory))]
        assert own_files == outputs
        assert not [name for name in said["files"] if name.startswith(("socket:", "pipe:"))]
        assert Path(started[number].err).read_text() == "to stderr\n"
    assert first["words"] == [str(agent.script), "3", "--lr", "1"]
    assert all(one != other for one, other in zip(first["drawn"], second["drawn"], strict=True))


def test_the_guard_finds_what_forked_processes_have_forked(agent: Agent) -> None:
    started = [agent.start(*words) for words in (("wait", "within"), ("wait", "apart"))]
    files = [Path(one.out) for one in started]
    wait_until(lambda: all(text_of(file).count("\n") == 2 for file in files), "both")
    within, apart = (int(file.read_text().splitlines()[1]) for file in files)
    server = agent.warm._server
    assert server is not None
    try:
        assert guard.kill(agent.sockets.directory, 60, {"1.socket"}) == []
        assert not is_alive(apart)  # although it has a session of its own
        assert is_alive(within)
        assert guard.kill(agent.sockets.directory, 60, {"0.socket", "1.socket"}) == []
        assert not is_alive(within)
        assert server.poll() is None
        # They are ours, so their signals are seen.
        assert [one.wait() for one in started] == [-signal.SIGKILL] * 2
        assert guard.kill(agent.sockets.directory, 60) == []
        assert server.wait(60) == -signal.SIGKILL
    finally:
        kill(apart)


def test_a_server_that_died_is_replaced_and_its_processes_go_on(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    first = agent.start("wait", "within")
    first.said()
    server = agent.warm._server
    assert server is not None
    server.kill()
    server.wait()
    assert is_alive(first.said()["pid"])
    assert first.poll() is None
    agent.warm.look_after()
    assert "it ended with exit code -9" in caplog.text
    second = agent.start("0")
    assert second.wait() == 0
    assert second.said()["warm"]
    assert (agent.directory / "imports").read_text() == "xx"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import threading\nthreading.Timer(99, print).start()", "starts a thread"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "it ended"),
    ],
    ids=["thread", "death"],
)
def test_without_a_server_processes_start_cold(
    agent: Agent, caplog: pytest.LogCaptureFixture, source: str, why: str
) -> None:
    (agent.directory / "counted.py").write_text(
        f"import sys\nif 'fork_server' in sys.argv[0]:\n    exec({source!r})\n"
    )
    with caplog.at_level(logging.WARNING):
        started = agent.start("5")
        assert started.wait() == 5
    assert why in caplog.text
    said = started.said()
    assert not said["warm"]
    assert said["parent"] == os.getpid()


def test_a_fork_that_is_given_up_leaves_the_log_to_others(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = agent.directory / "log"
    log.write_text("of another")
    monkeypatch.setattr(fork_server, "GO", b"no")
    forked = agent.warm.fork(agent._command("0"), {}, [str(log), ""])
    assert forked is not None
    wait_until(lambda: forked.poll() is not None, "its end")
    assert log.read_text() == "of another"


DIES = """
import os, sys
from pathlib import Path
from tests.elastic.test_warm import Agent

agent = Agent(Path(sys.argv[1]), ("json",))
agent.start("wait", "within")
print(agent.started[0].pid, agent.warm._server.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_server_and_processes_end_with_their_agent(agent: Agent) -> None:
    directory = agent.directory / "other"
    directory.mkdir()
    (directory / "counted.py").touch()
    command = [sys.executable, "-c", DIES, str(directory)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert all(map(is_alive, pids))
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(is_alive, pids)), "the end of both")
    # What the script has forked is no child of the agent: the guard ends that, which is not here.
    assert guard.kill(str(directory / "sockets"), 60.0) == []


def test_what_is_preloaded_without_being_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def modules(source: str) -> tuple[str, ...]:
        (tmp_path / "train.py").write_text(source)
        return modules_of(str(tmp_path / "train.py"))

    first = '"""Trains."""\nimport os\nimport torch.nn as nn\nfrom remesh.elastic import run\n'
    expected = ("numpy", "torch.nn", "remesh.elastic", *LATER)
    assert modules(first) == expected
    assert modules(f"{first}import apex\nos.environ['A'] = '1'\nimport torch.cuda\n") == expected
    # What a script sets before it imports torch must be there when torch is imported.
    assert caplog.records == []
    assert modules("import os\nos.environ['A'] = '1'\nimport torch, remesh.elastic\n") == ()
    [told] = caplog.messages
    assert told.endswith("Move its imports to the top, or name what to import by --preload")
    assert modules("import torch\nimport remesh\n\nremesh.elastic.run(print)\n")[1] == "torch"
    assert modules("import torch\nimport remesh\n") == ()
    assert modules("this is no Python\n") == ()
    assert modules_of("there.is.none", is_module=True) == ()


def test_an_interpreter_that_cannot_be_started_is_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warm = Warm(("numpy",), str(tmp_path), ["/no/such/python", "-u", script.__file__, "train.py"])
    with contextlib.closing(warm):
        assert warm.wait() is None
    assert "they start cold: [Errno 2]" in caplog.text
