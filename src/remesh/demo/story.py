"""The demo as it is told: five runs, lines on the terminal while they last, a page at the end."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from remesh.catalog import step_name
from remesh.checkpoint import Checkpoint
from remesh.core.geometry import Box
from remesh.demo import picture
from remesh.demo.runs import (
    LOGS_NAME,
    NUM_STEPS,
    PICTURE_NAME,
    RESULT_NAME,
    SAVE_EVERY,
    SAVE_KILLED,
    Death,
    DemoResult,
    Entry,
    Run,
    RunResult,
    losses_of,
    newest_committed,
    planned_runs,
    play,
    prepare_directory,
    refusal_of,
    summarise,
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
"""Names that are listed of a checkpoint: enough to see what one looks like."""
RUN_HEADINGS = ("run", "layout", "steps", "saved", "difference", "time", "end")


def tell(
    out: Path, console: Console, list_path: Callable[[Path, tuple[str, ...]], None]
) -> DemoResult:
    """Run the demo; `list_path` shows a directory, or the given names in a checkpoint."""
    begin = time.monotonic()
    prepare_directory(out)
    played: list[tuple[Run, list[Entry], float]] = []
    with tempfile.TemporaryDirectory(prefix="remesh-demo-") as elsewhere:
        for run in planned_runs(out.absolute(), Path(elsewhere)):
            with following(console, run) as show:
                started = time.monotonic()
                entries = play(run, show)
            played.append((run, entries, time.monotonic() - started))
            if run.dies_in_save:
                half_written = out / step_name(SAVE_KILLED)
                refusal, newest = refusal_of(half_written), newest_committed(out)
                show_half_written(console, half_written, refusal, newest)
                list_path(out, ())
                list_path(newest, LISTED)
    reference = losses_of(played[0][1])
    results = tuple(summarise(*one, reference) for one in played)
    index = Checkpoint(newest).index
    result = DemoResult(
        passed=all(result.agrees for result in results[1:]),
        max_difference=max(result.max_difference for result in results if result.first_step),
        runs=results,
        half_written=half_written,
        refusal=refusal,
        resumed_from=newest,
        resumed_step=SAVE_KILLED - SAVE_EVERY,
        num_tensors=len(index),
        num_file_bytes=sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()),
        seconds=time.monotonic() - begin,
    )
    page = draw(result, [entries for _, entries, _ in played])
    (out / PICTURE_NAME).write_text(page, encoding="utf-8")
    (out / RESULT_NAME).write_text(result.to_json() + "\n", encoding="utf-8")
    return result


# On the terminal ---------------------------------------------------------------------------------


@contextmanager
def following(console: Console, run: Run) -> Iterator[Callable[[Entry], None]]:
    """Show a run while the context lasts; yields what takes the entries of its processes."""
    title = f"run {run.name}  {run.purpose}, {layout_of(run)}"
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{title:<36}", total=NUM_STEPS, note="starting")

        def show(entry: Entry) -> None:
            match entry:
                case {"rank": 0, "step": step, "loss": loss}:
                    progress.update(task, completed=step, note=f"loss {loss:.4f}")
                case {"rank": 0, "begins": step}:
                    progress.update(task, completed=step, note="training")
                case {"rank": 0, "saved": step}:
                    console.print(f"  [dim]saved {step_name(step)}[/dim]")
                case {"dies": step, "rank": rank, "num_bytes": num_bytes}:
                    written = f"with {num_bytes / 1e6:.1f} MB of its file written"
                    said = f"rank {rank} killed (SIGKILL) in the save of step {step}, {written}"
                    console.print(f"  [dim]{said}[/dim]", soft_wrap=True)
                case {"dies": step, "rank": rank}:
                    said = f"rank {rank} killed (SIGKILL) after step {step}"
                    console.print(f"  [dim]{said}[/dim]", soft_wrap=True)

        yield show


def show_half_written(console: Console, left: Path, refusal: str, newest: Path) -> None:
    """Say what became of the interrupted save."""
    console.print(f"\n[bold]{left.name}[/bold] was never committed and is no checkpoint:")
    console.print(f"  [dim]{escape(refusal)}[/dim]", soft_wrap=True)
    console.print(f"The newest committed checkpoint is [bold]{newest.name}[/bold].", soft_wrap=True)


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
    for text in closing_words(result):
        console.print(escape(text), soft_wrap=True)
    verdict = "[bold green]Passed[/bold green]" if result.passed else "[bold red]Failed[/bold red]"
    console.print(f"{verdict}: {escape(verdict_text(result))}.", soft_wrap=True)
    console.print(f"It took {result.seconds:.0f} s.\n")
    for what, path in (
        ("picture", out / PICTURE_NAME),
        ("checkpoint", result.resumed_from),
        ("numbers", out / RESULT_NAME),
        ("output of ranks", out / LOGS_NAME),
    ):
        console.print(f"  {what:<16} {escape(str(path))}", soft_wrap=True)


def layout_of(run: Run) -> str:
    """Its layout in words."""
    return f"{run.layout} x {run.num_ranks}"


def run_row(result: RunResult) -> tuple[str, ...]:
    """A run in the columns of `RUN_HEADINGS`."""
    is_reference = result.run.purpose == "reference"
    return (
        f"{result.run.name} {result.run.purpose}",
        layout_of(result.run),
        f"{result.first_step + 1}-{result.last_step}",
        ", ".join(map(str, result.commits)) or "-",
        "-" if is_reference else f"{result.max_difference:.1e}".replace("0.0e+00", "0"),
        f"{result.seconds:.1f} s",
        "killed" if result.run.dies_in_save else "done",
    )


def closing_words(result: DemoResult) -> list[str]:
    """The results of the runs, a sentence each."""
    deaths = [(run.run, run.death) for run in result.runs if run.death is not None]
    told = [f"Run {run.name}: {death_text(run, death)}" for run, death in deaths]
    resumed = " and ".join(run.run.name for run in result.runs if run.first_step)
    stored = f"{result.num_tensors} tensors, {result.num_file_bytes / 1e6:.1f} MB on disk"
    told.insert(1, f"Runs {resumed} resumed from step {result.resumed_step}: {stored}.")
    return told


def death_text(run: Run, death: Death) -> str:
    """The end of a run with a killed rank, in a sentence."""
    if run.dies_in_save:
        return f"rank {death.rank} was killed in the middle of the save of step {death.step}."
    repeated = f"{death.num_repeated} steps were" if death.num_repeated else "no step was"
    after = "no step was done" if death.seconds is None else f"{death.seconds:.2f} s"
    return (
        f"rank {death.rank} was killed after step {death.step}; {death.num_went_on} others went on "
        f"in their processes, and the next step was done {after} after the kill; {repeated} made "
        "again."
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
    off = ", ".join(f"run {run.run.name}" for run in result.runs[1:] if not run.agrees)
    return f"the losses of {off} are not those of the reference; {numbers}"


# The page ----------------------------------------------------------------------------------------


def draw(result: DemoResult, entries: Sequence[Sequence[Entry]]) -> str:
    """The HTML page; `entries` are those of each run."""
    columns = [
        picture.Column(
            layout_of(run.run),
            f"run {run.run.name}: {'saved' if run.commits else 'loaded'}",
            _placed(of_run),
        )
        for run, of_run in zip(result.runs, entries, strict=True)
        if run.commits or run.first_step
    ]
    explained = "Some parameters. Striped: every rank holds the whole."
    num_ranks = max(run.run.num_ranks for run in result.runs)
    words = [*closing_words(result), f"{verdict_text(result)}."]
    return picture.page(
        "One training state in three layouts",
        [
            ("", [picture.paragraph(text) for text in words]),
            (
                "Which rank holds what",
                [
                    picture.paragraph(explained),
                    picture.rank_legend(num_ranks),
                    picture.layout(columns),
                ],
            ),
            ("The runs", [picture.table(RUN_HEADINGS, [run_row(run) for run in result.runs])]),
        ],
    )


def _placed(entries: Sequence[Entry]) -> dict[str, picture.PlacedTensor]:
    held = {entry["rank"]: entry["held"] for entry in entries if "held" in entry}
    return {
        name: picture.PlacedTensor(
            tuple(held[0][name][0]),
            tuple(
                (rank, Box(tuple(offset), tuple(shape)))
                for rank in sorted(held)
                for offset, shape in held[rank][name][1]
            ),
        )
        for name in DRAWN
    }
