"""A cluster on this machine: a master and agents as processes, each agent a node."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Self

from remesh.elastic.client import Client
from remesh.elastic.status import Status
from tests.elastic.agents import patient_status
from tests.elastic.training_log import TrainingLog
from tests.elastic.zygote import Command

REMESH = (str(Path(sys.executable).with_name("remesh")),)
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
TRAIN = Path(__file__).with_name("train.py")

SILENCE = 60
"""Seconds after which a node of which nothing is heard is lost, where none of them dies."""
SILENCE_OF_THE_DEAD = 10
"""The same where nodes die. It must be longer than a slow machine may keep a living one waiting."""


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process that may have ended by itself meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def reserve_port() -> tuple[int, socket.socket]:
    """A port that stays free while no one listens there, and what reserves it while it is open.

    It is none that the kernel gives away; other tests see a name of a socket that it is taken.
    """
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    first = int(given[0])
    while True:
        port = random.SystemRandom().randrange(first // 2, first)
        reserved = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe, contextlib.suppress(OSError):
            reserved.bind(f"\0remesh-test-port-{port}")
            probe.bind(("127.0.0.1", port))
            return port, reserved
        reserved.close()


def broken_check(directory: Path) -> str:
    """A directory for PYTHONPATH with which the process of the check of a node dies."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(
        "import os, sys\nif 'remesh.elastic.node_check' in sys.orig_argv:\n    os._exit(3)\n"
    )
    return str(directory)


def run_job(directory: Path, *words: str) -> tuple[int, str]:
    """Run `remesh run` in a directory to its end; its exit code, and what it wrote."""
    output = directory / "output"
    output.unlink(missing_ok=True)
    code = Command([*REMESH, "run", *words], output, directory=directory).wait(500)
    return code, output.read_text()


def run_torchrun(directory: Path, *words: str) -> tuple[int, str]:
    """Run `torchrun --standalone` likewise."""
    output = directory / "output"
    output.unlink(missing_ok=True)
    script = next(number for number, word in enumerate(words) if word.endswith(".py"))
    # By themselves, processes of torch may abort after their work.
    words = (*words[:script], "-m", "remesh.elastic.script", *words[script:])
    code = Command([TORCHRUN, "--standalone", *words], output, directory=directory).wait(500)
    return code, output.read_text()


PRELOAD = (
    "numpy,torch,torch._dynamo,torch.distributed.fsdp,remesh.training.survivors,remesh.elastic"
)
"""What the processes of jobs that need torch find imported."""


class MasterProcess:
    """A master that may be killed and started again, behind a command of the shell (`limit`)."""

    def __init__(self, directory: Path, *options: str, limit: str = "true") -> None:
        self._log = directory / "master.log"
        self._command = ["bash", "-c", f'{limit}; exec "$@"', "master", *REMESH, "master"]
        self._command += ["--state", str(directory / "master.json"), *options, "--port", "0"]
        self.start()
        self._command[-1] = self.url.rpartition(":")[2]

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout is not None
        with self._process.stdout as said:  # nothing more is said there
            self.url = said.readline().decode().strip()
        assert self.url, self.log()

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def end(self, number: signal.Signals) -> int:
        self._process.send_signal(number)
        return self._process.wait()

    def log(self) -> str:
        return self._log.read_text(errors="replace")


