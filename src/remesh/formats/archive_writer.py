"""Archives of `torch.save` around bytes that another function writes.

All bytes of an archive of one tensor but the elements follow from its type and shape: a head before
them, a tail behind. So a data file of such archives is planned completely before a byte of a tensor
moves, like remesh's own files.

The entry with the elements comes last, so that only its size can pass what a plain zip file holds.
Its checksum is 0: it would have to be known before the elements are, and torch does not look at it
(`torch.serialization.set_crc32_options` turns it off in torch's own files).
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zlib
from collections.abc import Sequence

from remesh.core import values
from remesh.core.dtypes import DType
from remesh.core.geometry import strides_of
from remesh.errors import UnsupportedValueError
from remesh.formats.archive import LOCAL_HEADER, LOCAL_MAGIC
from remesh.formats.pickle_values import LEGACY_STORAGES
from remesh.formats.pickle_writer import Call, Global, PersistentId, dumps

ALIGNMENT = 64
"""Elements begin at a multiple of this in the file, as torch aligns them in an archive."""
ROOT = "archive"
_MAX_32 = 0xFFFFFFFF
_UTF8 = 0x800
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_STORAGE_OF = {dtype: name for name, dtype in LEGACY_STORAGES.items()}


def tensor_pickle(dtype: DType, shape: Sequence[int]) -> bytes:
    """The pickle of a tensor whose elements are the storage `0`, row by row."""
    return dumps(tensor_value(dtype, shape, "0"))


def tensor_value(dtype: DType, shape: Sequence[int], key: str) -> Call:
    """The description of a tensor in a pickle; its elements are a storage, row by row."""
    size, legacy = math.prod(shape), _STORAGE_OF.get(dtype.name)
    storage = Global("torch", legacy) if legacy else Global("torch.storage", "UntypedStorage")
    num_items = size if legacy else size * dtype.itemsize
    hooks = Call(Global("collections", "OrderedDict"), ())
    args = (
        PersistentId(("storage", storage, key, "cpu", num_items)),
        0,
        tuple(shape),
        tuple(strides_of(shape)),
        False,
        hooks,
    )
    if legacy:
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), args)
    rebuild = Global("torch._utils", "_rebuild_tensor_v3")
    return Call(rebuild, (*args, Global("torch", dtype.name)))


def frame(pickled: bytes, num_bytes: int, at: int) -> tuple[bytes, bytes]:
    """Head and tail of an archive, which begins at byte `at`; between them lies storage `0`."""
    head, directory = _small_entries([("data.pkl", pickled)])
    name = f"{ROOT}/data/0".encode()
    is_large = num_bytes >= _MAX_32
    sizes = struct.pack("<2H2Q", 1, 16, num_bytes, num_bytes) if is_large else b""
    shown = _MAX_32 if is_large else num_bytes
    start = at + len(head) + LOCAL_HEADER.size + len(name) + len(sizes) + 4
    padding = -start % ALIGNMENT
    # The extra field with the padding has the tag that torch gives it.
    extra = sizes + b"FB" + struct.pack("<H", padding) + b"Z" * padding
    local = _local_header(name, 0, shown, extra)
    directory += _central_header(name, 0, shown, len(head), sizes)
    head += local
    return head, directory_end(directory, 4, len(head) + num_bytes)


def _small_entries(entries: Sequence[tuple[str, bytes]]) -> tuple[bytes, bytes]:
    """Entries whose bytes are known, with what torch wants in every archive: bytes, directory."""
    data, directory = b"", b""
    for short, content in (*entries, ("byteorder", b"little"), ("version", b"3\n")):
        name, checksum = f"{ROOT}/{short}".encode(), zlib.crc32(content)
        directory += _central_header(name, checksum, len(content), len(data), b"")
        data += _local_header(name, checksum, len(content), b"") + content
    return data, directory


def _local_header(name: bytes, checksum: int, size: int, extra: bytes) -> bytes:
    fields = (0, _UTF8, 0, 0, 0, checksum, size, size, len(name), len(extra))
    return LOCAL_HEADER.pack(LOCAL_MAGIC, *fields) + name + extra


def _central_header(name: bytes, checksum: int, size: int, at: int, extra: bytes) -> bytes:
    fields = (0, 0, _UTF8, 0, 0, 0, checksum, size, size, len(name), len(extra), 0, 0, 0, 0, at)
    return _CENTRAL.pack(b"PK\x01\x02", *fields) + name + extra


def directory_end(directory: bytes, num_entries: int, at: int) -> bytes:
    """The directory, which begins at a byte of the archive, and what closes the archive."""
    size, closing = len(directory), b""
    if at >= _MAX_32:
        closing = struct.pack(
            "<4sQ2H2I4Q", b"PK\x06\x06", 44, 0, 45, 0, 0, num_entries, num_entries, size, at
        )
        closing += struct.pack("<4sIQI", b"PK\x06\x07", 0, at + size, 1)
    shown = min(at, _MAX_32)
    closing += struct.pack(
        "<4s4H2IH", b"PK\x05\x06", 0, 0, num_entries, num_entries, size, shown, 0
    )
    return directory + closing


def archive_of(value: object, name: str) -> bytes:
    """A whole archive of a plain value, as `torch.save` writes it."""
    unknown = next(values.unresolved(value), None)
    if unknown is not None:
        raise UnsupportedValueError(
            f"{name}: a {unknown.type_name}, which this program does not know, so it cannot be "
            "pickled\nImport the module that defines it first"
        )
    torch = sys.modules.get("torch")
    if torch is not None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()
    # What needs torch is unresolved without it, so this is plain.
    data, directory = _small_entries([("data.pkl", pickle.dumps(value, protocol=2))])
    return data + directory_end(directory, 3, len(data))
