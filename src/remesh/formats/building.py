"""What readers of foreign formats build: an index and a values document, piece by piece.

A reader finds tensors, pieces and values in whatever order its files have them, and tells an
`IndexBuilder`. Nested values are taken apart as `remesh.core.state` takes a state apart, so that a
checkpoint of another system has the names that the same state would have in one of remesh: dicts
always, lists and tuples where they hold more than plain values. A key that is neither text nor a
64-bit integer cannot be part of a path. A dict with such keys is one plain value if it can be; if
there are tensors in it, each odd key stands in the path as Python shows it. What is shared is
looked at once. Names repeat the keys above them, so their length is bounded, too.

A value that cannot be had (its class is refused, or it has no encoding) is kept as an unresolved
one that says why. It is an error when it is asked for, and only then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from remesh._repr import short_repr, shown
from remesh.core import values
from remesh.core.coverage import faulty_tensors
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box, IntArray, boxes_of_flat_range, pad_dims
from remesh.core.index import Index, StoredFile, checked
from remesh.core.state import Path, name_of
from remesh.core.tables import BoxTable, TensorTable
from remesh.core.values import INT64, MAX_NESTING, UnresolvedValue
from remesh.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NameCollisionError,
    UnsupportedValueError,
)
from remesh.formats.archive import (
    Archive,
    is_row_major,
    open_range,
    read_archive,
    row_major_pieces,
)
from remesh.formats.checks import budget, check_name, check_path, check_shape, damaged, is_unicode
from remesh.formats.decoding import constant_file
from remesh.formats.native import ObjectElement, ValuesDocument
from remesh.formats.place import Listing, Place
from remesh.formats.restricted_pickle import ArchivedTensor
from remesh.storage import Storage

NUM_THREADS = 16
"""Requests at a time: the ranges are small, so what counts is how long a request takes."""
GAP_BYTES = 32 << 10
"""Bytes between two ranges that are read rather than skipped."""
MAX_READ_BYTES = 8 << 20
"""Bytes of a request that unites several ranges."""

Range = tuple[str, int, int]
"""A file, the first byte and one past the last."""


def read_ranges(storage: Storage, ranges: Sequence[Range]) -> list[bytes]:
    """Read many small ranges, near ones with one request; ranges behind the end are shorter."""
    found = [b""] * len(ranges)
    for group, first, data in read_groups(storage, ranges):
        for number in group:
            _, start, stop = ranges[number]
            found[number] = data[start - first : stop - first]
    return found


def read_groups(
    storage: Storage, ranges: Sequence[Range]
) -> Iterator[tuple[list[int], int, bytes]]:
    """`read_ranges` with few in memory: numbers of near ranges, their first byte, the bytes."""
    groups = iter(_near(ranges))

    def read(group: list[int]) -> tuple[list[int], int, bytes]:
        path, start, _ = ranges[group[0]]
        stop = max(ranges[number][2] for number in group)
        return group, start, storage.read(path, start, stop)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        running = deque(threads.submit(read, group) for group in islice(groups, NUM_THREADS))
        while running:
            found = running.popleft().result()
            running.extend(threads.submit(read, group) for group in islice(groups, 1))
            yield found


def _near(ranges: Sequence[Range]) -> list[list[int]]:
    """The numbers of ranges, in groups that one request reads."""
    order = sorted(range(len(ranges)), key=lambda number: ranges[number])
    groups: list[list[int]] = []
    reach = 0
    for number in order:
        path, start, stop = ranges[number]
        first = ranges[groups[-1][0]] if groups else None
        is_near = first is not None and first[0] == path and start - reach <= GAP_BYTES
        if first is not None and is_near and stop - first[1] <= MAX_READ_BYTES:
            groups[-1].append(number)
            reach = max(reach, stop)
        else:
            groups.append([number])
            reach = stop
    return groups


@dataclass(slots=True)
class IndexBuilder:
    """Tensors, pieces and values as they are found."""

    place: Place  # what is read
    document: ValuesDocument = field(default_factory=ValuesDocument)  # the values so far
    described_by: str = ""
    """The file that says which boxes there are, if they must cover each element once."""
    _tensors: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)
    _kinds: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    """Dtypes and shapes that have been checked."""
    _aliases: dict[str, str] = field(default_factory=dict)
    _files: dict[str, int] = field(default_factory=dict)
    _sizes: list[int] = field(default_factory=list)
    _tensor: list[int] = field(default_factory=list)
    _offsets: list[Sequence[int]] = field(default_factory=list)
    _extents: list[Sequence[int]] = field(default_factory=list)
    _file: list[int] = field(default_factory=list)
    _position: list[int] = field(default_factory=list)
    _views: dict[tuple[object, ...], str] = field(default_factory=dict)
    _sequences: dict[Path, str] = field(default_factory=dict)

    __repr__ = short_repr

    @property
    def storage(self) -> Storage:
        """Where the checkpoint is."""
        return self.place.storage

    @property
    def listing(self) -> Listing:
        """The files of the place; of a single file, nothing beside it."""
        return self.place.listing_beside

    def where(self, path: str) -> str:
        """A file of the checkpoint, for messages."""
        return f"{self.storage.url}/{path}"

    def archive(self, path: str, start: int = 0, num_bytes: int | None = None) -> Archive:
        """The archive of `torch.save` that a file, or some bytes of one, is."""
        if num_bytes is None:
            num_bytes = self.place.size_of(path)
        file = open_range(self.storage, path, start, start + num_bytes)
        return read_archive(file, self.where(path), path=path, base=start, allow=self.place.allow)

    def add_tensor(self, name: str, dtype: str, shape: Sequence[int]) -> int:
        """Add a tensor; returns its row."""
        url = self.storage.url
        if check_name(name, url) in self._names:
            raise CorruptCheckpointError(f"{url}: two tensors are called {name}")
        kind = dtype, tuple(shape)
        if kind not in self._kinds:
            if dtype not in BY_NAME:
                raise damaged(f"{url}: {name}", f"{shown(dtype)} is not a dtype")
            check_shape(shape, BY_NAME[dtype].itemsize, f"{url}: {name}")
            self._kinds.add(kind)
        self._names.add(name)
        self._tensors.append((name, *kind))
        return len(self._tensors) - 1

    def has_tensor(self, name: str) -> bool:
        """True if a tensor of this name was added, be it a further name."""
        return name in self._names or name in self._aliases

    def size_of(self, path: str) -> int:
        """Bytes of a file of the checkpoint."""
        return self._sizes[self._file_row(path)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of the checkpoint that were named so far."""
        return sum(self._sizes)

    def _file_row(self, path: str) -> int:
        row = self._files.get(path)
        if row is None:
            try:
                self._sizes.append(self.place.size_of(path))
            except CheckpointNotFoundError:
                raise damaged(self.where(path), "missing, though the checkpoint names it") from None
            row = self._files[path] = len(self._files)
        return row

    def add_piece(self, row: int, box: Box, path: str, position: int) -> None:
        """Add a box of a tensor that lies row by row at a byte of a file; empty ones are none."""
        if box.ndim != len(self._tensors[row][2]):
            raise self._outside(row, path, box)
        if box.size:
            self._tensor.append(row)
            self._offsets.append(box.offset)
            self._extents.append(box.shape)
            self._file.append(self._file_row(path))
            self._position.append(position)

    def add_range(
        self, row: int, box: Box, bounds: tuple[int, int], path: str, position: int
    ) -> None:
        """Add a range of the elements of a flattened box, which lie at a byte of a file."""
        itemsize = BY_NAME[self._tensors[row][1]].itemsize
        for part in boxes_of_flat_range(box.shape, *bounds):
            self.add_piece(row, part.shift(box.offset), path, position)
            position += part.size * itemsize

    def _outside(self, row: int, path: str, box: Box) -> CorruptCheckpointError:
        name, _, shape = self._tensors[row]
        return damaged(
            f"{self.storage.url}/{path}: {name}",
            f"the box {shown(box)} does not lie in shape {shown(shape)}",
        )

    def add_strided(
        self, row: int, box: Box, path: str, position: int, strides: Sequence[int]
    ) -> None:
        """Add a box of a tensor whose elements lie with strides."""
        if not box.size or is_row_major(box.shape, strides):
            self.add_piece(row, box, path, position)
            return
        name, dtype, whole = self._tensors[row]
        if box.ndim != len(whole):
            raise self._outside(row, path, box)
        file = self._file_row(path)  # so that its bytes count
        num_left = budget("pieces", self.num_bytes) - len(self._tensor)
        where = f"{self.where(path)}: {name}"
        offsets, shape, starts = row_major_pieces(box.shape, strides, where, num_left)
        self._tensor += [row] * len(starts)
        self._offsets += (offsets + np.array(box.offset, dtype=np.int64)).tolist()
        self._extents += [shape] * len(starts)
        self._file += [file] * len(starts)
        self._position += (position + starts * BY_NAME[dtype].itemsize).tolist()

    def add_archived(self, name: str, tensor: ArchivedTensor, archive: Archive) -> None:
        """Add a whole tensor that lies in an archive of `torch.save`."""
        row = self.add_tensor(name, tensor.dtype, tensor.shape)
        position = archive.position(tensor)
        self.add_strided(row, Box.whole(tensor.shape), archive.path, position, tensor.strides)

    def add_number(self, path: Path, value: float) -> None:
        """Add a number as the tensor without dims in which torch counts steps."""
        content = np.array(value, "<f4").tobytes()
        file, name = constant_file(content), name_of(path)
        if file not in self._files:
            self._files[file] = len(self._files)
            self._sizes.append(len(content))
        self.add_piece(self.add_tensor(name, "float32", ()), Box((), ()), file, 0)
        self.set_path(name, path)

    def add_alias(self, alias: str, name: str) -> None:
        """Add a further name of a tensor that has the name, be it a further one itself."""
        url, name = self.storage.url, self._aliases.get(name, name)
        is_new = check_name(alias, url) not in self._names and alias not in self._aliases
        if name not in self._names or not is_new:
            raise damaged(f"{url}: {shown(alias)}", f"cannot be another name of {shown(name)}")
        self._aliases[alias] = name

    def add_value(self, name: str, value: object) -> None:
        """Add an opaque value; one without an encoding is kept as its own error."""
        check_name(name, self.storage.url)
        self.document.values[name] = msgspec.Raw(encoded(value, f"{self.storage.url}: {name}"))

    def add_leaf(self, path: Path, value: object, archive: Archive | None = None) -> None:
        """Add what is at a place of the state: a tensor of an archive, or an opaque value."""
        name = name_of(path)
        if isinstance(value, ArchivedTensor):
            assert archive is not None
            self.add_archived(name, value, archive)
        elif (
            # The parameter names of an optimizer are a list that is merged over ranks.
            (path[-3:-2], path[-1]) == (("param_groups",), "params")
            and isinstance(value, list)
            and all(type(item) is str and is_unicode(item) for item in value)
        ):
            self.document.lists[name] = list(value)
        else:
            self.add_value(name, value)
        self.set_path(name, path)

    def add_object(
        self, name: str, shape: tuple[int, ...], offset: tuple[int, ...], value: object
    ) -> None:
        """Add an element of a grid of values."""
        check_name(name, self.storage.url)
        unique = f"{name}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"
        raw = msgspec.Raw(encoded(value, f"{self.storage.url}: {unique}"))
        self.document.objects[unique] = ObjectElement(name, shape, offset, raw)
        self.document.set_path(unique, (unique,))

    def add_nested(self, path: Path, archive: Archive) -> None:
        """Take apart the nested value of an archive; `path` is its place in the state."""
        self.add_tree(path, archive.value(), archive)

    def add_tree(self, path: Path, root: object, archive: Archive) -> None:
        """Add a part of an archive's value; names of one view, of tied weights, are one tensor."""
        found = Nested(archive.where, budget("characters", archive.pickled.num_bytes))
        is_whole = not path and isinstance(root, Mapping) and found.is_taken_apart(path, root)
        # At the top, what is no dict is `value`.
        found.visit(path if path or is_whole else ("value",), root)
        for name, (at, value) in found.leaves.items():
            first = name
            if isinstance(value, ArchivedTensor) and 0 not in value.shape:
                kind = value.dtype, value.shape, value.strides
                view = archive.path, archive.position(value), *kind
                first = self._views.setdefault(view, name)
            if first == name:
                self.add_leaf(at, value, archive)
            else:
                self.add_alias(name, first)
                self.set_path(name, at)
        self.set_sequences(found.sequences)

    def set_path(self, name: str, path: Path) -> None:
        """Record the place of a name."""
        check_path(path, f"{self.storage.url}: {name}")
        self.document.set_path(name, path)

    def set_sequences(self, sequences: Mapping[Path, str]) -> None:
        """Record which containers are lists or tuples."""
        new = {path: kind for path, kind in sequences.items() if path not in self._sequences}
        self._sequences.update(new)
        self.document.sequences += [(list(path), kind) for path, kind in new.items()]

    def build(self) -> Index:
        """The index of all that was added."""
        both = {*self._names, *self._aliases}.intersection(self.document.values)
        if both:
            raise NameCollisionError(
                f"{self.storage.url}: {min(both)} is both a tensor and a value\nRead them by name "
                "with the system that wrote them"
            )
        try:
            boxes, file, position = self._pieces()
        except OverflowError as error:
            raise damaged(self.storage.url, "a piece lies at an impossible place") from error
        self._check_pieces(boxes, file, position)
        files = tuple(map(StoredFile, self._files, self._sizes))
        faulty = faulty_tensors(boxes)[:10] if self.described_by else ()
        if len(faulty):
            raise CorruptCheckpointError(
                f"{self.described_by}: the stored boxes do not cover each element once of "
                f"{', '.join(boxes.tensors.names[row] for row in faulty)}"
            )
        index = Index.of(boxes, file, position, files, aliases=self._aliases)
        return checked(index, self.storage.url)

    def _pieces(self) -> tuple[BoxTable, IntArray, IntArray]:
        """All pieces, tensor by tensor, with their files and positions."""
        tensors = TensorTable.of(self._tensors)
        num_dims = tensors.shapes.shape[1]
        tensor, file, position = (
            np.array(column, dtype=np.int64)
            for column in (self._tensor, self._file, self._position)
        )
        offsets, extents = (
            pad_dims(self._offsets, num_dims, 0),
            pad_dims(self._extents, num_dims, 1),
        )
        order = np.argsort(tensor, kind="stable")
        boxes = BoxTable(tensors, tensor[order], offsets[order], extents[order])
        return boxes, file[order], position[order]

    def _check_pieces(self, boxes: BoxTable, file: IntArray, position: IntArray) -> None:
        """Check that all pieces lie in their tensors and in their files."""
        whole = boxes.tensors.shapes[boxes.tensor]
        ends = boxes.offsets + boxes.extents
        outside = (boxes.offsets < 0) | (ends < 0) | (ends > whole)
        is_outside = np.any(outside, axis=1)
        sizes, stops = np.array(self._sizes, dtype=np.int64)[file], position + boxes.num_bytes
        is_wrong = is_outside | (position < 0) | (position > sizes) | (stops > sizes)
        for number in np.flatnonzero(is_wrong)[:1].tolist():
            row, path = int(boxes.tensor[number]), list(self._files)[int(file[number])]
            if is_outside[number]:
                raise self._outside(row, path, boxes.box(number))
            where = f"{self.storage.url}/{path}: {self._tensors[row][0]}"
            start, stop = int(position[number]), int(stops[number])
            raise damaged(where, f"bytes {start}:{stop} do not lie in the file")


