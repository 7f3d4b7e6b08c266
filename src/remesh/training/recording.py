"""What a save of a manager records beside the user's state: random numbers, and a note.

The random numbers are tensors of the state, under `manager.rng`; the note is metadata of the commit
record. Both are taken on each rank when a save begins.

The note says where a checkpoint comes from: which code, which configuration, which machine, which
checkpoint. The revision of the code is read out of the files of its git repository, so no program
is started and none needs to be installed. Whether there were uncommitted changes cannot be known
that way.

A digest of the state tells whether a step that is saved already has changed. It is made of
fingerprints of the tensors (`fingerprints`), which cost no copy, of numpy's arrays in full, and of
plain values.
"""

from __future__ import annotations

import platform
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from remesh import catalog
from remesh.catalog import ManagerNote, Provenance, TrackerRun
from remesh.core import values
from remesh.core.integrity import hex_digest
from remesh.core.sharded import ShardedTensor
from remesh.core.state import Joined
from remesh.errors import StateError
from remesh.exchange import Exchange, run_on_one
from remesh.run_info import run_info
from remesh.training import rng
from remesh.training.rng import Randomness
from remesh.training.trackers import run_id_of


class Recorder:
    """Describes the run to which saves belong. Collective when it is made."""

    def __init__(self, exchange: Exchange, randomness: Randomness, config: object) -> None:
        self.roles = rng.agree_on_roles(exchange, randomness.role)
        self.seed = randomness.seed
        self._generators, self._is_alone = randomness.generators, exchange.world_size == 1
        # All of these change when a run is resumed, but the trackers that the user gives.
        self.run = run_on_one(exchange, lambda: new_run().encode()).decode()
        self.trackers: dict[str, object] = {}
        self._parent = ""  # the checkpoint that the process resumed from
        self._saved_trackers: dict[str, TrackerRun] = {}  # by the names that trackers have
        self._config_digest = "" if config is None else digest_of(config)

    def go_on_from(self, note: ManagerNote, parent: str) -> None:
        """Become the run that saved a checkpoint, from which the next saves descend."""
        self.run = note.run or self.run
        self._parent = parent
        self._saved_trackers = dict(note.trackers)

    def streams(self) -> dict[str, rng.Stream]:
        """Name → stream of random numbers of this process."""
        return rng.streams_of(self._generators, is_alone=self._is_alone)

    def describe(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        full: Joined,
        metadata: dict[str, object],
    ) -> bytes:
        """Fill in what is saved beside the state: random numbers, and the note; `rng.summary`."""
        streams = self.streams()
        rows = rng.rows_of(streams, self.roles)
        full.beside.update(with_rows(full.state, rows).beside)
        note = self.note(step, metrics, streams)
        metadata[catalog.NOTE_KEY] = msgspec.json.decode(msgspec.json.encode(note))
        return rng.summary(rows, self.roles)

    def note(
        self, step: int, metrics: Mapping[str, float] | None, streams: Mapping[str, rng.Stream]
    ) -> ManagerNote:
        """The note of a save of these streams."""
        runs = [(name, run_id_of(tracker)) for name, tracker in self.trackers.items()]
        return ManagerNote(
            step=step,
            run=self.run,
            metrics=catalog.finite(metrics or {}),
            role_grid=self.roles.grid,
            streams=tuple(streams),
            trackers=self._saved_trackers | {name: run for name, run in runs if run is not None},
            provenance=msgspec.structs.replace(self._provenance, parent=self._parent),
        )

    @cached_property
    def _provenance(self) -> Provenance:
        """Read once: notes are made at each step, and the code that runs is that of the start."""
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        if "torch" in sys.modules:
            versions["torch"] = str(sys.modules["torch"].__version__)
        return Provenance(
            revision=git_revision(_script_directory()),
            config_digest=self._config_digest,
            host=socket.gethostname(),
            platform=platform.platform(),
            versions=versions,
        )


def new_run() -> str:
    """A name for a run: the launcher's if it has one, and something that no other run has."""
    return f"{run_info().run_id or 'run'}-{secrets.token_hex(4)}"


