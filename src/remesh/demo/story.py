"""The demo as it is told: five runs, lines on the terminal while they last, a page at the end.

Whatever is not as it must be raises `DemoError`, except that losses differ: then the result says
so, because the numbers are what one wants to see.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from remesh.catalog import list_checkpoints, step_name
from remesh.checkpoint import Checkpoint
from remesh.core.geometry import Box
from remesh.demo import picture
from remesh.errors import CheckpointNotFoundError, OptionError
from remesh.storage import open_storage

TOLERANCE = 1e-5
"""Largest accepted difference between a loss and the reference's at the same step."""
MIN_COMPARED = 10
"""Fewest steps after a resume that must agree."""
SAVE_EVERY = 10
SAVE_KILLED, STEP_KILLED = 30, 20
KILLED_RANK = 2
SILENCE_LIMIT = 120.0
"""Seconds after which a run is given up in which no rank says anything."""
LOOK_SECONDS = 0.1
"""Time between two looks at what the processes have done."""
PRELOAD = "numpy,torch,torch._dynamo,remesh.training.survivors,remesh.demo.training,remesh.elastic"
MARKER, PICTURE_NAME, RESULT_NAME, LOGS_NAME = ".remesh-demo", "layout.html", "result.json", "logs"

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

Entry = Mapping[str, Any]
"""An event of a process, as `worker` writes it, with its process id."""


class DemoError(RuntimeError):
    """Something in the demo is not as it must be; the message says what and where to look."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the job, and what is planned for it."""

    name: str
    purpose: str
    layout: str
    num_ranks: int
    logs: str
    root: str  # of the checkpoints: a run goes on from the newest, if there is one
    save_every: int | None = None
    killed_rank: int | None = None
    killed_step: int | None = None
    dies_in_save: bool = False  # while it writes the checkpoint of that step, not after the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The death of a rank."""

    rank: int
    step: int
    num_bytes: int = 0  # of its file that it had written
    num_went_on: int = 0  # processes that trained before and after it
    num_repeated: int = 0  # steps that a process made a second time
    seconds: float | None = None  # from the kill to the end of the next new step, if there was one


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run: its losses by the number of steps done, compared with those of the reference."""

    run: Run
    first_step: int  # steps that were behind the state at the start
    last_step: int
    losses: Mapping[int, float]
    commits: tuple[int, ...]
    death: Death | None
    num_compared: int
    max_difference: float
    seconds: float

    @property
    def agrees(self) -> bool:
        """True if enough losses were compared and all of them are close enough."""
        return self.num_compared >= MIN_COMPARED and self.max_difference <= TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Everything; the first run is the reference."""

    passed: bool
    max_difference: float  # of the runs that resumed
    runs: tuple[RunResult, ...]
    half_written: Path
    refusal: str  # the error that opening the half-written checkpoint raised
    resumed_from: Path
    seconds: float
    tolerance: float = TOLERANCE

    def to_json(self) -> str:
        """This result as a JSON object; paths are text, losses are keyed by step."""
        return json.dumps(asdict(self), indent=2, default=str)


def planned_runs(out: Path, elsewhere: Path) -> list[Run]:
    """The five runs; those that the others do not resume from keep no checkpoints in `out`."""

    def plan(name: str, purpose: str, layout: str, num_ranks: int, **plans: Any) -> Run:
        logs, root = out / LOGS_NAME / f"run-{name.lower()}", plans.pop("root", elsewhere / name)
        return Run(name, purpose, layout, num_ranks, str(logs), str(root), **plans)

    killed = {"killed_rank": KILLED_RANK, "killed_step": SAVE_KILLED, "dies_in_save": True}
    return [
        plan("A", "reference", "FSDP2", 4),
        plan("B", "killed", "FSDP2", 4, root=out, save_every=SAVE_EVERY, **killed),
        plan("C", "resumed", "FSDP2", 2, root=out),
        plan("D", "resumed", "tensor parallel", 2, root=out),
        plan("E", "goes on", "DDP", 4, killed_rank=KILLED_RANK, killed_step=STEP_KILLED),
    ]


def prepare_directory(out: Path) -> None:
    """Make the output directory, or clear what an earlier demo left in it."""
    marker, problem = out / MARKER, ""
    try:
        if out.exists() and not out.is_dir():
            problem = "is a file"
        elif out.is_dir() and any(out.iterdir()) and not marker.exists():
            problem = "is not empty and was not made by the demo"
        else:
            out.mkdir(parents=True, exist_ok=True)
            marker.write_text("Made by `remesh demo`, which replaces its own files here.\n")
            for path in (*out.glob("step_*"), out / LOGS_NAME):
                if path.is_dir():
                    shutil.rmtree(path)
            for name in (RESULT_NAME, PICTURE_NAME):
                (out / name).unlink(missing_ok=True)
    except OSError as error:
        problem = f"cannot be used ({error})"
    if problem:
        raise OptionError(f"{out} {problem}; name another directory with --out")


# Playing a run -----------------------------------------------------------------------------------