def encoded(value: object, where: str) -> bytes:
    """An opaque value, or in its place why it cannot be had."""
    try:
        return values.encode_read(value, where)
    except (UnsupportedValueError, TypeError) as error:
        # The message may quote text that is not Unicode.
        why = str(error).encode("utf8", "backslashreplace").decode()
        return values.encode_read(refused(type(value).__qualname__, why), where)


def refused(type_name: str, why: str) -> UnresolvedValue:
    """The stand-in of a value that cannot be built."""
    return UnresolvedValue("pickle", type_name, why)


# ---------------------------------------------------------------------------------------------
# Flattened tensors
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlatPart:
    """Elements of a flattened tensor that lie next to each other in a file."""

    path: str  # the file
    position: int  # byte at which they begin
    num_elements: int  # how many there are
    dtype: str  # name of their element type

    def range(self, start: int, stop: int) -> FlatPart:
        """Some of the elements."""
        assert 0 <= start <= stop <= self.num_elements
        position = self.position + start * BY_NAME[self.dtype].itemsize
        return FlatPart(self.path, position, stop - start, self.dtype)


def add_flat_parts(
    builder: IndexBuilder, place: Path, shape: tuple[int, ...], parts: Sequence[FlatPart]
) -> None:
    """Add a tensor whose flattened elements are those of some parts, one after the other."""
    name = name_of(place)
    found = sum(part.num_elements for part in parts)
    dtypes = sorted({part.dtype for part in parts})
    if found != math.prod(shape) or len(dtypes) != 1:
        where = f"{builder.storage.url}: {name}"
        raise damaged(where, f"The files have {found} elements of {dtypes} for shape {shape}")
    row = builder.add_tensor(name, dtypes[0], shape)
    builder.set_path(name, place)
    start = 0
    for part in parts:
        stop = start + part.num_elements
        builder.add_range(row, Box.whole(shape), (start, stop), part.path, part.position)
        start = stop


