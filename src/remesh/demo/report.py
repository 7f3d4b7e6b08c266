"""What the demo shows: progress and tables on the terminal, and the page with the drawings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from remesh.catalog import step_name
from remesh.demo import picture
from remesh.demo.config import RunSpec
from remesh.demo.messages import (
    AboutToDie,
    Failed,
    Message,
    Ready,
    SaveBegun,
    SaveDone,
    StepDone,
)
from remesh.demo.result import (
    LOGS_NAME,
    REFERENCE,
    RESULT_NAME,
    DemoResult,
    HalfWritten,
    KillResult,
    RecoveryResult,
    RunResult,
)

DRAWN = (
    "embedding.weight",
    "blocks.0.attention_norm.weight",
    "blocks.0.attention.q_proj.weight",
    "blocks.0.attention.o_proj.weight",
    "blocks.0.mlp.gate_proj.weight",
    "blocks.0.mlp.down_proj.weight",
)
"""Parameters that the page shows: one of each way to be cut."""

LISTED = ("model.blocks.0.*", "num_steps_done")
"""What is listed of a checkpoint: enough to see what one looks like."""


# ---------------------------------------------------------------------------------------------
# On the terminal, while it runs
# ---------------------------------------------------------------------------------------------


@contextmanager
def following(console: Console, spec: RunSpec) -> Iterator[Callable[[int, Message], None]]:
    """Show a run while the context lasts; yields what its ranks' messages are to be given to."""
    title = f"run {spec.name}  {spec.purpose}, {spec.layout}"
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{title:<36}", total=spec.train.num_steps, note="starting")

        def show(rank: int, message: Message) -> None:
            match message:
                case StepDone() if rank == 0:
                    note = f"loss {message.loss:.4f}"
                    progress.update(task, completed=message.num_steps_done, note=note)
                case Ready() if rank == 0:
                    progress.update(task, completed=message.num_steps_done, note="training")
                case SaveBegun() if rank == 0:
                    progress.update(task, note="saving")
                case _:
                    for line in _line_of(rank, message):
                        console.print(f"  [dim]{escape(line)}[/dim]", soft_wrap=True)

        yield show


def _line_of(rank: int, message: Message) -> list[str]:
    """The words for a message that deserves a line of its own, or nothing."""
    match message:
        case SaveDone(num_steps_done=step, seconds=seconds) if rank == 0:
            return [f"saved {step_name(step)} in {seconds:.2f} s"]
        case AboutToDie(num_steps_done=step, num_bytes=num_bytes):
            written = f"with {_bytes(num_bytes)} of its file written"
            return [f"rank {rank} killed (SIGKILL) in the save of step {step}, {written}"]
        case Failed(error=error):
            return [f"rank {rank} ends: {_cut(error, 72)}"]
    return []


def _cut(text: str, length: int) -> str:
    """The first line of a text, cut to a length."""
    line = text.strip().splitlines()[0]
    return line if len(line) <= length else f"{line[: length - 3]}..."


def show_half_written(console: Console, left: HalfWritten, newest: Path) -> None:
    """Say what became of the interrupted save."""
    console.print(
        f"\n[bold]{left.path.name}[/bold] was never committed. "
        f"What is there ({left.num_files} files, {_bytes(left.num_bytes)}) is no checkpoint:",
        soft_wrap=True,
    )
    console.print(f"  [dim]{escape(left.refusal)}[/dim]", soft_wrap=True)
    console.print(f"The newest committed checkpoint is [bold]{newest.name}[/bold].", soft_wrap=True)


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


# ---------------------------------------------------------------------------------------------
# On the terminal, at the end
# ---------------------------------------------------------------------------------------------


RUN_HEADINGS = ("run", "layout", "steps", "saved", "difference", "time", "end")


