"""Alert rules, the dashboard and the page for those on call: what they name is there."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from remesh.cli import cli
from remesh.elastic.nodes import Outcome
from remesh.elastic.progress import RankProgress
from remesh.elastic.protocol import JobEnded
from remesh.kubernetes.operator import Metrics
from tests.elastic.agents import Served, serving

yaml = pytest.importorskip("yaml")
DOCS = Path(__file__).parents[2] / "docs"
RULES = yaml.safe_load((DOCS / "monitoring/alerts.yml").read_text())["groups"]
DASHBOARD = json.loads((DOCS / "monitoring/dashboard.json").read_text())
PAGE = (DOCS / "how-to/on-call.md").read_text()

NAME = re.compile(r"\bremesh_\w+")
EXPOSED = re.compile(r"^(remesh_\w+)", re.MULTILINE)


def metrics_of(served: Served) -> str:
    with urllib.request.urlopen(f"{served.url}/metrics") as reply:
        return str(reply.read().decode())


@pytest.fixture(scope="module")
def of_master() -> set[str]:
    """The names of all metrics of a master whose job trains."""
    with serving() as served:
        served.join_all([0, 1])
        for step in (4, 5):
            progress = RankProgress(step=step, time=0.0, step_seconds=0.1, saved_step=4)
            served.beat(0, {0: progress, 1: progress})
        return set(EXPOSED.findall(metrics_of(served)))


@pytest.fixture(scope="module")
def exposed(of_master: set[str]) -> set[str]:
    """The same, and those of the operator."""
    metrics = Metrics()
    metrics.actions.labels("Delete")
    return of_master | set(EXPOSED.findall(metrics.render().decode()))


def test_the_page_about_elastic_jobs_names_all_metrics_of_the_master(of_master: set[str]) -> None:
    cells = re.findall(r"^\| (`remesh_[^|]*) \|", (DOCS / "elastic.md").read_text(), re.MULTILINE)
    assert of_master == {name for cell in cells for name in NAME.findall(cell)}


def test_the_status_names_the_ranks_that_are_slow_and_behind(served: Served) -> None:
    served.join_all([0, 1, 2, 3])
    for rank in range(4):
        step, seconds = (4, 0.3) if rank == 2 else (5, 0.1)
        served.beat(rank, {rank: RankProgress(step=step, time=0.0, step_seconds=seconds)})
    shown = CliRunner().invoke(cli, ["status", served.url]).output
    assert re.search(r"^  slow ranks +2 \(3\.0 times the median\)$", shown, re.MULTILINE), shown
    assert re.search(r"^  ranks behind +2$", shown, re.MULTILINE), shown


def test_the_status_before_the_first_node_has_none_of_its_options(served: Served) -> None:
    shown = CliRunner().invoke(cli, ["status", served.url]).output
    assert shown.startswith("waiting: no node has joined\n")
    assert "0 to 0" not in shown
    assert "per node" not in shown


def expressions() -> dict[str, str]:
    """Each expression of the rules and the dashboard, by what it is for."""
    rules = {rule["alert"]: rule["expr"] for group in RULES for rule in group["rules"]}
    panels = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    }
    return rules | panels


@pytest.mark.parametrize("what", expressions())
def test_expressions_ask_for_metrics_that_there_are(what: str, exposed: set[str]) -> None:
    expression = expressions()[what]
    names = set(NAME.findall(expression))
    assert names <= exposed
    assert names or "up{job=" in expression
    assert expression.count("(") == expression.count(")")


def test_rules_are_whole() -> None:
    for rule in (rule for group in RULES for rule in group["rules"]):
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"]["summary"]
    jobs = {job for what in expressions().values() for job in re.findall(r'job="([^"]+)"', what)}
    assert jobs == set(re.findall(r"job_name: (\S+)", PAGE))


def test_a_job_that_has_succeeded_is_told_from_one_that_does_not_train(served: Served) -> None:
    served.join_all([0, 1])
    trains = metrics_of(served)
    for number in (0, 1):
        served.agent(number).leave(Outcome.SUCCEEDED)
    served.agent(0).shown(JobEnded)
    ended = metrics_of(served)
    for metric, values in (("running", (1.0, 0.0)), ("succeeded", (0.0, 1.0))):
        for text, value in zip((trains, ended), values, strict=True):
            assert f"remesh_{metric} {value}\n" in text


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_commands_of_the_page_are_commands() -> None:
    found = re.findall(r"`remesh ([^`]+)`", PAGE)
    assert len(found) > 15
    for words in map(shlex.split, found):
        command: click.Command = cli
        arguments = list(words)
        while isinstance(command, click.Group):
            name = arguments.pop(0)
            inner = command.get_command(click.Context(command), name)
            assert inner is not None, words
            command = inner
        if name != "run" and arguments:
            command.make_context(name, arguments)  # raises if an option is wrong
