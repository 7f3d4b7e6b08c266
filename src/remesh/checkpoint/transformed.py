"""Loading through a transformation.

The state is compared with what the stored tensors become, not with what they are. Two things make
that work:

* The state is walked twice. First as it is, which tells the parameters; then it is shown the
  outputs of the transformation as if they were stored (`TransformedNames`), from which an
  optimizer without state learns which states there will be.
* The transformation is resolved against the targets of all ranks, for wildcards and fused layouts
  depend on all of them. For each box that this rank holds it names regions of stored tensors. Those
  are wanted like any other boxes; a `RegionMemory` takes what is read of them, brings it into its
  new shape and passes it on.

So only needed bytes are read, in stored dtypes, and no whole tensor is ever made. Names that no
statement touches are treated as without a transformation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from remesh.checkpoint.local import casting_memory_of, describe_local, memory_of, with_all_names
from remesh.checkpoint.stored import StoredState
from remesh.checkpoint.target import Target
from remesh.dtypes import BY_NAME, CarrierDType
from remesh.errors import MismatchError
from remesh.geometry import Box
from remesh.index import BoxTable, TensorTable, decode_columns, encode_columns
from remesh.memory import CarrierArray, HostMemory, Memory
from remesh.pipeline import Destination
from remesh.planner import merge_tensors
from remesh.sharded import ArrayLike
from remesh.state import Description, Path, TensorEntry, name_of
from remesh.strided import Layout
from remesh.transform import Region, Resolved, TensorInfo, Transform, arranged, num_pieces_of

Infos = Mapping[str, TensorInfo | None]


@dataclass(slots=True, eq=False)
class TransformedNames:
    """What is stored, as the walk of a target state sees it: by the names of the outputs.

    Attributes:
        stored: What is really stored.
        outputs: What the transformation makes and leaves over.
    """

    stored: StoredState
    outputs: Resolved
    _made: list[str] = field(init=False)

    def __post_init__(self) -> None:
        untouched = self.outputs.untouched
        self._made = sorted(name for name in self.outputs.targets if name not in untouched)

    @property
    def sequences(self) -> Mapping[Path, str]:
        """See `Stored.sequences`."""
        return self.stored.sequences

    def tensor(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """See `Stored.tensor`."""
        info = self.outputs.targets.get(name)
        return None if info is None else (info.dtype, info.shape)

    def has_value(self, name: str) -> bool:
        """See `Stored.has_value`."""
        return name in self.outputs.targets and self.outputs.targets[name] is None

    def merged_list(self, name: str) -> list[str] | None:
        """See `Stored.merged_list`; a made parameter is in the group of what it is made of."""
        stored = self.stored.merged_list(name)
        if stored is None:
            return None
        prefix = f"{name.partition('.param_groups.')[0]}.state."
        known, more = set(stored), []
        for made in self._made:
            sources = self.outputs.sources_of(made) if made.startswith(prefix) else ()
            owners = {source.removeprefix(prefix).rpartition(".")[0] for source in sources}
            if owners & known:
                more.append(made.removeprefix(prefix).rpartition(".")[0])
        return list(dict.fromkeys([*stored, *more]))

    def under(self, path: Path) -> list[tuple[Path, str]]:
        """See `Stored.under`; of a made name only the part up to `path` has a known path."""
        found = [
            (full, name)
            for full, name in self.stored.under(path)
            if name in self.outputs.untouched or name in self.stored.document.lists
        ]
        prefix = name_of(path) + "." if path else ""
        start = int(np.searchsorted(self._made, prefix))
        for name in self._made[start:]:
            if not name.startswith(prefix):
                break
            found.append(((*path, *name.removeprefix(prefix).split(".")), name))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class RegionMemory:
    """Takes what is read of a region's source box, and passes on what it becomes.

    Attributes:
        region: Which elements become what.
        carrier: Carrier of the stored dtype.
        offset: Offset of the target part in its tensor.
        part: Memory of the target part, which takes elements of the stored dtype.
    """

    region: Region
    carrier: CarrierDType
    offset: tuple[int, ...]
    part: Memory

    @property
    def layout(self) -> Layout | None:
        """See `Memory.layout`."""
        return self.part.layout

    def copy_out(self, box: Box, into: CarrierArray) -> None:
        """Never needed: this memory is only filled."""
        raise NotImplementedError

    def copy_in(self, box: Box, values: CarrierArray) -> None:
        """See `Memory.copy_in`; boxes are relative to the region's source box."""
        read = box.shift(self.region.source_box.offset)
        for piece in self.region.restrict(read):
            block = values[piece.source_box.relative_to(read).slices]
            place = piece.target_box.shift(self.offset, -1)
            self.part.copy_in(place, arranged(block, piece))


