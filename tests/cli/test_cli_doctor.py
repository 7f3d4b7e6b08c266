"""`remesh doctor`: what is installed, and what a place is good for."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import remesh
from remesh.cli import cli
from remesh.cli.doctor import check_place
from remesh.storage import MemoryStorage


def test_a_good_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remesh.cli.doctor.mount_of", lambda _device: ("ext4", "/dev/sda1"))
    done = CliRunner().invoke(cli, ["doctor", str(tmp_path / "new" / "runs"), "--json"])
    report = json.loads(done.stdout)
    assert done.exit_code == 0
    assert report["versions"]["remesh"] == remesh.__version__
    assert report["versions"]["torch"]
    assert [each["name"] for each in report["trials"]] == [
        "write and read",
        "exclusive creation",
        "atomic replacement",
        "hard links",
        "direct I/O",
        "room",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_place_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remesh.cli.doctor.mount_of", lambda _device: ("tmpfs", "tmpfs"))
    done = CliRunner().invoke(cli, ["doctor", str(tmp_path)])
    assert done.exit_code == 1
    assert "tmpfs is memory: a restart" in done.output


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in {"torch", "aiohttp", "kopf", "lightkube"}:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    done = CliRunner().invoke(cli, ["doctor"])
    assert "not installed: needed for training jobs and remesh run; pip install" in done.stdout
    assert done.stdout.count("needed for remesh operator; pip install 'remesh[kubernetes]'") == 2
    report = json.loads(CliRunner().invoke(cli, ["doctor", "--json"]).stdout)
    assert report["versions"]["torch"] == ""


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(cli, ["doctor", str(tmp_path / "file" / "runs")])
    assert done.exit_code == 1
    assert "bad" in done.output


def test_a_store_that_lets_two_writers_succeed() -> None:
    class Careless(MemoryStorage):
        def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
            super().put(path, data, overwrite=True)

    careless = {each.name: each.status for each in check_place(Careless())}
    assert careless["exclusive creation"] == "bad"
    good = {each.name: each.status for each in check_place(MemoryStorage())}
    assert set(good.values()) == {"good"}
