"""Which tensors go into which weight files, and the header of a safetensors file. Pure.

Tensors stay in their order and fill one file after the other up to a limit, as model hubs do it.
Inside a safetensors file wide elements come first, so that each begins at a multiple of its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from remesh.core.dtypes import BY_NAME
from remesh.core.safetensors_file import encode_header
from remesh.errors import UnsupportedValueError


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a weight file."""

    name: str
    dtype: str  # name of its element type in the file
    shape: tuple[int, ...]  # its whole shape

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor in the file."""
        return self.num_elements * BY_NAME[self.dtype].itemsize


@dataclass(slots=True)
class SafetensorsContent:
    """The bytes of a safetensors file before its tensors."""

    tensors: Sequence[FileTensor]  # the tensors, in the order of the file
    num_bytes: int = field(init=False)  # size of the file
    positions: list[int] = field(init=False)  # byte at which each tensor begins
    header: bytes = field(init=False)  # the first bytes of the file

    def __post_init__(self) -> None:
        rows = []
        for tensor in self.tensors:
            dtype = BY_NAME[tensor.dtype]
            if dtype.pairs:
                raise UnsupportedValueError(
                    f"{tensor.name}: a safetensors file has no name for elements of type "
                    f"{tensor.dtype}\nLeave it out, or export with format='pth'"
                )
            rows.append((tensor.name, dtype.safetensors, tensor.shape, tensor.num_bytes))
        self.header, self.positions = encode_header(rows, {"format": "pt"})
        self.num_bytes = len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)


def split_into_files(
    tensors: Sequence[FileTensor], max_file_bytes: int | None
) -> list[list[FileTensor]]:
    """The tensors of each file, wide elements first; a larger tensor has a file of its own.

    `max_file_bytes` are the bytes of tensors that a file has at most; None for a single file.
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
