"""What the demo shows: progress and tables on the terminal, and the page with the drawings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from remesh.checkpoint import Checkpoint
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
from remesh.demo.result import DemoResult, HalfWritten, RunResult

DRAWN = (
    "embedding.weight",
    "blocks.0.attention_norm.weight",
    "blocks.0.attention.q_proj.weight",
    "blocks.0.attention.o_proj.weight",
    "blocks.0.mlp.gate_proj.weight",
    "blocks.0.mlp.down_proj.weight",
)
"""Parameters that the page shows: one of each way to be cut."""


# ---------------------------------------------------------------------------------------------
# On the terminal, while it runs
# ---------------------------------------------------------------------------------------------


@contextmanager
def following(console: Console, spec: RunSpec) -> Iterator[Callable[[int, Message], None]]:
    """Show a run while the context lasts; yields what its ranks' messages are to be given to."""
    title = f"run {spec.name}  {spec.purpose}, {spec.layout}"
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{title:<34}", total=spec.train.num_steps, note="starting")

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
                    for line in _line_of(spec, rank, message):
                        console.print(f"  [dim]{escape(line)}[/dim]", soft_wrap=True)

        yield show


def _line_of(spec: RunSpec, rank: int, message: Message) -> list[str]:
    """The words for a message that deserves a line of its own, or nothing."""
    match message:
        case SaveDone(num_steps_done=step, seconds=seconds) if rank == 0 and spec.saves is not None:
            return [f"saved {spec.saves.path(step).name} in {seconds:.2f} s"]
        case AboutToDie(num_steps_done=step, point=point):
            return [f"rank {rank} killed (SIGKILL) while saving step {step}, at {point}"]
        case Failed(error=error):
            return [f"rank {rank} ends: {_first_line(error)}"]
    return []


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0]
    return line if len(line) <= 140 else f"{line[:137]}..."


def show_half_written(console: Console, left: HalfWritten, newest: Path) -> None:
    """Say what became of the interrupted save."""
    console.print(
        f"\n[bold]{left.path.name}[/bold] was never committed: {left.num_files} files, "
        f"{_bytes(left.num_bytes)} of no use to anybody. Opening it says"
    )
    console.print(f"  [dim]{escape(_first_line(left.refusal))}[/dim]", soft_wrap=True)
    console.print(f"The newest committed checkpoint is [bold]{newest.name}[/bold]. It holds:\n")


def show_checkpoint(console: Console, path: Path) -> None:
    """A short list of what a checkpoint holds."""
    index = Checkpoint(path).index
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("tensor", "dtype", "shape"):
        table.add_column(heading)
    table.add_column("pieces", justify="right")
    table.add_column("bytes", justify="right")
    names = list(index)
    for name in names[:8]:
        stored = index[name]
        shape = " x ".join(map(str, stored.shape)) or "scalar"
        table.add_row(
            name, stored.dtype, shape, str(len(index.pieces(name))), f"{stored.num_bytes:,}"
        )
    console.print(table)
    total = sum(index[name].num_bytes for name in names)
    console.print(f"[dim]... {len(names)} tensors, {_bytes(total)} in all[/dim]\n")


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


# ---------------------------------------------------------------------------------------------
# On the terminal, at the end
# ---------------------------------------------------------------------------------------------


RUN_HEADINGS = ("run", "layout", "steps", "saved", "how it ended", "difference to A", "time")


def show_result(console: Console, result: DemoResult, out: Path) -> None:
    """The closing table, the verdict, and where the files are."""
    table = Table(title="What happened", title_justify="left", title_style="bold")
    for heading in RUN_HEADINGS:
        table.add_column(heading)
    for run in result.runs:
        table.add_row(*(escape(cell) for cell in run_row(run)))
    console.print(table)
    verdict = "[bold green]passed[/bold green]" if result.passed else "[bold red]FAILED[/bold red]"
    console.print(f"{verdict}: {escape(verdict_text(result))}")
    stored = result.resumed_from
    console.print(
        f"{_bytes(stored.num_file_bytes)} a checkpoint ({stored.num_tensors} tensors), "
        f"{result.seconds:.0f} s in all\n"
    )
    files = Table(box=None, pad_edge=False, show_header=False)
    files.add_row("picture", str(result.picture), style="bold")
    files.add_row("checkpoint", str(stored.path))
    files.add_row("numbers", str(out / "result.json"))
    files.add_row("output of the ranks", str(out / "logs"))
    console.print(files, soft_wrap=True)


def run_row(run: RunResult) -> tuple[str, ...]:
    """A run in the columns of `RUN_HEADINGS`."""
    difference = "" if run.purpose == "reference" else _difference(run)
    return (
        f"{run.name} {run.purpose}",
        run.layout,
        f"{run.first_step + 1} to {run.last_step}",
        ", ".join(map(str, run.commits)) or "-",
        _ending(run),
        difference,
        f"{run.seconds:.1f} s",
    )


def _ending(run: RunResult) -> str:
    if run.kill is None:
        return "completed" if run.first_step == 0 else f"resumed at {run.first_step}, completed"
    return f"rank {run.kill.rank} killed in the save of step {run.kill.step}"


def _difference(run: RunResult) -> str:
    return f"{run.max_difference:.1e} in {run.num_compared} steps"


def verdict_text(result: DemoResult) -> str:
    """The outcome in a sentence."""
    if result.passed:
        return (
            f"after the resume the losses are those of the reference; the largest difference is "
            f"{result.max_difference:.1e}, {result.tolerance:.0e} is accepted"
        )
    off = ", ".join(f"run {run.name}" for run in result.runs[1:] if not run.agrees)
    return (
        f"the losses of {off} are not those of the reference: the largest difference after the "
        f"resume is {result.max_difference:.1e}, {result.tolerance:.0e} is accepted"
    )


# ---------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------


def draw(result: DemoResult, ready: Sequence[Mapping[int, Ready]]) -> str:
    """The HTML page.

    Args:
        result: What happened.
        ready: What each rank said when it was ready, for every run but the first.
    """
    reference, *later = result.runs
    titles = [f"{'saved' if run.kill else 'loaded'} by {run.layout}" for run in later]
    columns = [
        picture.Column(title, f"run {run.name}, {run.num_ranks} processes", _placed(of_run))
        for title, run, of_run in zip(titles, later, ready, strict=True)
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
                    picture.table(RUN_HEADINGS, [run_row(run) for run in (reference, *later)]),
                    picture.paragraph(f"{verdict_text(result).capitalize()}."),
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
    for run in result.runs:
        for step in run.commits:
            here = step == result.resumed_from.step
            text = f"saved; {names} resume here" if here else "saved"
            marks.append(picture.Mark(step, text, "resume" if here else "save"))
        if run.kill is not None:
            text = f"rank {run.kill.rank} killed while saving"
            marks.append(picture.Mark(run.kill.step, text, "kill"))
    return marks


def _introduction(result: DemoResult) -> str:
    killed = next(run for run in result.runs if run.kill is not None)
    assert killed.kill is not None
    resumed = [run for run in result.runs if run.first_step]
    layouts = " and ".join(run.layout for run in resumed)
    return (
        f"A small transformer was trained by {killed.layout} and saved every few steps, until rank "
        f"{killed.kill.rank} was killed while it wrote the checkpoint of step {killed.kill.step}. "
        f"The newest committed checkpoint, of step {result.resumed_from.step}, was loaded by "
        f"{layouts}, and training went on as if nothing had happened."
    )
