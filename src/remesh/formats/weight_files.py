"""Which tensors go into which weight files, and the bytes around them. Pure.

Tensors stay in their order and fill one file after the other up to a limit, as model hubs do it.
Inside a safetensors file wide elements come first, so that each begins at a multiple of its size.
A file is written from its first byte to its last (`Content`), in parts that may end inside a
tensor (`Span`): which part is due when is planned here as well, so that all ranks go through the
same rounds and none holds more than a part of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from remesh.dtypes import BY_NAME
from remesh.errors import UnsupportedValueError
from remesh.safetensors_file import encode_header

MAX_ITEMSIZE = max(dtype.itemsize for dtype in BY_NAME.values())


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a weight file.

    Attributes:
        names: Its names in the file; more than one if it is tied.
        source: Its stored name in the state.
        dtype: Name of its element type in the file.
        shape: Its whole shape.
    """

    names: tuple[str, ...]
    source: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor in the file."""
        return self.num_elements * BY_NAME[self.dtype].itemsize


class Content(Protocol):
    """The bytes of a file around its tensors, which follow each other in order."""

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        ...

    def head(self) -> bytes:
        """What comes before everything else."""
        ...

    def before(self, number: int) -> bytes:
        """What comes before a tensor."""
        ...

    def after(self, number: int, checksum: int) -> bytes:
        """What comes after a tensor whose bytes have this CRC-32."""
        ...

    def tail(self, checksums: Sequence[int]) -> bytes:
        """What comes last."""
        ...


@dataclass(slots=True)
class SafetensorsContent:
    """The bytes of a safetensors file around its tensors: a header, and nothing else.

    Attributes:
        tensors: The tensors, in the order of the file.
        num_bytes: Size of the file.
        positions: Byte at which each tensor begins.

    Raises:
        UnsupportedValueError: If a tensor is of a type that such a file has no name for.
    """

    tensors: Sequence[FileTensor]
    num_bytes: int = field(init=False)
    positions: list[int] = field(init=False)
    _header: bytes = field(init=False)

    def __post_init__(self) -> None:
        rows = []
        for tensor in self.tensors:
            dtype = BY_NAME[tensor.dtype]
            if dtype.pairs:
                raise UnsupportedValueError(
                    f"{tensor.names[0]}: a safetensors file has no name for elements of type "
                    f"{tensor.dtype}\nLeave it out, or export with format='pth'"
                )
            rows.append((tensor.names[0], dtype.safetensors, tensor.shape, tensor.num_bytes))
        self._header, self.positions = encode_header(rows, {"format": "pt"})
        self.num_bytes = len(self._header) + sum(tensor.num_bytes for tensor in self.tensors)

    def head(self) -> bytes:
        """See `Content.head`."""
        return self._header

    def before(self, _number: int) -> bytes:
        """See `Content.before`."""
        return b""

    def after(self, _number: int, _checksum: int) -> bytes:
        """See `Content.after`."""
        return b""

    def tail(self, _checksums: Sequence[int]) -> bytes:
        """See `Content.tail`."""
        return b""


def split_into_files(
    tensors: Sequence[FileTensor], max_file_bytes: int | None
) -> list[list[FileTensor]]:
    """The tensors of each file, wide elements first; a larger tensor has a file of its own.

    Args:
        tensors: In their order.
        max_file_bytes: Bytes of tensors that a file has at most; None for a single file.
    """
    files: list[list[FileTensor]] = []
    num_bytes = 0
    for tensor in tensors:
        is_full = max_file_bytes is not None and num_bytes + tensor.num_bytes > max_file_bytes
        if not files or (is_full and files[-1]):
            files.append([])
            num_bytes = 0
        files[-1].append(tensor)
        num_bytes += tensor.num_bytes
    return [sorted(file, key=lambda tensor: -BY_NAME[tensor.dtype].itemsize) for file in files]


def file_names(stem: str, suffix: str, num_files: int) -> list[str]:
    """`model.safetensors`, or `model-00001-of-00003.safetensors` and so on."""
    if num_files == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{n + 1:05d}-of-{num_files:05d}{suffix}" for n in range(num_files)]


def assign_files(sizes: Sequence[int], world_size: int) -> list[list[int]]:
    """Numbers of the files that each rank writes: large ones first, to the rank that has least."""
    assigned: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        rank = loads.index(min(loads))
        assigned[rank].append(number)
        loads[rank] += sizes[number]
    return [sorted(numbers) for numbers in assigned]


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, stop), in row-major order, of a tensor of a file."""

    file: int
    tensor: int
    start: int
    stop: int


def plan_rounds(
    files: Sequence[Sequence[FileTensor]], numbers: Sequence[int], round_bytes: int
) -> list[list[Span]]:
    """What a rank writes in each round: its files in order, so many bytes at a time at most."""
    assert round_bytes >= MAX_ITEMSIZE
    rounds: list[list[Span]] = [[]]
    room = round_bytes
    for span, itemsize in _whole_spans(files, numbers):
        start = span.start
        while True:
            stop = min(span.stop, start + room // itemsize)
            if stop > start or start == span.stop:
                rounds[-1].append(Span(span.file, span.tensor, start, stop))
                room -= (stop - start) * itemsize
                start = stop
            if start == span.stop:
                break
            rounds.append([])
            room = round_bytes
    return rounds if numbers else []


def _whole_spans(
    files: Sequence[Sequence[FileTensor]], numbers: Sequence[int]
) -> Iterator[tuple[Span, int]]:
    for number in numbers:
        for place, tensor in enumerate(files[number]):
            whole = Span(number, place, 0, tensor.num_elements)
            yield whole, BY_NAME[tensor.dtype].itemsize
