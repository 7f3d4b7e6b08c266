"""A checkpoint that is looked at: without a state, without a process group, without torch."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from remesh._repr import short_repr
from remesh.catalog import explained_absence
from remesh.checkpoint.stored import StoredState
from remesh.core.coverage import faulty_tensors
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box
from remesh.core.index import Index, StoredTensor
from remesh.core.integrity import Finding, find_damage
from remesh.core.memory import CarrierArray
from remesh.core.state import Path, assemble, whole_sequences
from remesh.errors import StateError, UnsupportedValueError
from remesh.formats import native
from remesh.formats.decoding import decoded
from remesh.formats.place import Place
from remesh.formats.table import Contents, place_of, read_contents
from remesh.pipeline.source import TensorSource
from remesh.storage import Buffer
from remesh.storage.workers import run_workers

VERIFY_BYTES = 8 << 20
"""Bytes read at a time when everything is verified."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of reading every byte of a checkpoint."""

    num_files: int
    """Data files."""
    num_bytes: int
    """Their bytes."""
    damages: tuple[Finding, ...]
    """Everything that is not as it was written; empty for a sound checkpoint."""
    has_digests: bool = True
    """Whether there were digests. If not, `ok` only says that all files could be read, have their
    sizes, and hold each element of all tensors once."""
    unchecked: tuple[str, ...] = ()
    """Names of tensors and values that a repair has taken over without a digest that proves them.
    They are what the repair found, and may not be what was saved."""
    incomplete: tuple[str, ...] = ()
    """Names of tensors of which some elements are stored nowhere, or more than once in boxes that
    differ. They cannot be read."""

    __repr__ = short_repr

    @property
    def ok(self) -> bool:
        """True if all is there, and all bytes are those that a save or a repair has written."""
        return not self.damages and not self.incomplete


def open_source(place: Place) -> tuple[Contents, TensorSource, str]:
    """What a place holds, what its tensors are read from, and where it is, for messages."""
    with explained_absence(place):
        contents = read_contents(place)
    identity = "" if contents.record is None else native.identity_of(contents.record)
    readable = decoded(place.storage, contents.index)
    return contents, TensorSource(readable, contents.index, identity), place.url


