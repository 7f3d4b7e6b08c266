"""A cluster on this machine: a master and agents as processes, each agent a node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from remesh.elastic.client import Client
from remesh.elastic.status import Status

REMESH = (str(Path(sys.executable).with_name("remesh")),)
TRAIN = Path(__file__).with_name("train.py")


class Cluster:
    """Processes of a test, and what they did.

    Args:
        directory: Where everything goes.
        nodes: As `--nnodes` takes it.
        num_steps: Steps of the training.
        master: Further options of the master.
        agent: Further options of the agents.
        seconds: What a step takes beside its work.
        saving: How the training saves; see `train.py`.
    """

    def __init__(
        self,
        directory: Path,
        nodes: str,
        num_steps: int,
        *,
        master: tuple[str, ...] = (),
        agent: tuple[str, ...] = (),
        seconds: float = 0.05,
        saving: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        self._nodes = nodes
        self._num_steps = num_steps
        self._master_options = master
        self._agent_options = agent
        self._seconds = seconds
        self._saving = saving
        self._port = 0
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.master: subprocess.Popen[bytes]
        self.start_master()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        for process in (*self.agents.values(), self.master):
            if process.poll() is None:
                process.kill()
            process.wait()
        assert self.master.stdout is not None
        self.master.stdout.close()
        if error is not None:
            for file in sorted(self.directory.glob("*.log")):
                print(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}")  # noqa: T201
        deadline = time.monotonic() + 10
        while orphans := self.workers():
            if time.monotonic() > deadline:
                for pid in orphans:
                    os.kill(pid, signal.SIGKILL)
                assert error is not None, f"processes {orphans} outlived their agents"
            time.sleep(0.1)

    def start_master(self) -> None:
        """Start the master; a second time, where the first was."""
        command = [*REMESH, "master", "--state", str(self.directory / "master.sqlite")]
        options = ["--port", str(self._port), "--heartbeat-timeout", "3", *self._master_options]
        if self._port:
            assert self.master.stdout is not None
            self.master.stdout.close()
        with (self.directory / "master.log").open("ab") as log:
            self.master = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=log)
        assert self.master.stdout is not None
        url = self.master.stdout.readline().decode().strip()
        self.url = url
        self._port = int(url.rpartition(":")[2])
        self.client = Client(url, patience=30)

    def command(self, number: int) -> list[str]:
        """What starts the agent of a node."""
        return [
            *(*REMESH, "run", "--master", self.url, "--node-id", str(number)),
            *("--nnodes", self._nodes, "--nproc-per-node", "1", "--last-call", "2"),
            *("--local-addr", "127.0.0.1", "--beat-seconds", "0.3", "--join-timeout", "120"),
            *("--drain-seconds", "20", *self._agent_options),
            *(str(TRAIN), str(self.directory), str(self._num_steps), str(self._seconds)),
            *self._saving,
        ]

    def start(self, *numbers: int, environment: Mapping[str, str] | None = None) -> None:
        """Start the agents of nodes.

        Args:
            numbers: Ids of the nodes.
            environment: Variables that they and their processes get besides.
        """
        variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **(environment or {})}
        for number in numbers:
            with (self.directory / f"node-{number}.log").open("ab") as log:
                self.agents[number] = subprocess.Popen(
                    self.command(number), stdout=log, stderr=log, env=os.environ | variables
                )

    def kill_worker(self, rank: int) -> None:
        """SIGKILL the newest process of a rank."""
        os.kill(self.pid_of(rank), signal.SIGKILL)

    def pid_of(self, rank: int) -> int:
        """The newest process of a rank."""
        starts = [entry for entry in self.said() if entry["kind"] == "start"]
        return int([entry["pid"] for entry in starts if entry["rank"] == rank][-1])

    def kill_agent(self, number: int) -> None:
        """SIGKILL an agent."""
        self.agents[number].kill()
        self.agents[number].wait()

    def said(self) -> list[dict[str, Any]]:
        """What all training processes wrote, in the order of time."""
        entries: list[dict[str, Any]] = []
        for file in self.directory.glob("*.jsonl"):
            whole = [line for line in file.read_text().splitlines(True) if line.endswith("\n")]
            entries += [json.loads(line) | {"pid": int(file.stem)} for line in whole]
        return sorted(entries, key=lambda entry: entry["time"])

    def workers(self) -> list[int]:
        """Training processes of this test that live."""
        alive = []
        for file in self.directory.glob("*.jsonl"):
            command = Path(f"/proc/{file.stem}/cmdline")
            if command.exists() and str(self.directory) in command.read_text():
                alive.append(int(file.stem))
        return alive

    @property
    def step(self) -> int:
        """The last step that any rank finished."""
        return max((entry["step"] for entry in self.said() if entry["kind"] == "step"), default=-1)

    def status(self) -> Status:
        """The job as the master sees it."""
        return self.client.status()

    def until(self, condition: Callable[[], object], seconds: float = 120) -> None:
        """Wait until something is so.

        Raises:
            AssertionError: If it is not in time.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not so after {seconds} s; {self.status()}")
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        """Wait until the training has done a step."""
        self.until(lambda: self.step >= step)

    def until_world(self, *numbers: int, round_after: int = 0) -> None:
        """Wait until these nodes train."""
        self.until(lambda: self.status().round > round_after and self.world() == list(numbers))

    def until_round(self, number: int) -> None:
        """Wait until a round has begun."""
        self.until(lambda: self.status().round >= number)

    def world(self) -> list[int]:
        """Ids of the nodes that train, in the order of their ranks."""
        active = [node for node in self.status().nodes if node.rank is not None]
        return [node.id for node in sorted(active, key=lambda node: node.rank or 0)]

    def finish(self, *numbers: int, seconds: float = 180) -> None:
        """Wait until agents have ended well."""
        for number in numbers:
            assert self.agents[number].wait(seconds) == 0, f"node {number}"

    def losses(self) -> dict[int, list[float]]:
        """The losses of each step, once for each time that rank 0 made it."""
        losses: dict[int, list[float]] = {}
        for entry in self.said():
            if entry["kind"] == "step" and entry["rank"] == 0:
                losses.setdefault(entry["step"], []).append(entry["loss"])
        return losses
