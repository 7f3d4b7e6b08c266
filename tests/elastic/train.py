"""What the nodes of the tests train, kept by the Manager.

`train.py DIRECTORY JOB [SECONDS [EVERY MEMORY_EVERY REPLICAS]]`. JOB is `numpy`, `fsdp` or one of
`REENTRANT`; `shards` is divided as `fsdp` is, and can be entered again. The losses are the same for
every number of ranks. Each rank appends what it did to a file of its own. The training ends after
the step in which a rank sees the file `stop`. A file `hang-RANK` lets a rank hang once, whom
SIGTERM does not end: it leaves `terminated-RANK`. `fail-RANK` lets it raise an error. With
`die-PHASE-RANK` it kills itself once in a phase of a step, of a save or of its recovery; its agent,
if that file says `agent`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from remesh.elastic import TrainingJob, entries, run
from remesh.events import Event
from remesh.training.manager import Manager

sys.path.insert(0, str(Path(__file__).parents[2]))

WAS_WARM = "torch" in sys.modules
"""Whether torch was there before this script, which imports it later."""
REENTRANT = {"ddp", "hsdp", "shards", "variants"}
"""Jobs whose processes go on in the next world."""


PHASES = {"save.file_created": "save", "load.planned": "recovery"}
"""Where a rank may die besides, by the points of saves and loads."""


def hang(terminated: Path) -> None:
    """Be stuck until SIGKILL ends the process; SIGTERM makes a file."""
    signal.signal(signal.SIGTERM, lambda *_: terminated.touch())
    while True:
        signal.pause()


def train(entered: TrainingJob) -> None:
    directory = Path(sys.argv[1])
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 0.05
    every, memory_every, replicas = map(int, sys.argv[4:7] or (5, 0, 0))
    world = os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    name = hashlib.sha1("-".join([str(directory), *world]).encode()).hexdigest()
    way = sys.argv[2]
    module = way if way in ("numpy", "variants") else "fsdp"
    job: Any = importlib.import_module(f"tests.elastic.{module}_job").Job(name, way)
    log = (directory / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def say(**what: object) -> None:
        origin = {"time": time.time(), "rank": job.rank, "size": job.world_size}
        log.write(json.dumps(origin | what) + "\n")

    say(
        kind="start",
        node=os.environ["GROUP_RANK"],
        parent=os.getppid(),
        world=world[0],
        restarts=world[1],
        entries=entered.entries,
        warm=WAS_WARM,
    )

    def reach(phase: str) -> None:
        order = directory / f"die-{phase}-{job.rank}"
        if order.exists():
            victim = os.getppid() if order.read_text() == "agent" else os.getpid()
            order.unlink()
            os.kill(victim, signal.SIGKILL)
            while True:  # until the kernel ends this process with its agent
                signal.pause()

    job.reach = reach

    def pass_on(event: Event) -> None:
        if event.point in PHASES:
            reach(PHASES[event.point])

    with Manager(
        directory / "checkpoints",
        every=every,
        keep=None if memory_every else 3,
        memory_every=memory_every or None,
        memory_replicas=replicas,
        group=job.group,
        job=entered,
        on_event=pass_on,
    ) as manager:
        resumed = manager.resume(job.state)
        if resumed is not None:
            passed_over = [reason for _, reason in resumed.passed_over]
            memory = resumed.from_memory
            say(
                kind="resume",
                step=resumed.step,
                memory=memory,
                live=resumed.live,
                passed_over=passed_over,
            )
        must_stop = False
        while not must_stop:
            step = job.state["step"]
            hanging = directory / f"hang-{job.rank}"
            failing = directory / f"fail-{job.rank}"
            if failing.exists():
                failing.unlink()
                raise LookupError("an error of the user's")
            if hanging.exists():
                hanging.unlink()
                hang(directory / f"terminated-{job.rank}")
            time.sleep(seconds)  # the work of a larger model
            # All ranks stop after the same step.
            loss, must_stop = job.train(step, stop=(directory / "stop").exists())
            job.state["step"] = step + 1
            say(kind="step", step=step, loss=loss)
            manager.step(step + 1, job.state)
    say(kind="end")
    job.close()


if __name__ == "__main__":
    if sys.argv[2] in REENTRANT:
        entries.CHANGE_SECONDS = 60.0  # the machine may be slow: no step is given up
        run(train)
    else:
        train(TrainingJob())