@dataclass(slots=True)
class TransformedTarget(Target):
    """One rank's state as the target of a load through a transformation."""

    transform: Transform
    names: TransformedNames = field(init=False)
    resolved: Resolved | None = field(default=None, init=False)

    def describe(self, state: Any) -> bytes:
        """Describe what the state has, whatever is stored; for the other ranks to know."""
        return _table_of(describe_local(state))

    def describe_again(self, state: Any, replies: list[bytes]) -> bytes:
        """Describe what the state will have: optimizers get the states that are made for them.

        Args:
            state: The state.
            replies: What `describe` returned on each rank.

        Raises:
            TransformError: If a statement does not fit the stored tensors or the targets.
        """
        outputs = self.transform.resolve(
            self._sources(),
            _targets(replies),
            aliases=self.stored.index.aliases,
            cast=self.options.cast,
            with_outputs=True,
        )
        self.names = TransformedNames(self.stored, outputs)
        self.description = describe_local(state, self.names)
        return _table_of(self.description)

    def prepare_among(self, replies: list[bytes]) -> bytes:
        """Like `prepare`, knowing the targets of all ranks.

        Args:
            replies: What `describe_again` returned on each rank.

        Raises:
            TransformError: If the transformation does not fit the targets.
            MismatchError: If state and checkpoint do not fit.
        """
        self.resolved = self.transform.resolve(
            self._sources(),
            _targets(replies),
            aliases=self.stored.index.aliases,
            cast=self.options.cast,
        )
        untouched = self.resolved.untouched
        plain: list[tuple[TensorEntry, list[str]]] = []
        changed: list[tuple[TensorEntry, list[str]]] = []
        for entry, names in with_all_names(self.description.tensors):
            (plain if untouched.issuperset(names) else changed).append((entry, names))
        fills = [
            (entry, stored)
            for entry, names in plain
            if (stored := self._match_tensor(entry, names)) is not None
        ]
        made = [
            (entry, name)
            for entry, names in changed
            if (name := self._match_made(entry, names)) is not None
        ]
        self._match_values()
        self._refuse_mismatch()
        for entry, stored in fills:
            self._want(entry, stored)
        for entry, name in made:
            self._want_regions(entry, name)
        self._plan()
        asked = self._asked_names()
        for name in tuple(asked):
            asked.update(self.resolved.sources_of(name) if name in self.resolved.targets else ())
        asked.update(self.resolved.deleted)
        return self._asked_bits(asked)

    def has_value(self, name: str) -> bool:
        """Whether a plain value of this name is made or stored."""
        return self.names.has_value(name)

    def stored_tensor(self, name: str) -> bool:
        """Whether a tensor of this name is made or stored."""
        return self.names.tensor(name) is not None

    def merged_list(self, name: str) -> list[str] | None:
        """The list of names that is made or stored under a name."""
        return self.names.merged_list(name)

    def stored_value(self, name: str) -> object:
        """The value that is made or stored under a name.

        Raises:
            MismatchError: If several must agree and do not.
        """
        assert self.resolved is not None
        sources = self.resolved.sources_of(name) or (name,)
        found = [self.stored.value(source) for source in sources]
        if any(value != found[0] for value in found[1:]):
            raise MismatchError(f"{name}: {', '.join(sources)} must hold one value, but differ")
        return found[0]

    def _sources(self) -> Infos:
        """The stored tensors and values."""
        index = self.stored.index
        cuts = num_pieces_of(index.boxes)
        infos: dict[str, TensorInfo | None] = {
            name: TensorInfo(index[name].dtype, index[name].shape, cuts[index.row(name)])
            for name in index
        }
        infos.update(dict.fromkeys(self.stored.document.values))
        return infos

    def _match_made(self, entry: TensorEntry, names: list[str]) -> str | None:
        """The name under which an entry is made; None if it is not, which is then reported."""
        assert self.resolved is not None
        found, resolved = self.findings, self.resolved
        if any(name in resolved.kept for name in names):
            found.kept.extend(names)
            return None
        made = [name for name in names if name in resolved.plans]
        problems = [
            f"{name}: {resolved.conflicts[name]}" for name in names if name in resolved.conflicts
        ]
        if problems:
            found.conflicts.extend(problems)
        elif not made:
            found.missing.append(entry.name)
        elif len({resolved.sources_of(name) for name in made}) > 1:
            found.conflicts.append(
                f"{' and '.join(made)} are tied in the state, but made of different tensors"
            )
        else:
            found.derived.update({name: ", ".join(resolved.sources_of(made[0])) for name in names})
            return made[0]
        return None

    def _want_regions(self, entry: TensorEntry, name: str) -> None:
        """Want this rank's part of a tensor that is made of stored ones."""
        assert self.resolved is not None
        index = self.stored.index
        for part in entry.parts:
            regions = self.resolved.regions(name, part.box)
            for region in regions:
                dtype = index[region.source].dtype
                memory = self._converting(part.data, dtype, region, entry)
                into = RegionMemory(region, BY_NAME[dtype].carrier, part.box.offset, memory)
                destination = Destination(region.source_box.offset, into)
                self.filling.add(region.source, region.source_box, destination)
            if regions:
                self._note(entry.name, part.box, memory, ("made", name), None)
            self._compare_made(name, part.box)

    def _converting(
        self, data: ArrayLike, dtype: str, region: Region, entry: TensorEntry
    ) -> Memory:
        """The memory of a part, for elements of a stored dtype."""
        if not region.dtypes:
            return memory_of(data, entry.name, writable=True)
        return casting_memory_of(data, dtype, entry.name, through=region.dtypes[:-1])

    def _compare_made(self, name: str, box: Box) -> None:
        """Compare what must agree: other sources of the same place."""
        assert self.resolved is not None
        checks = self.resolved.checks(name, box)
        if not checks:
            return
        expected = self._made(self.resolved.regions(name, box), box)
        for region in checks:
            problem = (
                f"{name}: {region.source} must hold the same values as "
                f"{', '.join(self.resolved.sources_of(name))}, but differs in {region.source_box}"
            )
            # The dots keep it a view, also without dims.
            place: tuple[Any, ...] = (*region.target_box.relative_to(box).slices, ...)
            same_place = expected[place]
            found = self._made((region,), region.target_box)
            self.comparisons.add(problem, same_place, found)

    def _made(self, regions: tuple[Region, ...], box: Box) -> CarrierArray:
        """Want a box of a target in its stored dtype; returns where it is going to be."""
        index = self.stored.index
        carrier = BY_NAME[index[regions[0].source].dtype].carrier
        made = np.zeros(box.shape, carrier)
        for region in regions:
            memory = RegionMemory(region, carrier, box.offset, HostMemory(made))
            destination = Destination(region.source_box.offset, memory)
            self.comparisons.wanted.add(region.source, region.source_box, destination)
        return made