class Checkpoint:
    """A committed checkpoint, opened for reading. Not collective: any one process may open it.

    Opening reads the commit record, the index and the values, each checked against its digest.
    Tensors are read on access, and only the bytes that are needed. Checkpoints of
    other systems open the same way, without digests.

    A checkpoint behaves like a dict of its entries: `name in checkpoint`, `checkpoint[name]`,
    `len(checkpoint)`, `keys()` and iteration over the names. Names are those of tensors, their
    aliases, plain values, lists and elements of sharded objects.

    Tensors are returned as torch tensors on the CPU. Without torch they are returned as numpy
    arrays, if numpy has their element type. `read` gives a box of one; `read_array` gives an array
    with torch, too.

    An open checkpoint belongs to one save. If another save replaces that save, reading raises
    `CheckpointReplacedError`; open the checkpoint again.

    Args:
        path: Directory of the checkpoint.
        format: As of `remesh.load`.
        allow: As of `remesh.load`.

    Raises:
        CheckpointNotFoundError: If there is no committed checkpoint.
        StateError: If it is not known which of several formats to read.
        CorruptCheckpointError: If record, index or values were damaged.
        FormatVersionError: If it was written by a newer remesh.
    """

    def __init__(
        self,
        path: Any,
        *,
        format: str | None = None,  # noqa: A002 - as in `save`
        allow: Sequence[str] = (),
    ) -> None:
        self._contents, self._source, url = open_source(place_of(path, format, allow))
        self._storage = self._source.storage
        self._stored = StoredState(
            url, self._contents.index, self._contents.document, self._source.identity
        )

    def __repr__(self) -> str:
        return f"Checkpoint({self._stored.url!r})"

    @functools.cached_property
    def _names(self) -> dict[str, None]:
        """Every stored name, in the order of kinds."""
        return dict.fromkeys(self._stored)

    def keys(self) -> KeysView[str]:
        """Every stored name. Nothing is read for it."""
        return self._names.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        """The value under a name: a whole tensor is read, as by `read`.

        Raises:
            KeyError: If there is nothing; the message has the nearest names.
            RemeshError: As `read`, if a tensor cannot be read.
        """
        if name not in self._names:
            raise KeyError(self._stored.not_stored(name, "nothing is stored under this name"))
        if name in self.index:
            return self.read(name)
        is_object = name in self._stored.document.objects
        return self._stored.object(name) if is_object else self._stored.value(name)

    @property
    def index(self) -> Index:
        """Names → stored tensors, and the pieces they are cut into."""
        return self._stored.index

    @property
    def format(self) -> str:
        """Name of the format: `remesh`, or that of another system."""
        return self._contents.format

    @property
    def record(self) -> native.CommitRecord:
        """The commit record: when and by how many ranks it was saved, its files.

        Raises:
            StateError: If another system wrote the checkpoint; those have no such record.
        """
        if self._contents.record is None:
            raise StateError(
                f"{self._storage.url}: in format {self.format}, which has no commit record\nAsk "
                "for index, values and objects instead"
            )
        return self._contents.record

    @property
    def metadata(self) -> Mapping[str, object]:
        """The metadata of `save(metadata=...)`; empty for other systems' formats."""
        record = self._contents.record
        return MappingProxyType({} if record is None else record.metadata)

    @property
    def values(self) -> dict[str, object]:
        """The plain values by stored name."""
        return {name: self._stored.value(name) for name in self._stored.document.values}

    @property
    def lists(self) -> dict[str, list[str]]:
        """Lists of names of which ranks knew parts (an optimizer's parameters), by stored name."""
        return dict(self._stored.document.lists)

    @property
    def objects(self) -> dict[str, object]:
        """The elements of sharded objects by unique name."""
        return {name: self._stored.object(name) for name in self._stored.document.objects}

    def tensor(self, name: str) -> StoredTensor:
        """The description of the tensor under a name.

        Raises:
            StateError: If no tensor is; the message has the nearest names.
        """
        if name not in self.index:
            raise StateError(self._stored.not_stored(name, "no such tensor is stored"))
        return self.index[name]

    def read_array(self, name: str, box: Box | None = None) -> CarrierArray:
        """Read a tensor or a box of it, without torch.

        Args:
            name: Stored name.
            box: The box to read, in global elements; by default the whole tensor.

        Returns:
            A new array of the box's shape. Element types that numpy does not have (bfloat16,
            float8) come as unsigned integers of their size.

        Raises:
            StateError: If there is no such tensor, or the box leaves it.
            CorruptCheckpointError: If stored bytes are missing or damaged.
            CheckpointReplacedError: If the checkpoint was overwritten since it was opened.
            CoverageError: If a part of the box is stored nowhere.
        """
        whole = Box.whole(self.tensor(name).shape)
        return self.read_arrays([(name, whole if box is None else box)])[0]

    def read_arrays(self, boxes: Sequence[tuple[str, Box]]) -> list[CarrierArray]:
        """Read boxes of several tensors at once, which takes fewer reads where they are small.

        Args:
            boxes: Stored name and box of each, in global elements.

        Returns:
            Arrays as of `read_array`, which says what it raises.
        """
        for name, box in boxes:
            whole = Box.whole(self.tensor(name).shape)
            if box.ndim != whole.ndim or not whole.contains(box):
                raise StateError(f"{name}: box {box} does not lie in shape {whole.shape}")
        return self._source.read(boxes)

    def read(self, name: str, box: Box | None = None) -> Any:
        """Read a tensor or a box of it as a torch tensor on the CPU; without torch as an array.

        Args and errors are those of `read_array`.

        Raises:
            UnsupportedValueError: If torch is not installed and numpy lacks the element type.
        """
        self._check_readable(name)
        return self._as_tensor(name, self.read_array(name, box))

    def _check_readable(self, name: str) -> None:
        dtype = BY_NAME[self.tensor(name).dtype]
        if _torch() is None and not dtype.is_native:
            raise UnsupportedValueError(
                f"{name}: numpy has no {dtype.name}\nRead it as a torch tensor, or its bits as "
                "unsigned integers with read_array"
            )

    def _as_tensor(self, name: str, array: CarrierArray) -> Any:
        """An array that was read as what `read` gives."""
        torch = _torch()
        if torch is None:
            return array
        flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
        return flat.view(getattr(torch, self.tensor(name).dtype)).reshape(array.shape)

    def names(self, pattern: str = "*") -> list[str]:
        """The stored names that a pattern fits. Nothing is read for it.

        Args:
            pattern: As of a shell: `*` stands for any characters, dots included.
        """
        return [name for name in self._names if fnmatch.fnmatchcase(name, pattern)]

    def state(self, pattern: str = "*") -> Any:
        """The state as it was nested when it was saved, with full tensors as of `read`.

        Args:
            pattern: Which names of it, as for `names`. What others are is not read. A list or
                tuple of which items are left out is a dict of the others, by their numbers.

        Modules and optimizers come as what their state dicts held. Sharded descriptions, which
        have a name but no place, are found at the top level under their names.
        """
        document, names = self._stored.document, self.names(pattern)
        tensors = [name for name in names if name in self.index]
        for name in tensors:
            self._check_readable(name)
        arrays = self.read_arrays([(name, Box.whole(self.index[name].shape)) for name in tensors])
        found = {
            name: self._as_tensor(name, array) for name, array in zip(tensors, arrays, strict=True)
        }
        leaves: dict[Path, object] = {
            document.path_of(name): found[name] if name in found else self[name] for name in names
        }
        left = [document.path_of(name) for name in self._names.keys() - names]
        return assemble(leaves, whole_sequences(self._stored.sequences, leaves, left))

    def verify(self, on_progress: Callable[[int], None] | None = None) -> VerifyReport:
        """Read every byte and compare it with its digest.

        Tensors of which some elements are not stored exactly once are found too. Checkpoints of
        other systems have no digests: then this finds files that cannot be read or have another
        size than when the checkpoint was opened, and nothing else.

        Args:
            on_progress: Called with the number of bytes that were checked, from several threads.

        Returns:
            What was found; this does not raise for damage.

        Raises:
            CheckpointReplacedError: If the checkpoint was overwritten since it was opened.
            StorageError: If the storage fails.
        """
        index, storage = self.index, self._storage
        with native.unless_replaced(storage, self._stored.identity):
            damages = native.check_files(storage, self._contents.record, index)
            incomplete = {damage.file for damage in damages}
            spans = [
                (number, start, min(start + VERIFY_BYTES, file.num_bytes))
                for number, file in enumerate(index.files)
                if file.path not in incomplete
                for start in range(0, file.num_bytes, VERIFY_BYTES)
            ]

            def check(task: int, buffer: Buffer) -> None:
                number, start, stop = spans[task]
                data = buffer[: stop - start]
                storage.read_into(index.files[number].path, start, data)
                damages.extend(find_damage(index, number, start, data))
                if on_progress is not None:
                    on_progress(stop - start)

            run_workers(4, len(spans), VERIFY_BYTES, check)
        report = VerifyReport(
            len(index.files),
            sum(file.num_bytes for file in index.files),
            tuple(sorted(damages, key=lambda damage: (damage.file, damage.start))),
            bool(index.block_size),
            self._stored.document.unchecked_names,
            tuple(index.tensors.names[row] for row in faulty_tensors(index.boxes)),
        )
        if not report.ok:
            native.check_current(storage, self._stored.identity)
        return report


def _torch() -> Any:
    """The module torch, if it is installed."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None
    return torch
