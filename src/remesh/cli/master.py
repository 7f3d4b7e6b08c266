"""`remesh master` and `remesh status`: a job's master, and a look at it. Nothing needs torch."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import resource
import signal
import ssl
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import msgspec

from remesh.cli import output
from remesh.elastic.client import Client, read_token
from remesh.elastic.failures import read_patterns
from remesh.elastic.job import Policy
from remesh.elastic.journal import Journal
from remesh.elastic.nodes import MAX_LISTED, Outcome, listed
from remesh.elastic.protocol import HEARTBEAT_TIMEOUT
from remesh.elastic.status import Status
from remesh.errors import StorageError

if TYPE_CHECKING:
    from remesh.elastic.server import ServerOptions


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        return json.dumps(entry)


@click.command(
    epilog=output.example(
        "remesh master --state job.json",
        "remesh master --host 0.0.0.0 --token-file token --state job.json",
    )
)
@click.option(
    "--state",
    default=":memory:",
    metavar="FILE",
    help="Where the journal is kept, from which a restarted master continues.",
)
@click.option(
    "--on-excluded",
    metavar="COMMAND",
    help="Run this in a shell for each node that is excluded: $REMESH_NODE is its name, "
    "$REMESH_NODE_ID its id, $REMESH_REASON why.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", default=29400, help="Port; 0 for any free one.")
@click.option("--token-file", metavar="FILE", help="What requests must know; needed off loopback.")
@click.option("--tls-cert", metavar="FILE", help="Speak HTTPS with this certificate.")
@click.option("--tls-key", metavar="FILE", help="The certificate's key, if in another file.")
@click.option(
    "--end-with-job",
    is_flag=True,
    help="End when the job has, and all agents know: 0 if it has succeeded, else 1.",
)
@click.option(
    "--heartbeat-timeout",
    type=output.Number(min=0, min_open=True),
    default=HEARTBEAT_TIMEOUT,
    metavar="SECONDS",
    help="Seconds of silence after which a node is lost.",
)
@click.option("--check", is_flag=True, help="Test nodes before they train.")
@click.option(
    "--save-grace",
    type=output.Number(min=0),
    default=60.0,
    metavar="SECONDS",
    help="Seconds that a growing job waits for a checkpoint.",
)
@click.option(
    "--hang-timeout",
    type=output.Number(min=0),
    metavar="SECONDS",
    help="Without a step for so long, a job hangs; 0: never. By default this follows from its "
    "steps, and is an hour at least.",
)
@click.option("--failure-patterns", metavar="FILE", help="JSON that tells kinds of failures apart.")
def master(
    *, state: str, on_excluded: str | None, end_with_job: bool, check: bool, **given: Any
) -> None:
    """Coordinate the nodes of a job: form worlds, decide on failures, show state.

    Needs neither torch nor a GPU. Its URL is printed on stdout; there it shows a page. A master
    that is killed and started again with the same `--state` goes on where it was.
    """
    with output.needs("the master", "elastic"):
        from remesh.elastic.server import ServerOptions
    try:
        options = ServerOptions(
            host=given["host"],
            port=given["port"],
            token=read_token(given["token_file"]),
            tls=_tls_context(given["tls_cert"], given["tls_key"]),
        )
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    policy = Policy(
        heartbeat_timeout=given["heartbeat_timeout"],
        check=check,
        save_grace=given["save_grace"],
        hang_timeout=given["hang_timeout"],
        patterns=read_patterns(given["failure_patterns"]),
    )
    # Nodes that wait for a world keep a connection each.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])

    # A shell lets what it starts in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(_serve(policy, options, state, on_excluded, end_with_job=end_with_job))
    except StorageError:
        raise
    except (OSError, OverflowError) as error:  # there are no more ports than 65535
        raise StorageError(
            f"cannot listen on {options.host}:{options.port}: {error}\n"
            "If another master has this port, give --port a free one; 0 takes any"
        ) from error


async def _serve(
    policy: Policy,
    options: ServerOptions,
    state: str,
    on_excluded: str | None,
    *,
    end_with_job: bool,
) -> None:
    from remesh.elastic.master import Master
    from remesh.elastic.server import serve

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    served = Master(policy, Journal(state), on_excluded=on_excluded)
    await serve(served, options, click.echo, end_with_job=end_with_job)
    sys.exit(0 if served.job.outcome is Outcome.SUCCEEDED else 1)


def _tls_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    if certificate is None:
        if key is not None:
            raise click.UsageError("--tls-key is the key of a certificate: give --tls-cert, too")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        hint = "" if key else "\nIf its key is in another file, name that with --tls-key"
        text = f"--tls-cert {certificate} cannot be used: {error}{hint}"
        raise click.ClickException(text) from error
    return context


def asks_master(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options with which a master is asked, and `client`."""

    @click.option("--token-file", metavar="FILE", help="The master's token.")
    @click.option("--tls-ca", metavar="FILE", help="Trust certificates signed by this one.")
    @functools.wraps(command)
    def asking(*, master: str, token_file: str | None, tls_ca: str | None, **given: Any) -> None:
        command(client=Client(master, token=read_token(token_file), tls_ca=tls_ca), **given)

    return asking


