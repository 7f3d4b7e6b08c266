"""How objects and sizes are shown: a `repr` on a line or two for what holds tensors and long lists.

Fields that are empty are left out, long ones are counted, arrays are shown by type and shape.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Collection, Iterable
from typing import Any

MAX_FIELD = 60
MAX_ENTRIES = 4
MAX_CHARS = 180


def short_repr(self: Any) -> str:
    """The `__repr__` of a dataclass or a msgspec struct."""
    names = getattr(self, "__struct_fields__", None)
    if names is None:
        names = [field.name for field in dataclasses.fields(self) if field.repr]
    values = {name: getattr(self, name) for name in names}
    shown = [f"{name}={_shown(value)}" for name, value in values.items() if not _is_empty(value)]
    text = ", ".join(shown)
    while len(text) > MAX_CHARS:
        shown.pop()
        text = ", ".join([*shown, "..."])
    return f"{type(self).__name__}({text})"


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_empty(value: object) -> bool:
    is_collection = isinstance(value, Collection) and not _is_array(value)
    return value is None or (is_collection and not value)


def _shown(value: Any) -> str:
    """The value of a field."""
    if _is_array(value) and not dataclasses.is_dataclass(value):
        return f"<{value.dtype} {tuple(value.shape)}>"
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= MAX_FIELD else f"{value[:MAX_FIELD]!r}..."
    is_collection = isinstance(value, Collection)
    if not is_collection or len(value) <= MAX_ENTRIES:
        text = repr(value)
        if len(text) <= MAX_FIELD and "\n" not in text:
            return text
    return f"<{len(value)} entries>" if is_collection else f"<{type(value).__name__}>"


class _Short(reprlib.Repr):
    """`repr` of what a file or a caller gave, in time and length that it cannot choose.

    It goes a few levels deep, for a list may hold one thing twice, which holds another twice, and
    so on. Arrays are not printed: torch imports modules for that, and cannot do it for elements of
    some types.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxtuple, self.maxlist, self.maxstring = 2, 16, 16, MAX_FIELD

    def repr_int(self, value: int, level: int) -> str:
        try:
            return super().repr_int(value, level)
        except ValueError:  # thousands of digits
            return f"<int of {value.bit_length()} bits>"

    def repr_instance(self, value: Any, level: int) -> str:
        return _shown(value) if _is_array(value) else super().repr_instance(value, level)


_SHORT = _Short()


def shown(value: object) -> str:
    """A value for a message, whatever it is, cut where it gets long."""
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_FIELD else f"{text[: MAX_FIELD - 3]}..."


def listed(items: Iterable[object], most: int = 10) -> str:
    """The first of some items, and how many more there are."""
    texts = list(map(str, items))
    more = f", ... and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def format_bytes(num_bytes: int) -> str:
    """A size in decimal units, as disks and networks are sold: `33.6 MB`."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    size, unit = float(num_bytes), "B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):  # noqa: B007 - read after the loop
        size /= 1000
        # 999.96 would be printed as 1000.0, so it belongs to the next unit.
        if size < 999.95:
            break
    return f"{size:.1f} {unit}"
