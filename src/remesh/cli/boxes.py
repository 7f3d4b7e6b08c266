"""A region of a tensor as users write it: `0:10,5:7`."""

from __future__ import annotations

import re
from dataclasses import dataclass

import click

from remesh.core.geometry import Box
from remesh.errors import StateError

_BOUNDS = re.compile(r"\s*(?:(?P<index>[0-9]+)|(?P<start>[0-9]*)\s*:\s*(?P<stop>[0-9]*))\s*")


@dataclass(frozen=True, slots=True)
class BoxText:
    """A region of a tensor whose shape is not known yet."""

    text: str  # what the user wrote
    bounds: tuple[tuple[int | None, int | None], ...]
    """Start and stop of the first dims; None stands for the end of the dim on that side."""

    def in_shape(self, name: str, shape: tuple[int, ...]) -> Box:
        """The box in a tensor of this shape; dims that are not given are whole."""
        where = f"{name} has shape {list(shape)}"
        if len(self.bounds) > len(shape):
            raise StateError(f"--box {self.text} has {len(self.bounds)} dims, but {where}")
        given = [*self.bounds, *[(None, None)] * (len(shape) - len(self.bounds))]
        bounds = [
            (start or 0, extent if stop is None else stop)
            for (start, stop), extent in zip(given, shape, strict=True)
        ]
        for dim, ((start, stop), extent) in enumerate(zip(bounds, shape, strict=True)):
            if not start < stop <= extent:
                raise StateError(f"--box {self.text}: {start}:{stop} is not in dim {dim}; {where}")
        return Box.from_slices(*bounds)


def parse_box(_ctx: click.Context, _param: click.Parameter, text: str | None) -> BoxText | None:
    """The value of an option that takes a region; a callback for click."""
    if text is None:
        return None
    bounds: list[tuple[int | None, int | None]] = []
    for part in text.split(","):
        found = _BOUNDS.fullmatch(part)
        if found is None:
            raise click.BadParameter(f"{text!r} is not a box; write it like 0:10,5:7")
        if found["index"]:
            bounds.append((int(found["index"]), int(found["index"]) + 1))
        else:
            start, stop = found["start"], found["stop"]
            bounds.append((int(start) if start else None, int(stop) if stop else None))
    return BoxText(text, tuple(bounds))