def show_result(console: Console, result: DemoResult, out: Path) -> None:
    """The closing table, the verdict, and where the files are."""
    console.print("\n[bold]What happened[/bold]\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in RUN_HEADINGS:
        table.add_column(heading)
    for run in result.runs:
        table.add_row(*(escape(cell) for cell in run_row(run)))
    console.print(table)
    console.print()
    for run in result.runs:
        if run.kill is not None:
            console.print(kill_text(run.kill), soft_wrap=True)
    if result.recovery is None:
        hint = r"pip install 'remesh\[elastic]'"
        console.print(f"Run E was left out: it needs {hint}.", soft_wrap=True)
    else:
        console.print(recovery_text(result.recovery), soft_wrap=True)
    stored = result.resumed_from
    console.print(
        f"The others resumed from step {stored.step}: {stored.num_tensors} tensors, "
        f"{_bytes(stored.num_file_bytes)} on disk.",
        soft_wrap=True,
    )
    verdict = "[bold green]Passed[/bold green]" if result.passed else "[bold red]Failed[/bold red]"
    console.print(f"{verdict}: {escape(verdict_text(result))}.", soft_wrap=True)
    console.print(f"It took {result.seconds:.0f} s.\n")
    for what, path in (
        ("picture", result.picture),
        ("checkpoint", stored.path),
        ("numbers", out / RESULT_NAME),
        ("output of ranks", out / LOGS_NAME),
    ):
        console.print(f"  {what:<16} {escape(str(path))}", soft_wrap=True)


def run_row(run: RunResult) -> tuple[str, ...]:
    """A run in the columns of `RUN_HEADINGS`."""
    return (
        f"{run.name} {run.purpose}",
        run.layout,
        f"{run.first_step + 1}-{run.last_step}",
        ", ".join(map(str, run.commits)) or "-",
        "-" if run.purpose == REFERENCE else f"{run.max_difference:.1e}".replace("0.0e+00", "0"),
        f"{run.seconds:.1f} s",
        "done" if run.kill is None else "killed",
    )


def kill_text(kill: KillResult) -> str:
    """What became of a run with a killed rank, in a sentence."""
    others = f"{kill.num_noticed} others noticed and ended by themselves"
    if kill.num_ended_by_launcher:
        others += f", {kill.num_ended_by_launcher} had to be ended"
    return (
        f"Rank {kill.rank} was killed in the middle of the save of step {kill.step}; the {others}."
    )


def show_recovery(console: Console, recovery: RecoveryResult) -> None:
    """Say how the others went on."""
    console.print(f"  [dim]{recovery_text(recovery)}[/dim]", soft_wrap=True)


def recovery_text(recovery: RecoveryResult) -> str:
    """How a run with a killed rank went on, in a sentence."""
    repeated = f"{recovery.num_repeated} steps were" if recovery.num_repeated else "no step was"
    return (
        f"Rank {recovery.rank} was killed after step {recovery.step}; {recovery.num_went_on} "
        "others went on in their processes, and the next step was done "
        f"{recovery.seconds:.2f} s after the kill; {repeated} made again."
    )


def verdict_text(result: DemoResult) -> str:
    """The outcome in a sentence."""
    num_compared = min(run.num_compared for run in result.runs if run.first_step)
    numbers = (
        f"the largest difference in {num_compared} steps after the resume is "
        f"{result.max_difference:.1e}, {result.tolerance:.0e} is accepted"
    )
    if result.passed:
        return f"every loss is that of the reference; {numbers}"
    off = ", ".join(f"run {run.name}" for run in result.runs[1:] if not run.agrees)
    return f"the losses of {off} are not those of the reference; {numbers}"


# ---------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------


def draw(result: DemoResult, ready: Sequence[Mapping[int, Ready]]) -> str:
    """The HTML page.

    Args:
        result: What happened.
        ready: What each rank said when it was ready, for the runs that saved or loaded.
    """
    later = result.runs[1 : 1 + len(ready)]
    columns = [
        picture.Column(
            run.layout,
            f"run {run.name}: {'saved' if run.kill else 'loaded'} by {run.num_ranks} ranks",
            _placed(of_run),
        )
        for run, of_run in zip(later, ready, strict=True)
    ]
    curves = [
        picture.Curve(f"run {run.name}: {run.purpose}, {run.layout}", run.name.lower(), run.losses)
        for run in result.runs
    ]
    num_ranks = max(run.num_ranks for run in result.runs)
    return picture.page(
        "One training state in three layouts",
        [
            ("", [picture.paragraph(_introduction(result))]),
            (
                "Which rank holds what",
                [
                    picture.paragraph(
                        "Some parameters of the model, to scale. The moments of Adam lie as their "
                        "parameter does. Striped: every rank holds the whole."
                    ),
                    picture.rank_legend(num_ranks),
                    picture.layout_svg(columns),
                ],
            ),
            (
                "The losses",
                [
                    picture.curve_legend(curves, lines=True),
                    picture.loss_svg(curves, _marks(result)),
                ],
            ),
            (
                "How far they are from the reference",
                [
                    picture.curve_legend(curves[1:], lines=False),
                    picture.difference_svg(curves[1:], curves[0], result.tolerance),
                ],
            ),
            (
                "The runs",
                [
                    picture.table(RUN_HEADINGS, [run_row(run) for run in result.runs]),
                    *(picture.paragraph(text) for text in _closing_words(result)),
                ],
            ),
        ],
    )


def _placed(ready: Mapping[int, Ready]) -> dict[str, picture.PlacedTensor]:
    """The drawn parameters of one run."""
    shapes = {held.name: held.shape for message in ready.values() for held in message.held}
    return {
        name: picture.PlacedTensor(
            shapes[name],
            tuple(
                (rank, box)
                for rank, message in sorted(ready.items())
                for held in message.held
                if held.name == name
                for box in held.boxes
            ),
        )
        for name in DRAWN
    }


def _marks(result: DemoResult) -> list[picture.Mark]:
    resumed = [run for run in result.runs if run.first_step]
    names = " and ".join(run.name for run in resumed)
    marks = []
    if result.recovery is not None:
        text = f"E: rank {result.recovery.rank} killed, the others go on"
        marks.append(picture.Mark(result.recovery.step, text, "kill"))
    for run in result.runs:
        for step in run.commits:
            here = step == result.resumed_from.step
            text = f"saved; {names} resume here" if here else "saved"
            marks.append(picture.Mark(step, text, "resume" if here else "save"))
        if run.kill is not None:
            text = f"rank {run.kill.rank} killed while saving"
            marks.append(picture.Mark(run.kill.step, text, "kill"))
    return marks


def _closing_words(result: DemoResult) -> list[str]:
    verdict = verdict_text(result)
    kills = [kill_text(run.kill) for run in result.runs if run.kill is not None]
    recovered = [] if result.recovery is None else [f"Run E: {recovery_text(result.recovery)}"]
    return [*kills, *recovered, f"{verdict[0].upper()}{verdict[1:]}."]


def _introduction(result: DemoResult) -> str:
    killed = next(run for run in result.runs if run.kill is not None)
    assert killed.kill is not None
    resumed = [run for run in result.runs if run.first_step]
    layouts = " and ".join(run.layout for run in resumed)
    return (
        f"A small transformer was trained by {killed.layout} and saved every few steps, until rank "
        f"{killed.kill.rank} was killed while it wrote the checkpoint of step {killed.kill.step}. "
        f"The newest committed checkpoint, of step {result.resumed_from.step}, was loaded by "
        f"{layouts}, and training continued with the same losses."
    )
