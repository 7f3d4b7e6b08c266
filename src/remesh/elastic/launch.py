"""`remesh run`: torchrun's options and ours, our agent, and a master if none is named.

The options of torchrun are torchrun's own parser's. A job of one machine needs no second command:
without `--master` a master is started in a thread of this process, for this job alone. Other users
of the machine reach its port, so it always has a token, which other commands of this user find.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import re
import secrets
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import (
    config_from_args,
    determine_local_world_size,
    get_args_parser,
)

from remesh.elastic import directories, script
from remesh.elastic.agent import Agent, guarded
from remesh.elastic.client import read_token
from remesh.elastic.handler import BACKEND, PATIENCE, Handler, make_handler
from remesh.elastic.job import Policy
from remesh.elastic.journal import Journal
from remesh.elastic.lifecycle import EXIT_JOB_FAILED, Limits
from remesh.elastic.master import Master
from remesh.elastic.node_check import run_test
from remesh.elastic.process_socket import ProcessSockets
from remesh.elastic.processes import Processes, completed
from remesh.elastic.server import ServerOptions, ServerThread
from remesh.elastic.snapshot_rescue import store_newest
from remesh.elastic.warm import Warm, modules_of

log = logging.getLogger(__name__)

REENTRY_SECONDS = 10.0
SIGNALS = ("SIGINT", "SIGHUP", "SIGQUIT")
"""Signals that end the agent as a failure; SIGTERM drains the node."""
NODE_OPTIONS = (
    *("node_id", "node_unit", "last_call", "join_timeout"),
    *("tls_ca", "master_patience", "beat_seconds"),
)
"""Options that have the same names in `--rdzv-conf`."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that begins as that of the other commands does."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = "Usage: ") -> None:
        super().add_usage(usage, actions, groups, prefix)


def _time(text: str, least: float = 0.0) -> float:
    """A number of seconds, for argparse."""
    with contextlib.suppress(ValueError):
        if least <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a time; give {least:g} or more seconds")


def _some_time(text: str) -> float:
    return _time(text, least=0.001)


def _node_id(text: str) -> int:
    """A node id, for argparse."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is no node id; they begin at 0")
    return number


def make_parser() -> argparse.ArgumentParser:
    """Torchrun's options and ours."""
    parser = get_args_parser()
    parser.prog = "remesh run"
    parser.usage = "remesh run [OPTIONS] SCRIPT [ARGS]..."
    parser.formatter_class = _Help
    parser.set_defaults(max_restarts=3)
    parser.description = (
        "Run a training script as one node of a job that survives failures: processes\n"
        "are started again, nodes may die, leave and join. Takes what torchrun takes;\n"
        "the options of its rendezvous are not needed. Without --master the job has\n"
        "this machine only, and its master runs inside this command."
    )
    parser.epilog = (
        "Example:\n"
        "    remesh run --nproc-per-node 4 train.py\n"
        "    remesh run --nnodes 2:4 --master http://head:29400 --nproc-per-node 8 train.py"
    )
    ours = parser.add_argument_group("remesh")
    ours.add_argument(
        "--master",
        metavar="URL|FILE",
        help="the job's master, or a file with its URL; its own by default",
    )
    ours.add_argument("--token-file", metavar="FILE", help="what the master wants to know")
    ours.add_argument("--tls-ca", metavar="FILE", help="trust certificates signed by this one")
    ours.add_argument("--node-id", type=_node_id, help="this node's place in the order of ranks")
    ours.add_argument("--node-name", help="what to call this node; the host's name by default")
    ours.add_argument("--node-unit", type=int, default=1, help="train on a multiple of this")
    ours.add_argument(
        "--last-call", type=_time, default=5.0, help="seconds to wait for more nodes than the least"
    )
    ours.add_argument(
        "--join-timeout", type=_time, default=600.0, help="seconds without enough nodes"
    )
    ours.add_argument(
        "--drain-seconds", type=_time, default=60.0, help="time for a last checkpoint on SIGTERM"
    )
    _add_process_options(ours)
    ours.add_argument(
        "--master-patience",
        type=_time,
        default=PATIENCE,
        metavar="SECONDS",
        help="how long to wait for a master that is away when it is needed",
    )
    ours.add_argument(
        "--beat-seconds", type=_some_time, default=1.0, help="time between two heartbeats"
    )
    own = parser.add_argument_group("remesh, without --master")
    own.add_argument(
        "--hang-timeout",
        type=_time,
        help="seconds without a step after which the job hangs; 0: never; by default this follows "
        "from its steps, and is an hour at least",
    )
    return parser


def _add_process_options(ours: argparse._ArgumentGroup) -> None:
    """How processes start and leave, and what they keep in memory."""
    ours.add_argument(
        "--reentry-timeout",
        type=_some_time,
        default=REENTRY_SECONDS,
        metavar="SECONDS",
        help="time for a process to leave a training function that is entered again",
    )
    ours.add_argument(
        "--preload",
        metavar="MODULES",
        help="modules that new processes find imported, with commas; '' for none; by default what "
        "a script that uses remesh.elastic imports first of torch, numpy and remesh",
    )
    ours.add_argument(
        "--snapshot-dir",
        default=directories.MEMORY,
        metavar="DIR",
        help="where snapshots are kept in memory; '' for nowhere",
    )