# ---------------------------------------------------------------------------------------------
# Taking nested values apart
# ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Nested:
    """The leaves of a nested value."""

    where: str  # the file, for error messages
    max_chars: int  # how many characters the names may have, together
    leaves: dict[str, tuple[Path, object]] = field(default_factory=dict)
    """The path and the value of each stored name."""
    sequences: dict[Path, str] = field(default_factory=dict)  # which containers are lists or tuples
    _plain: dict[int, bool] = field(default_factory=dict)

    def visit(self, path: Path, node: Any) -> None:
        """Take a node apart."""
        if len(path) > MAX_NESTING:
            raise CorruptCheckpointError(f"{self.where}: nested more than {MAX_NESTING} deep")
        if isinstance(node, Mapping) and self.is_taken_apart(path, node):
            keys = [path_key(key) for key in node]
            if len(set(keys)) < len(keys):
                raise self._collision(name_of(path), "several of its keys")
            for key, child in zip(keys, node.values(), strict=True):
                self.visit((*path, key), child)
        elif isinstance(node, list | tuple) and node and path and not self._is_plain(node):
            self.sequences[path] = "list" if isinstance(node, list) else "tuple"
            for number, child in enumerate(node):
                self.visit((*path, number), child)
        else:
            self._add(path, node)

    def is_taken_apart(self, path: Path, node: Mapping[Any, Any]) -> bool:
        """True if the items of a dict get paths of their own."""
        if all(path_key(key) is key for key in node):
            return bool(node or not path)
        return not self._is_plain(node)

    def _is_plain(self, node: Any) -> bool:
        """True if `remesh.core.values` can store the node with all that is in it."""
        found = self._plain.get(id(node))
        if found is None:
            if isinstance(node, Mapping):
                found = all(map(self._is_plain, (*node, *node.values())))
            elif isinstance(node, list | tuple | set | frozenset):
                found = all(map(self._is_plain, node))
            else:
                return values.is_plain(node)
            self._plain[id(node)] = found
        return found

    def _add(self, path: Path, leaf: object) -> None:
        name = name_of(path)
        self.max_chars -= len(name)
        if self.max_chars < 0:
            raise CorruptCheckpointError(f"{self.where}: its names are longer than its file")
        if name in self.leaves:
            raise self._collision(name, f"{self.leaves[name][0]!s:.200} and {path!s:.200}")
        self.leaves[name] = path, leaf

    def _collision(self, name: str, places: str) -> NameCollisionError:
        return NameCollisionError(
            f"{self.where}: two entries have one name: {name!r:.200}, at {places}. Load it with "
            "the system that wrote it, and rename one of them."
        )


def path_key(key: Any) -> str | int:
    """A key as part of a path: itself, or as Python shows it."""
    if type(key) is str:
        return key if key.isascii() or is_unicode(key) else repr(key)
    return key if type(key) is int and key in INT64 else repr(key)
