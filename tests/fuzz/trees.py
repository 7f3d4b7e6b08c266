"""Changing one thing somewhere in nested data, and the data's JSON and msgpack."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec

EXTREME_INTS = (
    0, 1, -1, 2, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 10**12, 1 << 61, 1 << 62,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**30, 1 << 200, -2, -(1 << 31), -(1 << 63),
    -(1 << 63) - 1,
)  # fmt: skip

ODD_TEXTS = (
    "", "x", "0", "-1", ".", "..", "../x", "/etc/passwd", "a/../../b", "a\0b", "é", "w",
    "torch.save", "torch.float32", "torch.sys", "os.system", "cpu:99999999999", "<f8", "|O", "|S9",
    "<U1000000000", "<M8[ns]", "V", "9" * 5000, "x" * 5000, "nan", "1e999", "2024-13-45", "$", "v",
    "latin1", "f4", "storage", "cpu", "torch.strided", "__class__", "a.b",
    "0.metadata", "list", "tuple", "dict", "\ud800",
)  # fmt: skip

KINDS = (
    "dict", "int", "tuple", "set", "frozenset", "complex", "io.BytesIO", "path", "datetime", "date",
    "time", "timedelta", "numpy", "numpy.ndarray", "pickle", "enum", "namedtuple", "torch.dtype",
    "torch.device", "torch.Size", "torch.layout", "torch.memory_format", "torch.Tensor",
    "torch.save", "argparse.Namespace", "types.SimpleNamespace", "", "other",
)  # fmt: skip

DEPTHS = (20, 90, 200, 1100, 20_000)

Slot = tuple[Any, Any]
"""A container and a key of it."""


class Nest:
    """Stands for a value that is nested so many times; encoders know how to write it."""

    def __init__(self, depth: int) -> None:
        self.depth = depth


def any_scalar(dice: random.Random) -> Any:
    """A number, text or constant, most of them odd."""
    kind = dice.randrange(4)
    if kind == 0:
        return dice.choice(EXTREME_INTS)
    if kind == 1:
        return dice.choice(ODD_TEXTS)
    if kind == 2:
        return dice.choice((None, True, False, 0.5, -0.0, 1e308, float("inf"), float("nan")))
    return dice.choice((b"", b"x", bytes(8), bytes(100)))


def any_value(dice: random.Random) -> Any:
    """A scalar or something nested, also values with the tags of the native format."""
    kind = dice.randrange(8)
    if kind < 4:
        return any_scalar(dice)
    if kind == 4:
        return Nest(dice.choice(DEPTHS))
    if kind == 5:
        return {"$": dice.choice(KINDS), "v": any_payload(dice)}
    if kind == 6:
        return [any_scalar(dice) for _ in range(dice.choice((0, 1, 2, 3, 100)))]
    return {str(dice.choice(ODD_TEXTS)): any_scalar(dice) for _ in range(dice.randrange(4))}


def any_payload(dice: random.Random) -> Any:
    """What may stand in a tagged value."""
    kind = dice.randrange(4)
    if kind == 0:
        return any_scalar(dice)
    if kind == 1:
        return [any_value(dice) for _ in range(dice.randrange(4))]
    if kind == 2:
        shape = [dice.choice(EXTREME_INTS) for _ in range(dice.randrange(4))]
        name = dice.choice(("float32", "bfloat16", "bool", "complex32", "x"))
        return [name, shape, dice.choice((b"", bytes(4), bytes(7)))]
    return [[any_value(dice), any_scalar(dice)]]


def slots_of(tree: Any) -> list[Slot]:
    """Every place in nested dicts and lists."""
    found: list[Slot] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict | list):
            keys = list(node) if isinstance(node, dict) else range(len(node))
            for key in keys:
                found.append((node, key))
                stack.append(node[key])
    return found


def _change(node: Any, key: Any, dice: random.Random) -> Any:
    """Another value for one that is there."""
    old = node[key]
    if type(old) is int and dice.random() < 0.6:
        return dice.choice((old + 1, old - 1, -old, old * 2, dice.choice(EXTREME_INTS)))
    if isinstance(old, str) and dice.random() < 0.4:
        return dice.choice((old + "x", old[:-1], old.upper(), dice.choice(ODD_TEXTS)))
    if isinstance(old, list) and dice.random() < 0.5:
        return dice.choice((old[:-1], old[1:], [*old, *old], [*old, any_value(dice)], old[::-1]))
    return any_value(dice)


def change_tree(tree: Any, dice: random.Random) -> Any:
    """The tree (changed in place) with one to three places of it other than before."""
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        slots = slots_of(tree)
        if not slots or dice.random() < 0.02:
            return any_value(dice)
        node, key = dice.choice(slots)
        kind = dice.randrange(8)
        if kind == 0:
            del node[key]
        elif kind == 1:
            other, other_key = dice.choice(slots)
            # As text, so that no container ends up in itself.
            copied = other[other_key]
            node[key] = json.loads(json.dumps(copied)) if _is_json(copied) else any_value(dice)
        elif kind == 2 and isinstance(node, dict):
            new = any_scalar(dice)
            node[new if isinstance(new, str) else str(key) + "x"] = node.pop(key)
        elif kind == 3 and isinstance(node, list):
            node.insert(dice.randrange(len(node) + 1), node[key])
        else:
            node[key] = _change(node, key, dice)
    return tree


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


# ---------------------------------------------------------------------------------------------
# JSON
# ---------------------------------------------------------------------------------------------


def to_json(tree: Any) -> bytes:
    """JSON of a tree, also of what JSON has no words for."""
    nests: list[int] = []

    def default(value: object) -> object:
        if isinstance(value, Nest):
            nests.append(value.depth)
            return f"@nest{len(nests) - 1}@"
        return value.hex() if isinstance(value, bytes) else str(value)

    text = json.dumps(tree, default=default)
    for number, depth in enumerate(nests):
        text = text.replace(f'"@nest{number}@"', "[" * depth + "]" * depth)
    return text.encode()


def change_json(data: bytes, dice: random.Random) -> bytes:
    """JSON with a few places other than before."""
    return to_json(change_tree(json.loads(data), dice))


# ---------------------------------------------------------------------------------------------
# msgpack
# ---------------------------------------------------------------------------------------------


def to_msgpack(tree: Any) -> bytes:
    """msgpack of a tree, also of what the encoder refuses."""
    return msgspec.msgpack.encode(_packable(tree))


def _packable(node: Any) -> Any:
    if isinstance(node, dict):
        return {_packable_key(key): _packable(item) for key, item in node.items()}
    if isinstance(node, list):
        return [_packable(item) for item in node]
    if isinstance(node, Nest):
        return msgspec.Raw(b"\x91" * node.depth + b"\xc0")
    if isinstance(node, str) and not _is_unicode(node):
        raw = node.encode("utf8", "surrogatepass")
        return msgspec.Raw(b"\xd9" + bytes([len(raw)]) + raw)
    if type(node) is int and not -(1 << 63) <= node < 1 << 64:
        return float(node)
    return node


def _packable_key(key: Any) -> Any:
    return key if not isinstance(key, str) or _is_unicode(key) else key.encode("utf8", "replace")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def change_msgpack(data: bytes, dice: random.Random) -> bytes:
    """msgpack with a few places other than before."""
    if dice.random() < 0.05:
        # Lengths that nothing follows.
        head = dice.choice(
            (b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff")
        )
        at = dice.randrange(len(data) + 1)
        return data[:at] + head + data[at:]
    return to_msgpack(change_tree(msgspec.msgpack.decode(data), dice))


Change = Callable[[bytes, random.Random], bytes]
"""Makes other content of a file's content."""
