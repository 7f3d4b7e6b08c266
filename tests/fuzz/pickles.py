"""Changing pickles opcode by opcode, and the archives of `torch.save` around them."""

from __future__ import annotations

import io
import pickletools
import random
import struct
import zipfile

from tests.formats import hostile
from tests.fuzz.trees import DEPTHS, EXTREME_INTS, ODD_TEXTS

NAMES = (
    ("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("builtins", "dict"),
    ("builtins", "bytearray"), ("builtins", "bytes"), ("builtins", "int"), ("builtins", "list"),
    ("builtins", "slice"), ("builtins", "complex"), ("builtins", "set"), ("builtins", "range"),
    ("collections", "OrderedDict"), ("collections", "defaultdict"), ("collections", "Counter"),
    ("torch", "Tensor"), ("torch", "FloatStorage"), ("torch", "Size"), ("torch", "device"),
    ("torch", "float32"), ("torch", "save"), ("torch", "_import_dotted_name"),
    ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter"),
    ("torch.serialization", "_get_layout"), ("torch.storage", "_load_from_bytes"),
    ("numpy", "dtype"), ("numpy", "ndarray"), ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"), ("numpy.core.multiarray", "scalar"), ("_io", "BytesIO"),
    ("argparse", "Namespace"), ("types", "SimpleNamespace"), ("_codecs", "encode"),
    ("datetime", "datetime"), ("datetime", "timedelta"), ("pathlib", "PosixPath"),
    ("copyreg", "_reconstructor"), ("some.where", "Unknown"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
)  # fmt: skip

_SMALL = (
    b"N", b"(", b")", b"]", b"}", b"0", b"1", b"2", b"t", b"R", b"a", b"s", b"e", b"u", b"b", b"Q",
    b"\x81", b"\x85", b"\x86", b"\x87", b"\x88", b"\x89", b"\x8f", b"\x90", b"\x91", b"\x92",
    b"\x93", b"\x94", b".", b"q\0", b"h\0", b"h\x01", b"h\x05", b"l", b"d", b"o", b"\x97", b"\x98",
)  # fmt: skip


def _name(dice: random.Random) -> bytes:
    return hostile.name(".".join(dice.choice(NAMES)))


def _doubling(depth: int) -> bytes:
    """A value of 2^depth leaves in a few bytes for each doubling."""
    steps = (b"r" + number.to_bytes(4, "little") for number in range(1000, 1000 + depth))
    return hostile.text("x") + b"".join(
        step + b"0" + b"j" + step[1:] + b"j" + step[1:] + b"\x86" for step in steps
    )


def _anything(dice: random.Random) -> bytes:
    """Opcodes that push one value, or nearly so."""
    kind = dice.randrange(12)
    if kind < 3:
        return hostile.number(dice.choice(EXTREME_INTS))
    if kind < 5:
        return hostile.text(dice.choice(ODD_TEXTS))
    if kind < 7:
        return _name(dice)
    if kind == 7:
        return b"]" * (depth := dice.choice(DEPTHS)) + b"a" * (depth - 1)
    if kind == 8:
        return b")" + b"\x85" * dice.choice(DEPTHS)
    if kind == 9:
        return _doubling(dice.choice((4, 12, 30, 60)))
    if kind == 10:
        return (
            _name(dice) + b"(" + b"".join(_anything(dice) for _ in range(dice.randrange(4))) + b"tR"
        )
    return dice.choice((
        b"G\x7f\xf8\0\0\0\0\0\0", b"I99999999999999999999\n", b"\x8e" + b"\xff" * 7 + b"\0",
        b"\x96\0\0\0\0\0\x01\0\0", b"]q\0h\0a",
        b"}q\0" + hostile.text("a") + b"h\0s", b"\x88", b"Nr\xff\xff\xff\x7f", b"B\xff\xff\xff\x7f",
    ))  # fmt: skip


def opcodes(data: bytes) -> list[tuple[str, bytes]]:
    """Name and bytes of each opcode, frames left out."""
    found = list(pickletools.genops(data))
    ends = [position for _, _, position in found[1:]] + [len(data)]
    return [
        (opcode.name, data[position:end])
        for (opcode, _, position), end in zip(found, ends, strict=True)
        if opcode.name != "FRAME"
    ]


def change_pickle(data: bytes, dice: random.Random) -> bytes:
    """A pickle with a few opcodes other than before."""
    codes = opcodes(data)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 6))):
        at = dice.randrange(1, max(len(codes) - 1, 2))
        name, raw = codes[at]
        kind = dice.randrange(10)
        if kind == 0:
            del codes[at]
        elif kind == 1:
            codes.insert(at, codes[dice.randrange(len(codes))])
        elif kind == 2:
            codes.insert(at, ("", dice.choice(_SMALL)))
        elif kind == 3:
            codes.insert(at, ("", _anything(dice)))
        elif kind == 4:
            other = dice.randrange(1, len(codes))
            codes[at], codes[other] = codes[other], codes[at]
        elif "INT" in name or name in {"LONG1", "LONG4"}:
            codes[at] = (name, hostile.number(dice.choice(EXTREME_INTS)))
        elif "UNICODE" in name or name == "BINSTRING":
            texts = [code for code in codes if code[0] == name]
            codes[at] = dice.choice(
                (dice.choice(texts), (name, hostile.text(dice.choice(ODD_TEXTS))))
            )
        elif name in {"GLOBAL", "STACK_GLOBAL"}:
            codes[at] = (name, raw if name == "GLOBAL" and kind < 6 else _name(dice))
        else:
            codes[at] = ("", _anything(dice))
    return b"".join(raw for _, raw in codes)


# ---------------------------------------------------------------------------------------------
# Archives
# ---------------------------------------------------------------------------------------------


def change_archive(data: bytes, dice: random.Random) -> bytes:
    """An archive of `torch.save` with another pickle in it, or with other entries."""
    if dice.random() < 0.3:
        return _change_directory(data, dice)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    method = zipfile.ZIP_STORED
    kind = dice.randrange(10)
    name = dice.choice(sorted(entries))
    if kind < 7:
        name = next(name for name in entries if name.endswith("data.pkl"))
        entries[name] = change_pickle(entries[name], dice)
    elif kind == 7:
        del entries[name]
    elif kind == 8:
        entries[dice.choice((name + "x", "other/data.pkl", "../x", "archive/data/0"))] = entries[
            name
        ]
    else:
        method = zipfile.ZIP_DEFLATED
        entries[name] = bytes(dice.choice((10, 30 << 20)))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method, compresslevel=1) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return made.getvalue()


def _change_directory(data: bytes, dice: random.Random) -> bytes:
    """An archive with another number somewhere in a header."""
    heads = [
        at
        for magic in (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")
        for at in _all(data, magic)
    ]
    content = bytearray(data)
    for _ in range(dice.choice((1, 1, 2))):
        at = dice.choice(heads) + 2 * dice.randrange(2, 23)
        code = dice.choice(("<H", "<I", "<Q"))
        limit = 1 << 8 * struct.calcsize(code)
        number = dice.choice((dice.choice(EXTREME_INTS) % limit, dice.randrange(len(data)) % limit))
        if at + struct.calcsize(code) <= len(content):
            struct.pack_into(code, content, at, number)
    return bytes(content)


def _all(data: bytes, magic: bytes) -> list[int]:
    found, at = [], data.find(magic)
    while at >= 0:
        found.append(at)
        at = data.find(magic, at + 1)
    return found
