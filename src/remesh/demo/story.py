"""The demo from its beginning to its end: five runs, and what must be true of them.

Nothing here knows how processes, checkpoints or drawings work. Whatever is not as it must be
raises `DemoError`, except that losses differ: then the result says so, because the numbers are
what one wants to see.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

from rich.console import Console

from remesh import catalog
from remesh.catalog import step_name
from remesh.checkpoint import Checkpoint
from remesh.demo import launch, recovery, report
from remesh.demo.config import Kill, Kind, Layout, RunSpec, TrainConfig
from remesh.demo.messages import AboutToDie, Failed, Message, Ready, SaveDone, StepDone
from remesh.demo.result import (
    LOGS_NAME,
    REFERENCE,
    RESULT_NAME,
    TOLERANCE,
    DemoError,
    DemoResult,
    HalfWritten,
    KillResult,
    RecoveryResult,
    RunResult,
    StoredResult,
    compare,
)
from remesh.errors import CheckpointNotFoundError
from remesh.storage import open_storage

MARKER = ".remesh-demo"
PICTURE_NAME = "layout.html"

SAVE_EVERY = 10
KILL = Kill(rank=2, step=30)


class DirectoryRefusedError(DemoError):
    """The output directory was not made by the demo."""


@dataclass(frozen=True, slots=True)
class Told:
    """A run that has ended: its plan, everything its ranks said in order, and its end."""

    spec: RunSpec
    messages: tuple[tuple[int, Message], ...]
    end: launch.RunEnd


def tell(
    out: Path, console: Console, list_path: Callable[[Path, tuple[str, ...]], None]
) -> DemoResult:
    """Run the demo.

    Args:
        out: Directory for checkpoints, logs and the picture. What an earlier demo left there is
            replaced.
        console: Where to show the progress.
        list_path: Shows the checkpoints in a directory, or what a checkpoint holds of the names
            that match the patterns.

    Returns:
        What happened; it is also in `result.json` under `out`.

    Raises:
        DirectoryRefusedError: If `out` was not made by the demo.
        DemoError: If anything else goes wrong, except that losses differ.
    """
    begin = time.monotonic()
    prepare_directory(out)
    context = launch.prepare()
    logs = out.absolute() / LOGS_NAME
    train = TrainConfig()
    four = Layout(Kind.FSDP2, 4)

    def play(spec: RunSpec) -> Told:
        return _play(context, spec, logs, console)

    reference = play(RunSpec(name="A", purpose=REFERENCE, layout=four, train=train))
    _require_success(reference, logs)
    root = out.absolute()
    killed = play(
        RunSpec(
            name="B",
            purpose="killed",
            layout=four,
            train=train,
            root=root,
            save_every=SAVE_EVERY,
            kill=KILL,
        )
    )
    _require_death(killed, logs)

    half_written = examine_half_written(out / step_name(KILL.step))
    newest = newest_committed(out)
    stored = examine_stored(newest, KILL.step - SAVE_EVERY)
    report.show_half_written(console, half_written, newest)
    list_path(out, ())
    list_path(newest, report.LISTED)

    told = [reference, killed]
    for name, layout in (("C", Layout(Kind.FSDP2, 2)), ("D", Layout(Kind.TENSOR_PARALLEL, 2))):
        spec = RunSpec(name=name, purpose="resumed", layout=layout, train=train, root=root)
        told.append(play(spec))
        _require_success(told[-1], logs)

    losses = losses_of(reference)
    played, recovered = _play_recovery(logs, console, train, losses)
    runs = (*(summarise(of_run, losses) for of_run in told), *played)
    result = DemoResult(
        passed=all(run.agrees for run in runs[1:]),
        tolerance=TOLERANCE,
        max_difference=max(run.max_difference for run in runs if run.first_step),
        runs=runs,
        half_written=half_written,
        resumed_from=stored,
        recovery=recovered,
        picture=out / PICTURE_NAME,
        seconds=time.monotonic() - begin,
    )
    page = report.draw(result, [held_by_rank(of_run) for of_run in told[1:]])
    result.picture.write_text(page, encoding="utf-8")
    (out / RESULT_NAME).write_text(result.to_json() + "\n", encoding="utf-8")
    return result


def prepare_directory(out: Path) -> None:
    """Make the output directory, or clear what an earlier demo left in it.

    Raises:
        DirectoryRefusedError: If it is a file, cannot be written, or holds something and was not
            made by the demo.
    """
    if out.exists() and not out.is_dir():
        raise DirectoryRefusedError(f"{out} is a file; name a directory with --out")
    marker = out / MARKER
    if out.is_dir() and any(out.iterdir()) and not marker.exists():
        raise DirectoryRefusedError(
            f"{out} is not empty and was not made by the demo; name another directory with --out"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        marker.write_text("Made by `remesh demo`, which replaces its own files here.\n")
        for path in (*out.glob("step_*"), out / LOGS_NAME):
            if path.is_dir():
                shutil.rmtree(path)
        for name in (RESULT_NAME, PICTURE_NAME):
            (out / name).unlink(missing_ok=True)
        (out / LOGS_NAME).mkdir()
    except OSError as error:
        raise DirectoryRefusedError(
            f"{out} cannot be used ({error}); name another directory with --out"
        ) from error


def _play(context: ForkServerContext, spec: RunSpec, logs: Path, console: Console) -> Told:
    """Run one run, showing it."""
    messages: list[tuple[int, Message]] = []
    with report.following(console, spec) as show:

        def hear(rank: int, message: Message) -> None:
            messages.append((rank, message))
            show(rank, message)

        end = launch.run(context, spec, logs, hear)
    return Told(spec, tuple(messages), end)


def _play_recovery(
    logs: Path, console: Console, train: TrainConfig, reference: dict[int, float]
) -> tuple[tuple[RunResult, ...], RecoveryResult | None]:
    """Run E: a rank is killed, and the others go on. Nothing without what `remesh run` needs."""
    if not recovery.is_possible():
        return (), None
    layout = Layout(Kind.DATA_PARALLEL, 4)
    spec = RunSpec(name="E", purpose="goes on", layout=layout, train=train)
    begin = time.monotonic()
    with report.following(console, spec) as show:
        entries = recovery.play(
            layout.num_ranks,
            logs / "run-e.log",
            lambda step, loss: show(0, StepDone(step, loss)),
        )
    found = recovery.summarise(entries)
    report.show_recovery(console, found)
    losses = recovery.losses_of(entries)
    num_compared, max_difference = compare(losses, reference)
    run = RunResult(
        name=spec.name,
        purpose=spec.purpose,
        layout=str(layout),
        num_ranks=layout.num_ranks,
        first_step=0,
        last_step=max(losses),
        losses=losses,
        commits=(),
        kill=None,
        num_compared=num_compared,
        max_difference=max_difference,
        load_seconds=None,
        seconds=time.monotonic() - begin,
    )
    return (run,), found


# ---------------------------------------------------------------------------------------------
# What must be true
# ---------------------------------------------------------------------------------------------


def _require_success(told: Told, logs: Path) -> None:
    for rank, ended in enumerate(told.end.ranks):
        if ended.exit_code != 0:
            raise DemoError(_account_of(told, rank, logs))


def _require_death(told: Told, logs: Path) -> None:
    """The planned rank died by the planned signal, and no other rank got through."""
    for rank, ended in enumerate(told.end.ranks):
        if rank == KILL.rank and ended.exit_code != -signal.SIGKILL:
            raise DemoError(f"rank {rank} should have been killed; {_account_of(told, rank, logs)}")
        if rank != KILL.rank and ended.exit_code == 0:
            raise DemoError(f"run B: rank {rank} did not notice that rank {KILL.rank} was killed")


def _account_of(told: Told, rank: int, logs: Path) -> str:
    errors = [
        message.error
        for sender, message in told.messages
        if sender == rank and isinstance(message, Failed)
    ]
    ended = told.end.ranks[rank]
    how = "had to be ended" if ended.by_launcher else f"ended with code {ended.exit_code}"
    why = errors[0] if errors else "it gave no reason"
    log = launch.log_path(logs, told.spec, rank)
    return f"run {told.spec.name}: rank {rank} {how}: {why} (its output: {log})"


def newest_committed(root: Path) -> Path:
    """The newest directory under `root` that is a committed checkpoint.

    Raises:
        DemoError: If there is none.
    """
    newest = catalog.newest_of(catalog.list_checkpoints(open_storage(root)))
    if newest is None:
        raise DemoError(f"{root}: there is no committed checkpoint")
    return Path(newest.path)


def examine_half_written(path: Path) -> HalfWritten:
    """What the interrupted save left, and how it is refused.

    Raises:
        DemoError: If it opens as a checkpoint.
    """
    try:
        Checkpoint(path)
    except CheckpointNotFoundError as error:
        sizes = _file_sizes(path)
        return HalfWritten(
            path=path,
            num_files=len(sizes),
            num_bytes=sum(sizes),
            refusal=f"{type(error).__name__}: {error}",
        )
    raise DemoError(f"{path}: the save was interrupted, yet this opens as a checkpoint")


def examine_stored(path: Path, step: int) -> StoredResult:
    """Counts of the checkpoint to resume from.

    Raises:
        DemoError: If it is not that of the given step.
    """
    if path.name != step_name(step):
        raise DemoError(f"{path}: the newest committed checkpoint should be that of step {step}")
    index = Checkpoint(path).index
    return StoredResult(
        path=path,
        step=step,
        num_tensors=len(index),
        num_bytes=sum(index[name].num_bytes for name in index),
        num_file_bytes=sum(_file_sizes(path)),
    )


def _file_sizes(path: Path) -> list[int]:
    return [file.stat().st_size for file in path.rglob("*") if file.is_file()]


# ---------------------------------------------------------------------------------------------
# From messages to results
# ---------------------------------------------------------------------------------------------


def losses_of(told: Told) -> dict[int, float]:
    """Loss of each step, by the number of steps done with it; every rank says the same."""
    return {
        message.num_steps_done: message.loss
        for rank, message in told.messages
        if rank == 0 and isinstance(message, StepDone)
    }


def held_by_rank(told: Told) -> dict[int, Ready]:
    """What each rank said when it was ready."""
    return {rank: message for rank, message in told.messages if isinstance(message, Ready)}


def summarise(told: Told, reference: dict[int, float]) -> RunResult:
    """A run in numbers, its losses compared to those of the reference."""
    losses = losses_of(told)
    ready = held_by_rank(told)
    num_compared, max_difference = compare(losses, reference)
    load_times = [r.load_seconds for r in ready.values() if r.load_seconds is not None]
    first_step = ready[0].num_steps_done
    return RunResult(
        name=told.spec.name,
        purpose=told.spec.purpose,
        layout=str(told.spec.layout),
        num_ranks=told.spec.layout.num_ranks,
        first_step=first_step,
        last_step=max(losses, default=first_step),
        losses=losses,
        commits=tuple(
            message.num_steps_done
            for rank, message in told.messages
            if rank == 0 and isinstance(message, SaveDone)
        ),
        kill=_kill_result(told),
        num_compared=num_compared,
        max_difference=max_difference,
        load_seconds=max(load_times, default=None),
        seconds=told.end.seconds,
    )


def _kill_result(told: Told) -> KillResult | None:
    deaths = [(rank, m) for rank, m in told.messages if isinstance(m, AboutToDie)]
    if not deaths:
        return None
    victim, death = deaths[0]
    others = [ended for rank, ended in enumerate(told.end.ranks) if rank != victim]
    return KillResult(
        rank=victim,
        step=death.num_steps_done,
        point=death.point,
        exit_code=told.end.ranks[victim].exit_code,
        num_noticed=sum(not ended.by_launcher for ended in others),
        num_ended_by_launcher=sum(ended.by_launcher for ended in others),
        errors=tuple(_errors(told.messages)),
    )


def _errors(messages: Sequence[tuple[int, Message]]) -> list[str]:
    return [f"rank {rank}: {m.error}" for rank, m in messages if isinstance(m, Failed)]
