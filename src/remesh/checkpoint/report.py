"""The results of a save, and of a load name by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Self

from remesh._repr import format_bytes, short_repr
from remesh.formats.writer import Part


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of a save on this rank."""

    bytes_written: int
    """Bytes of the data files that this rank wrote, before compression."""
    bytes_stored: int
    """Bytes that these take in the storage."""
    bytes_kept: int
    """Bytes of its files that did not change since the save before, which it did not write."""
    seconds: float
    """Wall time of the save, until it was committed and durable."""

    __repr__ = short_repr

    @classmethod
    def of(cls, parts: Sequence[Part], seconds: float) -> Self:
        written = [part for part in parts if not part.is_kept]
        return cls(
            sum(part.num_bytes for part in written),
            sum(part.stored_size for part in written),
            sum(part.num_bytes for part in parts if part.is_kept),
            seconds,
        )


_KINDS = (
    *("restored", "renamed", "cast", "resized", "derived"),
    *("missing", "kept", "unexpected", "dropped", "unchecked"),
)


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The result of a load on this rank, by stored name."""

    restored: tuple[str, ...]
    """Tensors, values and objects that were taken as they are stored."""
    cast: dict[str, str]
    """Tensors whose dtype was converted: name → `stored → wanted`."""
    resized: dict[str, str]
    """Tensors of another global shape that were enlarged or cut, as the target allows: name →
    `stored → wanted`."""
    derived: dict[str, str]
    """Names that were filled from others: tied tensors, and what a transformation makes: name →
    stored names."""
    missing: tuple[str, ...]
    """Names that the state has and the checkpoint lacks; they kept what they had."""
    kept: tuple[str, ...]
    """Names that a transformation says to leave as they are."""
    unexpected: tuple[str, ...]
    """Names that the checkpoint holds and no rank requested."""
    bytes_needed: int
    """Bytes of tensor data that this rank wanted, in stored dtypes."""
    bytes_read: int = 0
    """Bytes that this rank read from data files."""
    num_reads: int = 0
    """Read requests."""
    seconds: float = 0.0
    """Wall time of the load."""
    dropped: tuple[str, ...] = ()
    """Entries of plain dicts that the state had and the checkpoint lacks; such a dict is replaced
    whole."""
    reads_shared: bool = False
    """Whether ranks read for each other."""
    group_bytes_needed: int = 0
    """Bytes of tensor data that all ranks wanted."""
    group_bytes_read: int = 0
    """Bytes that all ranks read from data files."""
    unchecked: tuple[str, ...] = ()
    """Names that ranks asked for and that a repair has taken over without a digest that proves
    them: they may be wrong."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Names that a transformation fills with a stored tensor or value as it is: name → stored name.
    """

    __repr__ = short_repr

    def _kinds(self) -> dict[str, Collection[str]]:
        return {kind: getattr(self, kind) for kind in _KINDS}

    def table(self) -> str:
        """One line for each name, with its result in front.

        What was missing kept its value, and what was unexpected was ignored.
        """
        rows = [
            (kind, name, names[name] if isinstance(names, dict) else "")
            for kind, names in self._kinds().items()
            for name in names
        ]
        wide = max((len(name) for _, name, _ in rows), default=0)
        return "\n".join(f"{kind:10}  {name:{wide}}  {how}".rstrip() for kind, name, how in rows)

    def __str__(self) -> str:
        counts = [
            f"{len(names)} {kind}"
            for kind, names in self._kinds().items()
            if names or kind == "restored"
        ]
        group = ""
        if self.group_bytes_needed > self.bytes_needed:
            how = "shared reads" if self.reads_shared else "each for itself"
            group = (
                f"; all ranks, {how}: read {format_bytes(self.group_bytes_read)} for "
                f"{format_bytes(self.group_bytes_needed)} wanted"
            )
        rate = self.bytes_read / self.seconds / 1e9 if self.seconds else 0.0
        return (
            f"{', '.join(counts)}; read {format_bytes(self.bytes_read)} for "
            f"{format_bytes(self.bytes_needed)} wanted in {self.seconds:.2f} s ({rate:.2f} GB/s)"
            f"{group}"
        )


@dataclass(slots=True)
class Findings:
    """The findings on this rank while a state is compared with a checkpoint."""

    restored: list[str] = field(default_factory=list)
    cast: dict[str, str] = field(default_factory=dict)
    resized: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    derived: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    other_sizes: bool = False  # whether a tensor is stored with as many dims, and another shape
    others: tuple[str, ...] = ()  # what a name below tensors begins with that are something else
    new_parameters: bool = False  # whether an optimizer has parameters that the stored one has not

    def is_another(self, tensor: str, why: str) -> None:
        """Note that something other than this kind of tensor is stored under its name."""
        self.others = (*self.others, f"{tensor}.")
        self.conflicts.append(f"{tensor}: {why}")

    def report(self, dropped: tuple[str, ...], num_bytes: int) -> RestoreReport:
        """The report of what will have been done, before anything is read."""
        return RestoreReport(
            tuple(self.restored),
            self.cast,
            self.resized,
            self.derived,
            tuple(self.missing),
            tuple(self.kept),
            (),
            num_bytes,
            dropped=dropped,
            renamed=self.renamed,
        )
