"""The run of an experiment tracker: found, kept in the state, and given back on resume.

A job that resumes should go on in the same curves. TensorBoard, Weights & Biases, SwanLab and
MLflow each have a name for a run and an argument to open it again. `run_id_of` reads the name from
whatever the script logs with: a run, a writer, or the tracker's module. It looks at where the
object's class was defined and imports nothing, so a tracker that is not installed costs nothing.

A manager keeps it (`Manager.trackers`). In a state, it is a plain value by `dataclasses.asdict`, on
the rank that logs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from remesh.catalog import TrackerRun


def run_id_of(tracker: object) -> TrackerRun | None:
    """The run that a script logs to.

    Args:
        tracker: What it logs with: a `SummaryWriter`; a run of Weights & Biases, SwanLab or MLflow,
            or one of these modules, whose active run is meant; or None.

    Returns:
        The run; None if there is none at present, or if the object is `None`.

    Raises:
        ValueError: If it is of none of these trackers.
    """
    if tracker is None:
        return None
    # Subclasses count as what they derive from; a module is its own name.
    homes = (
        [tracker.__name__]
        if isinstance(tracker, ModuleType)
        else [kind.__module__ for kind in type(tracker).__mro__]
    )
    for home in homes:
        parts = home.split(".")
        for name, read in _READERS.items():
            if name in parts:
                return read(tracker)
    raise ValueError(
        f"a {type(tracker).__module__}.{type(tracker).__qualname__} is of no tracker that is known "
        f"here ({', '.join(_READERS)})\nKeep its run's id in the state yourself"
    )


def resume_arguments(run: TrackerRun, *, step: int | None = None) -> dict[str, Any]:
    """Keyword arguments that open a run again.

    Example:
        >>> resume_arguments(TrackerRun("wandb", "abc123", "minimind"))
        {'id': 'abc123', 'resume': 'allow', 'project': 'minimind'}

    Args:
        run: What `run_id_of` found.
        step: The step that training goes on after. TensorBoard then hides what was logged later;
            the others take no such argument.

    Returns:
        For `wandb.init`, `swanlab.init`, `mlflow.start_run` or `SummaryWriter`.

    Raises:
        ValueError: If the tracker is not known.
    """
    if run.tracker == "tensorboard":
        return {"log_dir": run.run_id} | ({} if step is None else {"purge_step": step + 1})
    if run.tracker == "mlflow":
        return {"run_id": run.run_id}
    if run.tracker == "wandb":
        owner = {"entity": run.owner} if run.owner else {}
    elif run.tracker == "swanlab":
        owner = {"workspace": run.owner} if run.owner else {}
    else:
        raise ValueError(f"{run.tracker!r} is none of the known trackers: {', '.join(_READERS)}")
    # "allow" and not "must": an offline run is not known to the server before it is synchronised.
    project = {"project": run.project} if run.project else {}
    return {"id": run.run_id, "resume": "allow"} | project | owner


def _read_tensorboard(writer: Any) -> TrackerRun:
    return TrackerRun("tensorboard", str(writer.log_dir))


def _read_wandb(tracker: Any) -> TrackerRun | None:
    run = tracker.run if isinstance(tracker, ModuleType) else tracker
    if run is None:
        return None
    return TrackerRun("wandb", run.id, run.project or "", run.entity or "")


def _read_swanlab(tracker: Any) -> TrackerRun | None:
    if isinstance(tracker, ModuleType):
        if not tracker.has_run():
            return None
        tracker = tracker.get_run()
    # Its path is /owner/project/run; SwanLab refuses to say it of a run that no server knows.
    path = tracker.path if tracker.mode == "online" else ""
    owner, project = [*path.strip("/").split("/"), "", ""][:2]
    return TrackerRun("swanlab", tracker.id, project, owner)


def _read_mlflow(tracker: Any) -> TrackerRun | None:
    run = tracker.active_run() if isinstance(tracker, ModuleType) else tracker
    return None if run is None else TrackerRun("mlflow", run.info.run_id)


_READERS: Mapping[str, Callable[[Any], TrackerRun | None]] = {
    "tensorboard": _read_tensorboard,
    "tensorboardX": _read_tensorboard,
    "wandb": _read_wandb,
    "swanlab": _read_swanlab,
    "mlflow": _read_mlflow,
}
"""By a part of the name of the module that an object's class was defined in."""