class Cluster(TrainingLog):
    """A master and agents, each a node, that train `job` (see `train.py`), and what they did."""

    def __init__(
        self,
        directory: Path,
        nodes: str,
        *,
        silence: float = SILENCE,
        master: tuple[str, ...] = (),
        agent: tuple[str, ...] = (),
        job: Literal["numpy", "fsdp", "ddp", "hsdp", "shards", "variants"] = "numpy",
        saving: tuple[str, ...] = (),
        processes: int = 1,
    ) -> None:
        super().__init__(directory)
        self.job = job
        self._nodes = nodes
        self._agent_options = agent
        if job != "numpy":
            self._agent_options += ("--preload", PRELOAD)
        self._saving = saving
        self._num_processes = str(processes)
        self.agents: dict[int, Command] = {}
        port, self._reserved = reserve_port()
        options = ("--port", str(port), "--heartbeat-timeout", str(silence), *master)
        self.master = MasterProcess(directory, *options)
        self.url = self.master.url
        self.client = Client(self.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        self.master.kill()
        self._reserved.close()
        if error is not None:
            for file in sorted(self.directory.glob("*.log")):
                print(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}")  # noqa: T201
        deadline = time.monotonic() + 60
        while orphans := self.workers():
            if time.monotonic() > deadline:
                for pid in orphans:
                    kill(pid)
                assert error is not None, f"processes {orphans} outlived their agents"
            time.sleep(0.1)

    def command(self, number: int) -> list[str]:
        return [
            *(*REMESH, "run", "--master", self.url, "--node-id", str(number)),
            *("--nnodes", self._nodes, "--last-call", "2"),
            *("--nproc-per-node", self._num_processes),
            *("--local-addr", "127.0.0.1", "--beat-seconds", "0.3", "--join-timeout", "300"),
            *("--drain-seconds", "120", *self._agent_options),
            *(str(TRAIN), str(self.directory), self.job, "0.05", *self._saving),
        ]

    def start(self, *numbers: int, environment: Mapping[str, str] | None = None) -> None:
        for number in numbers:
            output = self.directory / f"node-{number}.log"
            self.agents[number] = Command(self.command(number), output, environment=environment)

    def kill_worker(self, rank: int) -> None:
        kill(self.pid_of(rank))

    def pid_of(self, rank: int) -> int:
        """The newest process of a rank, which lives; waits for one."""
        found: list[int] = []

        def lives() -> bool:
            starts = self.said("start")
            found[:] = [entry["pid"] for entry in starts if entry["rank"] == rank][-1:]
            return bool(set(found) & set(self.workers()))

        self.until(lives)
        return found[0]

    def kill_agent(self, number: int) -> None:
        self.agents[number].kill()
        self.agents[number].wait()

    def workers(self) -> list[int]:
        """Training processes of this test that live."""
        alive = []
        for file in self.directory.glob("*.jsonl"):
            # A process may end at any moment, and be one that nobody has waited for yet.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if str(self.directory) in Path(f"/proc/{file.stem}/cmdline").read_text():
                    alive.append(int(file.stem))
        return alive

    def status(self) -> Status:
        return patient_status(self.client)

    def until(self, condition: Callable[[], object], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not so after {seconds} s; {self.status()}")
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step >= step)

    def until_world(self, *numbers: int, round_after: int = 0) -> None:
        """Wait until these nodes are the world, in a later round.

        While a world breaks up, those who have not left it yet look like a smaller one.
        """

        def formed() -> bool:
            status = self.status()
            active = [node.id for node in status.nodes if node.node_rank is not None]
            return status.round > round_after and active == sorted(numbers)

        self.until(formed)

    def until_trained(self, *numbers: int, round_after: int = 0) -> int:
        """Wait until these nodes are the world and have made steps; the round in which they did."""
        self.until_world(*numbers, round_after=round_after)
        before = self._num_steps_by(len(numbers))
        self.until(lambda: self._num_steps_by(len(numbers)) >= before + 5 * len(numbers))
        return self.status().round

    def _num_steps_by(self, size: int) -> int:
        """Steps that the ranks of all worlds of a size have made."""
        return sum(entry["size"] == size for entry in self.said("step"))

    def until_round(self, number: int) -> None:
        self.until(lambda: self.status().round >= number)

    def stop(self, *numbers: int) -> None:
        """Let the training end, which it never does by itself, and the agents end well."""
        (self.directory / "stop").touch()
        for number in numbers:
            assert self.exit_code(number) == 0, f"node {number}"

    def exit_code(self, number: int) -> int:
        return self.agents[number].wait(300)
