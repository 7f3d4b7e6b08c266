"""The demo as it is told: five runs, lines on the terminal while they last, a page at the end."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from remesh.catalog import step_name
from remesh.core.geometry import Box
from remesh.demo import picture
from remesh.demo.runs import (
    LOGS_NAME,
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
    "blocks.0.q_proj.weight",
    "blocks.0.o_proj.weight",
    "blocks.0.gate_proj.weight",
    "blocks.0.down_proj.weight",
)
"""Parameters that the page shows: one of each way to be cut."""
LISTED = ("model.blocks.0.*", "num_steps_done")
"""Names that are listed of a checkpoint: enough to see what one looks like."""
RUN_HEADINGS = ("run", "layout", "steps", "saved", "difference", "time", "end")


def tell(out: Path, console: Console) -> DemoResult:
    """Run the demo."""
    begin = time.monotonic()
    prepare_directory(out)
    played: list[tuple[Run, list[Entry], float]] = []
    with tempfile.TemporaryDirectory(prefix="remesh-demo-") as elsewhere:
        for run in planned_runs(out.absolute(), Path(elsewhere)):
            started = time.monotonic()
            entries = play(run, teller(console, run))
            played.append((run, entries, time.monotonic() - started))
            if run.dies_in_save:
                half_written = out / step_name(SAVE_KILLED)
                refusal, newest = refusal_of(half_written), newest_committed(out)
                console.print(f"\n[bold]{half_written.name}[/bold] is no checkpoint:")
                console.print(f"  [dim]{escape(refusal)}[/dim]", soft_wrap=True)
                list_path(console, str(out))
                list_path(console, str(newest), *LISTED)
                console.print()
    reference = losses_of(played[0][1])
    results = tuple(summarise(*one, reference) for one in played)
    result = DemoResult(
        passed=all(result.agrees for result in results[1:]),
        max_difference=max(result.max_difference for result in results if result.first_step),
        runs=results,
        half_written=half_written,
        refusal=refusal,
        resumed_from=newest,
        seconds=time.monotonic() - begin,
    )
    page = draw(result, [entries for _, entries, _ in played])
    (out / PICTURE_NAME).write_text(page, encoding="utf-8")
    (out / RESULT_NAME).write_text(result.to_json() + "\n", encoding="utf-8")
    return result


# On the terminal ---------------------------------------------------------------------------------


def teller(console: Console, run: Run) -> Callable[[Entry], None]:
    """A function that takes the entries of a run's processes and prints what is worth it."""
    console.print(f"run {run.name}  {run.purpose}, {layout_of(run)}")

    def tell_entry(entry: Entry) -> None:
        match entry:
            case {"rank": 0, "step": step, "loss": loss} if step % SAVE_EVERY == 0:
                said = f"step {step}: loss {loss:.4f}"
            case {"rank": 0, "saved": step}:
                said = f"saved {step_name(step)}"
            case {"dies": step, "rank": rank, "num_bytes": num_bytes}:
                written = f"with {num_bytes / 1e6:.1f} MB of its file written"
                said = f"rank {rank} killed (SIGKILL) in the save of step {step}, {written}"
            case {"dies": step, "rank": rank}:
                said = f"rank {rank} killed (SIGKILL) after step {step}"
            case _:
                return
        console.print(f"  [dim]{said}[/dim]", soft_wrap=True)

    return tell_entry


def list_path(console: Console, *arguments: str) -> None:
    """Run `remesh ls`, and show how."""
    command = ["remesh", "ls", *arguments]
    console.print(f"\n[bold]$ {escape(shlex.join(command))}[/bold]", soft_wrap=True)
    listed = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", *command], check=True, capture_output=True, text=True
    )
    console.out(listed.stdout, end="")


def show_result(console: Console, result: DemoResult, out: Path) -> None:
    """The closing table, the verdict, and where the files are."""
    table = Table(*RUN_HEADINGS, box=None, pad_edge=False, header_style="bold")
    for run in result.runs:
        table.add_row(*map(escape, run_row(run)))
    console.print("\n[bold]What happened[/bold]\n", table, "", sep="\n")
    verdict = "[bold green]Passed[/bold green]" if result.passed else "[bold red]Failed[/bold red]"
    console.print(f"{verdict}: {escape(verdict_text(result))}.", soft_wrap=True)
    console.print(f"It took {result.seconds:.0f} s. The page: {escape(str(out / PICTURE_NAME))}")
    console.print(
        f"Beside it: numbers ({RESULT_NAME}), output of ranks ({LOGS_NAME}), checkpoints."
    )


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
        "done" if result.death is None else death_text(result.run, result.death),
    )


def death_text(run: Run, death: Death) -> str:
    """The end of a run with a killed rank, in words."""
    if run.dies_in_save:
        return f"rank {death.rank} killed in the middle of the save of step {death.step}"
    after = "never" if death.seconds is None else f"after {death.seconds:.2f} s"
    return (
        f"rank {death.rank} killed after step {death.step}; {death.num_went_on} others went on, "
        f"next step {after}, {death.num_repeated} repeated"
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
    runs = picture.table(RUN_HEADINGS, [run_row(run) for run in result.runs])
    return picture.page(
        "One training state in three layouts",
        [
            ("", [picture.paragraph(f"{verdict_text(result)}.")]),
            ("Which rank holds what", [picture.paragraph(explained), picture.layout(columns)]),
            ("The runs", [runs]),
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
