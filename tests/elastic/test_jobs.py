"""One master with several jobs, which know nothing of each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from remesh.cli import cli
from remesh.elastic import hooks
from remesh.elastic.client import Client
from remesh.elastic.job import Policy
from remesh.elastic.jobs import Jobs, is_name, job_token
from remesh.elastic.journal import Journal
from remesh.elastic.master import Master
from remesh.elastic.protocol import PURPOSES, name_of
from remesh.elastic.server import ServerOptions, ServerThread
from remesh.errors import MasterError
from tests.browser import BROWSER, browse
from tests.elastic.test_master import ask, connections_kept, join_all, speaker
from tests.elastic.test_page import text_of
from tests.waiting import is_alive, wait_until

TOKEN = "the master's own"


@contextmanager
def start(directory: Path, *, token: str = TOKEN, on_excluded: str | None = None) -> Iterator[str]:
    def make() -> Jobs:
        def master(journal: Journal) -> Master:
            return Master(Policy(heartbeat_timeout=600.0), journal)

        jobs = Jobs.in_directory(directory, master)
        jobs.on_excluded = on_excluded
        return jobs

    options = ServerOptions(token=token)
    with ServerThread(make, options) as server, connections_kept(server.url):
        yield server.url


def first(url: str, job: str, token: str, **changes: Any) -> tuple[int, Any]:
    """The first request of a node."""
    body = {
        "name": "host",
        "node_id": None,
        "incarnation": f"agent of {job}",
        "address": "127.0.0.1",
        "num_processes": 1,
        "settings": {"min_nodes": 1, "max_nodes": 2},
    }
    return ask(f"{url}/jobs/{job}", "join", body | changes, token)


def test_a_token_opens_its_own_job(tmp_path: Path) -> None:
    mine = job_token(TOKEN, "a")
    with start(tmp_path) as url:
        assert first(url, "a", mine)[0] == 200
        assert first(url, "b", mine)[0] == 401
        assert ask(url, "jobs", token=mine, method="GET")[0] == 401


@pytest.mark.parametrize("name", ["status", *(name_of(kind) for kind in PURPOSES)])
def test_no_request_reaches_another_job(tmp_path: Path, name: str) -> None:
    mine = job_token(TOKEN, "a")
    with start(tmp_path) as url:
        assert first(url, "b", TOKEN)[0] == 200
        method = "GET" if name == "status" else "POST"
        assert ask(f"{url}/jobs/b", name, {}, mine, method)[0] == 401
        assert ask(f"{url}/jobs/a/../b", name, {}, mine, method)[0] != 200
        assert ask(f"{url}/jobs/a%2f..%2fb", name, {}, mine, method)[0] != 200


def test_jobs_do_not_see_each_other_and_outlive_the_master(tmp_path: Path) -> None:
    with start(tmp_path) as url:
        for job in "ab":
            # Jobs of two nodes, so that none begins, however long this takes.
            status, reply = first(url, job, TOKEN, settings={"min_nodes": 2, "max_nodes": 2})
            assert (status, reply["node_id"]) == (200, 0), "each counts from 0"
        client = Client(f"{url}/jobs/a", token=job_token(TOKEN, "a"))
        assert [node.name for node in client.status().nodes] == ["host"]
        status, reply = ask(f"{url}/jobs/c", "status", token=TOKEN, method="GET")
        assert (status, "begins when its first node joins" in reply["error"]) == (404, True)
        client.close()
    with start(tmp_path) as url:
        (tmp_path / "token").write_text(TOKEN)
        words = ["status", url, "--jobs", "--token-file", str(tmp_path / "token")]
        listed = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)["jobs"]
        assert [(job["name"], job["num_nodes"]) for job in listed] == [("a", 0), ("b", 0)]
        assert "waiting" in CliRunner().invoke(cli, words).stdout
        with pytest.raises(MasterError, match="add /jobs/NAME to its URL"):
            Client(url, token=TOKEN).status()


def test_names(tmp_path: Path) -> None:
    assert is_name("llama-7b_2026.11")
    for name in ("", ".", "..", "-a", "a/b", "a b", "é", "x" * 65):
        assert not is_name(name)
    with start(tmp_path) as url:
        assert first(url, "..", TOKEN)[0] == 404
        assert first(url, "x" * 65, TOKEN)[0] == 404
    assert list(tmp_path.iterdir()) == []


def test_the_command_makes_the_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    done = CliRunner().invoke(cli, ["token", "a", "--token-file", str(file)])
    assert done.stdout.strip() == job_token(TOKEN, "a")
    assert CliRunner().invoke(cli, ["token", "a/b", "--token-file", str(file)]).exit_code == 2


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_the_page_lists_jobs(tmp_path: Path) -> None:
    with start(tmp_path / "jobs", token="") as url:
        first(url, "a", "")
        document = browse(f"{url}/", tmp_path, "--dump-dom")
        assert 'href="jobs/a/"' in document
        assert "waiting" in text_of(document)
        assert "restart budget" in text_of(browse(f"{url}/jobs/a", tmp_path, "--dump-dom"))


def exclude_a_node(job: str) -> None:
    """Have one of two nodes report that its hardware is broken."""
    join_all(job, [0, 1])
    broken = {"rank": 2, "local_rank": 0, "exit_code": 201, "time": 1.0}
    failure = {"node_id": 1, "round": 1} | broken
    assert ask(job, "failures", speaker(1, 1) | {"failures": [failure]})[0] == 200


def output_at_the_end(
    command: str, tmp_path: Path, finish_seconds: float = hooks.FINISH_SECONDS
) -> str:
    """What a command for an excluded node has written to `$OUT` when the master has ended.

    The master ends as soon as the command has written a line.
    """
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "FINISH_SECONDS", finish_seconds)
        patch.setenv("OUT", str(out))
        with start(tmp_path / "jobs", token="", on_excluded=command) as url:
            exclude_a_node(f"{url}/jobs/a")
            wait_until(lambda: out.exists() and out.read_text().endswith("\n"), "the command runs")
    return out.read_text()


def test_a_command_is_run_for_excluded_nodes(tmp_path: Path) -> None:
    command = 'echo "$REMESH_JOB $REMESH_NODE $REMESH_NODE_ID $REMESH_REASON" >> "$OUT"'
    assert output_at_the_end(command, tmp_path).startswith("a host-1 1 ")


def test_the_master_waits_for_a_command_when_it_ends(tmp_path: Path) -> None:
    command = 'echo started > "$OUT"; sleep 0.2; echo ended >> "$OUT"'
    assert output_at_the_end(command, tmp_path, finish_seconds=600.0) == "started\nended\n"


def test_the_master_kills_a_command_that_hangs_when_it_ends(tmp_path: Path) -> None:
    command = 'sleep 1000 & echo $! > "$OUT"; wait'
    written = output_at_the_end(command, tmp_path, finish_seconds=0.0)
    wait_until(lambda: not is_alive(int(written)), "what the command started ends, too")


def test_a_command_that_cannot_be_started(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = f"true {'x' * (1 << 20)}"  # longer than the system takes
    with start(tmp_path / "jobs", token="", on_excluded=command) as url:
        exclude_a_node(f"{url}/jobs/a")
        wait_until(lambda: "cannot be started" in caplog.text, "the failure is reported")
    assert "the excluded node host-1 cannot be started" in caplog.text
