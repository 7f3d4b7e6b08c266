"""Lossless compression of data files, block by block.

Weights and moments of a trained model look random as bytes, but their signs and exponents do not:
few of them occur often. So the bytes of a block are sorted into *planes* first, all first bytes of
its elements, then all second bytes, and so on, and then compressed with zstd (RFC 8878), which
leaves planes of random mantissas as they are. The same idea is called byte shuffle in HDF5 and
Blosc, and byte grouping in ZipNN (Hershcovitch et al., 2024).

A block is a digest block (`remesh.integrity`). Each is encoded alone, so that a reader who wants a
range decodes no more than it has to check anyway. A block that does not get smaller is stored as it
is, and an encoded block is always smaller than its content, which tells the two apart.

An encoded block is one byte, the number of planes, and one frame of zstd.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from remesh.errors import FormatVersionError, OptionError

LEVEL = 1
"""The fastest of zstd's levels: higher ones cost a multiple for a percent, for what can be made
smaller is entropy, and not repetition."""

HASH_LOG = 8
"""zstd remembers so few places to look for repetitions at: those that it would find in weights are
short, by chance, and cost twice the time and a percent more bytes. Repeated rows it still finds."""

MAX_PLANES = 16
"""The largest element has so many bytes."""

_WORDS = frozenset({2, 4, 8})
"""Numbers of planes of which shifts are faster than copies byte by byte."""

_MAGIC = b"\x28\xb5\x2f\xfd"
"""How a frame of zstd begins."""

Bytes = npt.NDArray[np.uint8]

_local = threading.local()


def check_library() -> None:
    """Check that blocks can be encoded.

    Raises:
        OptionError: If the library is missing.
    """
    try:
        importlib.import_module("zstandard")
    except ImportError as error:
        raise OptionError(
            f"a save with compress= needs the library zstandard ({error})\nInstall it with: pip "
            "install 'remesh[compress]'"
        ) from error


def encode_block(block: Bytes, num_planes: int) -> Bytes:
    """A block in its stored form.

    Args:
        block: Its bytes, at least one.
        num_planes: Bytes of the elements that the block consists of, mostly.

    Returns:
        The stored form: `block` itself if it does not get smaller.
    """
    if not hasattr(_local, "compressor"):
        library = importlib.import_module("zstandard")
        parameters = library.ZstdCompressionParameters.from_level(
            LEVEL, hash_log=HASH_LOG, write_content_size=True
        )
        _local.compressor = library.ZstdCompressor(compression_params=parameters)
    frame = _local.compressor.compress(_planes(block, num_planes).data)
    if len(frame) + 1 >= len(block):
        return block
    encoded = np.empty(len(frame) + 1, np.uint8)
    encoded[0] = num_planes
    encoded[1:] = np.frombuffer(frame, np.uint8)
    return encoded


def decode_block(stored: Bytes, into: Bytes, where: str) -> bool:
    """Decode the stored form of a block.

    Args:
        stored: What `encode_block` made.
        into: The bytes of the block, as many as it has.
        where: The file, for messages.

    Returns:
        Whether it could be decoded. That it is right, its digest says.

    Raises:
        FormatVersionError: If the library is missing.
    """
    if len(stored) == len(into):
        into[:] = stored
        return True
    library = _library(where)
    if not hasattr(_local, "decompressor"):
        _local.decompressor = library.ZstdDecompressor()
    num_planes = int(stored[0]) if len(stored) else 0
    try:
        # What a frame says of its size is believed only if it is what is expected.
        if library.frame_content_size(stored[1:].data) != len(into):
            return False
        found = np.frombuffer(_local.decompressor.decompress(stored[1:].data), np.uint8)
    except library.ZstdError:
        return False
    if len(found) != len(into) or not 0 < num_planes <= MAX_PLANES:
        return False
    size = len(into) // num_planes
    whole = size * num_planes
    _join(found[:whole].reshape(num_planes, size), into[:whole])
    into[whole:] = found[whole:]
    return True


def is_encoded(data: bytes) -> bool:
    """Whether bytes begin like an encoded block, and not like a safetensors file."""
    return len(data) > 5 and 0 < data[0] <= MAX_PLANES and data[1:5] == _MAGIC


def _planes(block: Bytes, num_planes: int) -> Bytes:
    """The bytes of a block, plane by plane; what is no whole element comes last."""
    if num_planes == 1:
        return np.ascontiguousarray(block)
    size = len(block) // num_planes
    whole = size * num_planes
    sorted_ = np.empty_like(block)
    planes = sorted_[:whole].reshape(num_planes, size)
    if num_planes in _WORDS:
        words = block[:whole].view(f"<u{num_planes}")
        for number, plane in enumerate(planes):
            np.right_shift(words, 8 * number, out=plane, casting="unsafe")
    else:
        planes[...] = block[:whole].reshape(size, num_planes).T
    sorted_[whole:] = block[whole:]
    return sorted_


def _join(planes: Bytes, into: Bytes) -> None:
    """Put planes together again."""
    num_planes = len(planes)
    if num_planes not in _WORDS:
        into.reshape(-1, num_planes)[...] = planes.T
        return
    words = into.view(f"<u{num_planes}")
    words[...] = planes[0]
    for number, plane in enumerate(planes[1:], 1):
        words |= plane.astype(words.dtype) << 8 * number


def _library(where: str) -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise FormatVersionError(
            f"{where}: is compressed, and the library zstandard cannot be imported ({error})\n"
            "Install it with: pip install 'remesh[compress]'"
        ) from error
