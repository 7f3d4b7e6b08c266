"""A cluster with two masters, of which one leads."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence

from remesh.elastic.client import Client
from remesh.errors import MasterError
from tests.elastic.cluster import REMESH, Cluster, reserve_port


class Masters(Cluster):
    """A cluster whose master is not alone, and has several jobs."""

    def start_master(self) -> None:
        """Start both."""
        self.reserved = {name: reserve_port() for name in "ab"}
        self.masters: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses: dict[str, str] = {}
        for name in self.reserved:
            self.start_one(name)
        self.url = ",".join(self.addresses.values())
        self.client = Client(self.url, patience=60)

    def start_one(self, name: str) -> None:
        """Start one of them, where it was."""
        options = ["--state", str(self.directory / "state"), "--lease", "3", "--jobs"]
        port = ["--port", str(self.reserved[name][0]), *self._master_options]
        with (self.directory / f"master-{name}.log").open("ab") as log:
            started = subprocess.Popen(
                [*REMESH, "master", *options, *port], stdout=subprocess.PIPE, stderr=log
            )
        assert started.stdout is not None
        with started.stdout as said:
            self.addresses[name] = f"{said.readline().decode().strip()}/jobs/train"
        self.masters[name] = started

    def kill_master(self) -> None:
        """SIGKILL both."""
        for master in self.masters.values():
            master.kill()
            master.wait()
        for _, reserved in self.reserved.values():
            reserved.close()

    def leaders(self, among: Sequence[str] = "ab") -> list[str]:
        """Those that answer."""
        found = []
        for name in among:
            with contextlib.suppress(MasterError):
                Client(self.addresses[name]).status()
                found.append(name)
        return found

    def until_leader(self, among: Sequence[str] = "ab") -> tuple[str, str]:
        """Wait until one of some leads; that and the other."""
        found: list[str] = []

        def is_one() -> bool:
            found[:] = self.leaders(among)
            return len(found) == 1

        self.until(is_one)
        return found[0], {"a": "b", "b": "a"}[found[0]]