@click.command(
    epilog=output.example("remesh status http://127.0.0.1:29400"),
)
@click.argument("master", metavar="URL")
@asks_master
@output.json_option
def status(*, client: Client, as_json: bool) -> None:
    """Show the state of a master's job."""
    now = client.status()
    if as_json:
        output.print_json(msgspec.to_builtins(now))
    else:
        _print_status(now)


@click.group(
    epilog=output.example(
        "remesh node exclude host-7 --master http://127.0.0.1:29400 --reason 'fan is broken'",
        "remesh node readmit host-7 --master http://127.0.0.1:29400",
    )
)
def node() -> None:
    """Take a node out of a running job, and take it back."""


_node, _master = (
    click.argument("node", metavar="NODE"),
    click.option("--master", required=True, metavar="URL", help="The job's master."),
)


@node.command(name="exclude")
@_node
@_master
@asks_master
@click.option("--reason", default="", metavar="TEXT", help="Why; shown where the node is.")
def exclude(*, client: Client, node: str, reason: str) -> None:
    """Exclude a node, given by its name or id, from the next world on.

    The ranks are asked to save first, within the master's `--save-grace`. Then the others form a
    world without it; if they are too few for one, start another node before. Its agent waits until
    the node is readmitted; the master remembers that over a restart.
    """
    client.set_node(node, is_used=False, reason=reason)
    output.line(f"node {node} is excluded; see remesh status {client.url}")


@node.command(name="readmit")
@_node
@_master
@asks_master
def readmit(*, client: Client, node: str) -> None:
    """Use a node again that was excluded by hand."""
    client.set_node(node, is_used=True)
    output.line(f"node {node} may be used again; see remesh status {client.url}")


def _last_step(now: Status) -> str:
    if now.step is None:
        return "none reported"
    age = "" if now.step_age is None else f", the last one {now.step_age:.0f} s ago"
    return f"{now.step}{age}"


def _print_status(now: Status) -> None:
    output.line(*(f"warning: {text}" for text in now.warnings), f"{now.phase}: {now.reason}")
    slow = [f"{each.rank} ({each.slow:.1f} times the median)" for each in now.ranks if each.slow]
    of_job = [  # which the first node brings
        ("nodes", f"{now.min_nodes} to {now.max_nodes} in multiples of {now.node_unit}"),
        ("restart budget", f"{output.plural(now.max_restarts, 'restart')} per node"),
    ]
    output.print_facts(
        [
            ("round", f"{now.round}, {output.plural(max(now.round - 1, 0), 'restart')}"),
            *(of_job if now.began is not None else ()),
            ("step", _last_step(now)),
            ("slow ranks", ", ".join(slow[:MAX_LISTED]) or "none"),
            ("ranks behind", listed(each.rank for each in now.ranks if each.behind) or "none"),
            ("newest checkpoint", "none" if now.saved_step is None else f"step {now.saved_step}"),
            ("goodput", "not known" if now.goodput is None else f"{now.goodput:.1%} of the time"),
        ]
    )
    output.print_table(
        (">id", "<state", ">rank", ">processes", ">heard", ">charged restarts", "<name"),
        now.nodes,
        lambda node: (
            str(node.id),
            node.state,
            "" if node.node_rank is None else str(node.node_rank),
            str(node.num_processes),
            "" if node.last_heard is None else f"{node.last_heard:.1f} s",
            f"{node.num_charged} of {now.max_restarts}",
            f"{node.name} {node.reason}".strip(),
        ),
    )
    if sum(now.nodes_by_state.values()) > len(now.nodes):
        states = ", ".join(f"{count} {state}" for state, count in now.nodes_by_state.items())
        output.line(f"{len(now.nodes)} nodes are shown, of {states}; the page finds the others")
    for failed in now.failures[:3]:
        if failed.cause:
            output.line(f"round {failed.round}: {failed.cause}")
            continue
        first = failed.failures[0]
        message = first.message.splitlines()[-1] if first.message else ""
        how = first.signal or f"exit code {first.exit_code}"
        where = f"rank {first.rank} on node {first.node_id}"
        output.line(f"round {failed.round}: {where}, {how} {message}")