def _table_of(description: Description) -> bytes:
    """The tensors, boxes and values of a description, for `_targets`."""
    tensors = {e.name: (e.name, e.dtype, e.global_shape) for e in description.tensors}
    rows = {name: row for row, name in enumerate(tensors)}
    boxes = [(rows[entry.name], part.box) for entry in description.tensors for part in entry.parts]
    table = BoxTable.of(TensorTable.of(list(tensors.values())), boxes)
    return msgspec.msgpack.encode((encode_columns(table.columns()), list(description.values)))


def _targets(replies: list[bytes]) -> Infos:
    """The targets of all ranks, with how they are cut."""
    tables, names = [], []
    for reply in replies:
        columns, values = msgspec.msgpack.decode(reply, type=tuple[bytes, list[str]])
        tables.append(BoxTable.from_columns(decode_columns(columns, "targets")[0]))
        names += values
    tensors, renumber = merge_tensors([table.tensors for table in tables])
    rows = [
        (int(to_new[table.tensor[row]]), table.box(row))
        for table, to_new in zip(tables, renumber, strict=True)
        for row in range(len(table))
    ]
    rows.sort(key=lambda row: row[0])
    cuts = num_pieces_of(BoxTable.of(tensors, rows))
    infos: dict[str, TensorInfo | None] = dict.fromkeys(names)
    for row, name in enumerate(tensors.names):
        infos[name] = TensorInfo(tensors.dtype(row).name, tensors.shape(row), cuts[row])
    return infos