def play(run: Run, on_entry: Callable[[Entry], None]) -> list[Entry]:
    """Run a job under `remesh run`; what its processes did, in the order of time."""
    logs = Path(run.logs)
    logs.mkdir(parents=True)
    restarts = "0" if run.dies_in_save else "1"
    command = (
        *(sys.executable, "-m", "remesh", "run", "--nproc-per-node", str(run.num_ranks)),
        *("--max-restarts", restarts, "--preload", PRELOAD, "--snapshot-dir", ""),
        *("-m", "remesh.demo.worker", json.dumps(asdict(run))),
    )
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    output = logs / "output.log"
    with output.open("wb") as file:
        # A session of its own: Ctrl-C is for this process, which ends the others.
        process = subprocess.Popen(  # noqa: S603 - our own command
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            _follow(process, logs, on_entry)
        finally:
            process.kill()  # its processes end with it
            process.wait()
    if (process.returncode == 0) == run.dies_in_save:
        code = process.returncode
        raise DemoError(f"run {run.name} ended with code {code} (its output: {output})")
    entries = read_entries(logs)
    if run.killed_rank is not None and not any("dies" in entry for entry in entries):
        raise DemoError(f"run {run.name}: rank {run.killed_rank} was not killed")
    return entries


def _follow(
    process: subprocess.Popen[bytes], logs: Path, on_entry: Callable[[Entry], None]
) -> None:
    """Wait for the end of a run, or until it does nothing any more."""
    num_read, deadline = 0, time.monotonic() + SILENCE_LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        entries = read_entries(logs)
        for entry in entries[num_read:]:
            deadline = time.monotonic() + SILENCE_LIMIT
            on_entry(entry)
        num_read = len(entries)


def read_entries(logs: Path) -> list[Entry]:
    """The events that the processes have written so far, in the order of time."""
    entries: list[Entry] = []
    for file in logs.glob("*.jsonl"):
        whole = file.read_bytes().rpartition(b"\n")[0].splitlines()
        entries += [{**json.loads(line), "pid": int(file.stem)} for line in whole]
    return sorted(entries, key=lambda entry: float(entry["time"]))


# What must be true -------------------------------------------------------------------------------


def newest_committed(root: Path) -> Path:
    """The newest directory under `root` that is a committed checkpoint."""
    paths = [Path(info.path) for info in list_checkpoints(open_storage(root))]
    if not paths:
        raise DemoError(f"{root}: there is no committed checkpoint")
    expected = step_name(SAVE_KILLED - SAVE_EVERY)
    if paths[-1].name != expected:
        raise DemoError(f"{paths[-1]}: the newest committed checkpoint should be {expected}")
    return paths[-1]


def refusal_of(path: Path) -> str:
    """The error that refuses the checkpoint of an interrupted save."""
    if not any(file.is_file() for file in path.rglob("*")):
        raise DemoError(f"{path}: nothing was written before the kill")
    try:
        Checkpoint(path)
    except CheckpointNotFoundError as error:
        return f"{type(error).__name__}: {error}"
    raise DemoError(f"{path}: the save was interrupted, yet this opens as a checkpoint")


def losses_of(entries: Sequence[Entry]) -> dict[int, float]:
    """Loss of each step; all ranks have the same."""
    return {entry["step"]: entry["loss"] for entry in entries if "step" in entry}


def summarise(
    run: Run, entries: Sequence[Entry], seconds: float, reference: Mapping[int, float]
) -> RunResult:
    """A run in numbers."""
    losses = losses_of(entries)
    first_step = min(entry["begins"] for entry in entries if "begins" in entry)
    commits = tuple(sorted({entry["saved"] for entry in entries if "saved" in entry}))
    return RunResult(
        run,
        first_step,
        max(losses, default=first_step),
        losses,
        commits,
        death_in(entries),
        *compare(losses, reference),
        seconds,
    )


def death_in(entries: Sequence[Entry]) -> Death | None:
    """The death of a rank, and how the others went on."""
    death = next((entry for entry in entries if "dies" in entry), None)
    if death is None:
        return None
    steps = [entry for entry in entries if "step" in entry]
    new = [entry for entry in steps if entry["step"] > death["dies"]]
    before = {entry["pid"] for entry in steps if entry["step"] <= death["dies"]} - {death["pid"]}
    made = {(entry["pid"], entry["step"]) for entry in steps}
    return Death(
        rank=death["rank"],
        step=death["dies"],
        num_bytes=death.get("num_bytes", 0),
        num_went_on=len(before & {entry["pid"] for entry in new}),
        num_repeated=len(steps) - len(made),
        seconds=min(entry["time"] for entry in new) - death["time"] if new else None,
    )


def compare(losses: Mapping[int, float], reference: Mapping[int, float]) -> tuple[int, float]:
    """Steps that both have, and the largest difference of their losses.

    The difference is 0 if there is no such step, and infinite if a loss is not a number.
    """
    differences = [abs(losses[step] - reference[step]) for step in losses.keys() & reference.keys()]
    largest = math.inf if any(map(math.isnan, differences)) else max(differences, default=0.0)
    return len(differences), largest


# The story ---------------------------------------------------------------------------------------


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
