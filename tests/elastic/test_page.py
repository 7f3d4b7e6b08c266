"""The master's page in a real browser."""

from __future__ import annotations

import html
import re
from pathlib import Path

import msgspec
import pytest

from remesh.elastic.progress import RankProgress
from remesh.elastic.server import ServerOptions
from tests.browser import BROWSER, browse
from tests.elastic.agents import SETTINGS, Served, serving


def text_of(document: str) -> str:
    """What a reader sees, without the script."""
    body = re.sub(r"<(script|style).*?</\1>", "", document, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", " ", body))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_the_page_shows_the_job_and_escapes_what_it_shows(tmp_path: Path, served: Served) -> None:
    served.join_all([0, 1, 2], settings=msgspec.structs.replace(SETTINGS, min_nodes=3))
    served.beat(0, {0: RankProgress(step=41, time=-0.1, saved_step=40)})
    agent = served.agent(1)
    failures = [
        agent.failure(
            rank,
            exit_code,
            time=10.0 - rank,
            message=message,
            log_tail="the last words",
        )
        for rank, exit_code, message in (
            (2, -9, "ValueError: <script>document.title='taken'</script>"),
            (3, 1, "RuntimeError: Connection closed by peer"),
        )
    ]
    agent.report(*failures)
    document = browse(served.url, tmp_path, "--dump-dom")
    assert "<title>remesh: running</title>" in document
    seen = " ".join(text_of(document).split())
    for part in (
        "round 1 on 3 of 3 nodes",
        "newest checkpoint 40",
        "3 active",
        "1 report",
        "restart budget: 3 per node",
        "charged restarts",
        "1 of 3",
        "host-1",
        "rank 2 (local rank 0) on node 1: SIGKILL",
        "ValueError: <script>document.title='taken'</script>",
        "1 more failed after it",
        "round 1: nodes 0, 1, 2",
    ):
        assert part in seen, part
    # The root cause stands before what it caused, though its clock says it came later.
    assert seen.index("SIGKILL") < seen.index("Connection closed by peer")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_the_page_asks_for_the_token(tmp_path: Path) -> None:
    with serving(options=ServerOptions(token="secret")) as served:
        document = browse(served.url, tmp_path, "--dump-dom")
    assert '<form id="login">' in document
    assert "the token is missing or wrong" in text_of(document)