def main(arguments: Sequence[str]) -> None:
    """Run a script as this node's part of a job."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if problem := _problem_of(options):
        parser.exit(2, f"error: {problem}\n")
    # Who started this command may ignore it: the kernel would keep no exit codes of processes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _run(options)


def _problem_of(options: argparse.Namespace) -> str:
    """The problem with options that torchrun's parser takes as they are; empty if there is none."""
    nodes, restarts = str(options.nnodes), options.max_restarts
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nodes):
        return f"--nnodes {nodes}: give the number of nodes, 1 or more, or MIN:MAX"
    least, _, most = nodes.partition(":")
    if int(most or least) < int(least):
        return f"--nnodes {nodes}: the most nodes are fewer than the least; give MIN:MAX"
    if options.master is None and int(least) > 1:
        return (
            f"--nnodes {nodes}: without --master no other machine can join\n"
            "Start remesh master, and give its URL to all nodes with --master"
        )
    if restarts < 0:
        return f"--max-restarts {restarts}: give 0 or more"
    wanted = options.nproc_per_node
    try:
        is_number = determine_local_world_size(wanted) > 0
    except ValueError as error:
        reason = str(error).rstrip(".")
        return f"--nproc-per-node {wanted}: {reason}\nGive the number of processes of this node"
    if not is_number:
        return f"--nproc-per-node {wanted}: this node has to start 1 process or more"
    script_file = options.training_script
    if not (options.module or options.no_python or Path(script_file).exists()):
        return f"the script {script_file} does not exist\nThis is looked for in {Path.cwd()}"
    return ""


@record  # an error of ours goes where torchrun's would
def _run(options: argparse.Namespace) -> None:
    if options.tee == "0" and options.redirects == "0":
        options.tee = "3"  # also into files, whose ends are part of a failure's report
    preload = _preload_of(options)
    options.command = shlex.join([options.training_script, *options.training_script_args])
    if not options.no_python:
        _use_runner(options)
    config, command, command_arguments = config_from_args(options)
    config = completed(config)
    if not isinstance(command, str):
        raise SystemExit("remesh run starts commands: leave out --run-path")
    command_line, num_processes = [command, *command_arguments], config.nproc_per_node
    limits = Limits(
        num_processes=num_processes,
        drain=options.drain_seconds,
        reentry=options.reentry_timeout,
        shutdown=config.shutdown_timeout or 0.0,
        patience=options.master_patience,
    )
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(directories.socket_directory())
        url, file = options.master, options.token_file
        if url is None:
            token = read_token(file) or secrets.token_urlsafe(32)
            master = Master(Policy(hang_timeout=options.hang_timeout), Journal(":memory:"))
            url = stack.enter_context(ServerThread(master, ServerOptions(token=token))).url
            file = directories.write_token(directory, int(url.rpartition(":")[2]), token)
            log.warning("the job's page is at %s; it asks for the token in %s", url, file)
        handler = _make_handler(options, config, url, file)
        stack.callback(handler.node.close)
        snapshots = stack.enter_context(directories.snapshot_directory(options.snapshot_dir))
        stack.enter_context(guarded(directory))
        sockets = ProcessSockets(directory, num_processes)
        stack.callback(sockets.close)
        warm = Warm(preload, directory, command_line)
        stack.callback(warm.close)
        warm.look_after()
        processes = Processes(config, command_line, sockets=sockets, snapshots=snapshots, warm=warm)
        _run_agent(
            Agent(handler, processes, sockets, warm, limits, config.monitor_interval), snapshots
        )


def _preload_of(options: argparse.Namespace) -> tuple[str, ...]:
    """The modules that processes find imported."""
    if options.no_python or getattr(options, "numa_binding", None) is not None:
        return ()  # another command starts them
    if options.preload is not None:
        return tuple(name.strip() for name in options.preload.split(",") if name.strip())
    return modules_of(options.training_script, is_module=options.module)


def _use_runner(options: argparse.Namespace) -> None:
    """Let `remesh.elastic.script` run the script or module that the options name."""
    kind = ["-m"] if options.module else []
    options.training_script_args = [
        *kind,
        options.training_script,
        *options.training_script_args,
    ]
    # By path: the interpreter that $PYTHON_EXEC names may not have remesh.
    options.training_script, options.module = script.__file__, False


def _make_handler(
    options: argparse.Namespace, config: LaunchConfig, url: str, file: str | None
) -> Handler:
    parameters = RendezvousParameters(
        BACKEND,
        url,
        config.run_id,
        config.min_nodes,
        config.max_nodes,
        config.local_addr,
        token_file=file,
        name=options.node_name,
        nproc=config.nproc_per_node,
        max_restarts=config.max_restarts,
        command=options.command,
        **{name: getattr(options, name) for name in NODE_OPTIONS},
    )
    try:
        return make_handler(parameters, run_test)
    except ValueError as error:
        raise SystemExit(f"remesh run: {error}") from error


def _run_agent(agent: Agent, snapshots: str) -> None:
    signal.signal(signal.SIGTERM, agent.on_sigterm)
    for name in SIGNALS:
        signal.signal(signal.Signals[name], _raise_signal)
    try:
        agent.run()
    except (SystemExit, ChildFailedError) as leaving:
        code = leaving.code if isinstance(leaving, SystemExit) else EXIT_JOB_FAILED
        if code:
            # With this node alone, unless the whole job has ended.
            store_newest(snapshots, whole_only=code != EXIT_JOB_FAILED)
        raise


def _raise_signal(number: int, _frame: FrameType | None) -> NoReturn:
    """End the agent by an exception, as torchrun does; the next time at once: the guard is left."""
    signal.signal(number, signal.SIG_DFL)
    name = signal.Signals(number)
    raise SignalException(f"process {os.getpid()} got {name.name}", sigval=name)