def with_rows(state: Any, rows: Mapping[str, ShardedTensor]) -> Joined:
    """The user's state and the states of random numbers, as they are stored together."""
    if isinstance(state, Mapping) and catalog.NOTE_KEY in state:
        raise StateError(f"the name {catalog.NOTE_KEY!r} is taken by the manager; use another one")
    return Joined(state, {catalog.NOTE_KEY: {"rng": dict(rows)}} if rows else {})


def digest_of(config: object) -> str:
    """A digest of a plain value that does not depend on the order of keys."""
    return hex_digest(values.encode(_sorted(config), "config"))


def _sorted(value: object) -> object:
    if type(value) is dict:
        items = ((key, _sorted(item)) for key, item in value.items())
        return dict(sorted(items, key=lambda item: repr(item[0])))
    if type(value) in {list, tuple}:
        assert isinstance(value, list | tuple)
        return type(value)(_sorted(item) for item in value)
    return value


def digest_of_state(state: Any) -> str:
    """A text that changes when any tensor, array or plain value of a state changes."""
    torch = sys.modules.get("torch")
    tensors, facts = [], []
    for name, leaf in named_leaves(state, ""):
        value = leaf
        if torch is not None and isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            value = ""
        elif torch is not None and isinstance(leaf, torch.Generator):
            value = hex_digest(leaf.get_state().numpy().tobytes())
        elif isinstance(leaf, np.ndarray):
            value = leaf.shape, hex_digest(np.ascontiguousarray(leaf).tobytes())
        facts.append(f"{name} {value!r}")
    if tensors:
        from remesh.training.fingerprints import Fingerprints

        facts.append(Fingerprints().take_of(tensors).digest())
    return hex_digest("\n".join(facts).encode(errors="surrogatepass"))


def named_leaves(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The tensors, arrays and values of a state that a process holds, with their names there."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(node, torch.nn.Module):
        for key, tensor in (*node.named_parameters(), *node.named_buffers()):
            yield f"{name}.{key}", tensor
    elif torch is not None and isinstance(node, torch.optim.Optimizer):
        groups = [{**group, "params": None} for group in node.param_groups]
        parts = {"state": [*node.state.values()], "param_groups": groups}
        yield from named_leaves(parts, name)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from named_leaves(value, f"{name}.{key}")
    elif isinstance(node, list | tuple):
        for number, value in enumerate(node):
            yield from named_leaves(value, f"{name}.{number}")
    elif isinstance(node, ShardedTensor):
        for part in node.parts:
            yield from named_leaves(part.data, name)
    elif isinstance(node, Joined):
        yield from named_leaves([node.state, node.beside], name)
    elif hasattr(node, "state_dict") and hasattr(node, "load_state_dict"):
        yield from named_leaves(node.state_dict(), name)
    else:
        yield name, node


def _script_directory() -> Path:
    """Where the program that runs lies; the working directory if it is not in a file."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path.cwd() if file is None else Path(file).absolute().parent


def git_revision(directory: Path) -> str:
    """The commit that is checked out in the git repository around a directory.

    Empty if there is no repository, no commit, or the files cannot be read (which must not prevent
    a save).
    """
    for parent in (directory, *directory.parents):
        if (parent / ".git").exists():
            try:
                return _head(parent / ".git")
            except (OSError, UnicodeDecodeError):
                return ""
    return ""


def _head(git: Path) -> str:
    if git.is_file():  # a worktree or submodule: it says where the directory is
        git = git.parent / git.read_text().removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head
    name = head.removeprefix("ref:").strip()
    common = git / "commondir"
    shared = git / common.read_text().strip() if common.exists() else git
    for place in (git / name, shared / name):
        if place.is_file():
            return place.read_text().strip()
    packed = shared / "packed-refs"
    lines = packed.read_text().splitlines() if packed.exists() else []
    return next((line.split(" ")[0] for line in lines if line.endswith(f" {name}")), "")
