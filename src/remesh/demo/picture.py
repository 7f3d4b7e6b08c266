"""Pages that show layouts: HTML with drawings in SVG, in one file.

Every drawing is a pure function from plain data to text. A tensor is drawn as a rectangle, its
first dim downwards and all others to the right (a vector lies along the right), cut into the
boxes that the ranks hold and coloured by rank. A box that several ranks hold alike is drawn once,
striped in their colours.

Colours are CSS variables with a light and a dark set, so the page follows the reader's setting.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remesh.core.geometry import Box

NUMCOLOURS = 8

_WIDTH = 740
"""Width of a drawing: what a window of 800 pixels shows."""
_NAME_WIDTH = 160
_TENSOR_WIDTH = 240
_COLUMN_GAP = 24
_ROW_GAP = 26
_VECTOR_HEIGHT = 20
_NARROW = 600
_MIN_HEIGHT, _MAX_HEIGHT = 48, 240
_MAX_STRIPES = NUMCOLOURS
_MAX_RANKS = 12
"""Ranks that are listed as the holders of a box."""
_HEAD_HEIGHT = 52
_FONT_WIDTH = 6.3
_LINE_HEIGHT = 14


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A global tensor and which rank holds which boxes of it."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[int, Box], ...]


@dataclass(frozen=True, slots=True)
class Column:
    """One layout: a heading of two lines, its tensors by name, and what holds their boxes."""

    title: str
    subtitle: str
    tensors: Mapping[str, PlacedTensor]
    holder: str = "rank"


# ---------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------


def layout_svg(columns: Sequence[Column]) -> str:
    """The tensors of the first column, as they lie in each of the columns.

    Each has a scale of its own, so that all are as wide and none is too high or low to be read.
    """
    shapes = {name: _flat_shape(placed.shape) for name, placed in columns[0].tensors.items()}
    tensor_width = tensor_width_of(len(columns))
    groups = sorted({ranks for column in columns for ranks in _shared_groups(column)})
    parts = [_stripes(ranks) for ranks in groups]
    lefts = [_NAME_WIDTH + number * (tensor_width + _COLUMN_GAP) for number in range(len(columns))]
    for x, column in zip(lefts, columns, strict=True):
        parts.append(_text(x, 18, column.title, "head"))
        parts.append(_text(x, 35, column.subtitle, "soft"))
    top = float(_HEAD_HEIGHT)
    for name, shape in shapes.items():
        scale = _fitted(shape, tensor_width)
        label = [(line, "name") for line in _wrapped(name)] + [(_times(shape), "soft")]
        for line, (text, style) in enumerate(label):
            parts.append(_text(0, top + 11 + line * _LINE_HEIGHT, text, style))
        for x, column in zip(lefts, columns, strict=True):
            parts.extend(_tensor(name, column.tensors[name], x, top, scale, column.holder))
        top += max(_extent(shape, scale)[1], len(label) * _LINE_HEIGHT) + _ROW_GAP
    height = top - _ROW_GAP + 2
    return _svg(lefts[-1] + tensor_width, height, "How the tensors lie on the ranks", parts)


def tensor_width_of(num_columns: int) -> float:
    """Width of the widest tensor of a drawing with some columns."""
    free = _WIDTH - _NAME_WIDTH - (num_columns - 1) * _COLUMN_GAP
    return min(free / num_columns, _TENSOR_WIDTH)


def rank_legend(num_ranks: int) -> str:
    """A line of HTML that names the colours."""
    swatches = [
        f'<span class="key"><svg class="swatch" width="14" height="14" aria-hidden="true">'
        f'<rect class="r{rank % NUMCOLOURS}" width="14" height="14" rx="2"/></svg> rank {rank}'
        "</span>"
        for rank in range(num_ranks)
    ]
    return f'<p class="legend">{" ".join(swatches)}</p>'


def _flat_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of at most two dims: the first, and all others together."""
    return shape if len(shape) < 3 else (shape[0], math.prod(shape[1:]))


def _flat_box(shape: tuple[int, ...], box: Box) -> Box:
    """A box in the shape of at most two dims; one that is cut further in is drawn as its hull."""
    if len(shape) < 3:
        return box
    start, stop = 0, 0
    for extent, offset, length in zip(shape[1:], box.offset[1:], box.shape[1:], strict=True):
        start, stop = start * extent + offset, stop * extent + offset + length - 1
    return Box((box.offset[0], start), (box.shape[0], stop + 1 - start))


def _holders(placed: PlacedTensor) -> dict[Box, tuple[int, ...]]:
    """The ranks that hold each distinct box that is not empty."""
    holders: dict[Box, tuple[int, ...]] = {}
    for rank, box in placed.boxes:
        if box.size:
            holders[box] = (*holders.get(box, ()), rank)
    return holders


def _shared_groups(column: Column) -> set[tuple[int, ...]]:
    return {
        ranks
        for placed in column.tensors.values()
        for ranks in _holders(placed).values()
        if len(ranks) > 1
    }


def _stripes(ranks: tuple[int, ...]) -> str:
    """The filling of a box that several ranks hold."""
    step = 9
    bars = "".join(
        f'<rect class="r{rank % NUMCOLOURS}" x="{step * place}" width="{step}" height="20"/>'
        for place, rank in enumerate(ranks[:_MAX_STRIPES])
    )
    width = step * min(len(ranks), _MAX_STRIPES)
    return (
        f'<pattern id="{_stripes_id(ranks)}" width="{width}" height="20" '
        f'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">{bars}</pattern>'
    )


def _stripes_id(ranks: tuple[int, ...]) -> str:
    more = f"-of-{len(ranks)}-to-{ranks[-1]}" if len(ranks) > _MAX_RANKS else ""
    return "ranks-" + "-".join(map(str, ranks[:_MAX_RANKS])) + more


_Scale = tuple[float, float]
"""Points an element across and down."""


def _fitted(shape: Sequence[int], width: float) -> _Scale:
    """The scale that makes a shape as wide as any, and neither too high nor too low."""
    across = width / max(shape[-1], 1)
    height = min(max(shape[0] * across, _MIN_HEIGHT), _MAX_HEIGHT)
    return across, height / max(shape[0], 1)


def _extent(shape: Sequence[int], scale: _Scale) -> tuple[float, float]:
    return shape[-1] * scale[0], shape[0] * scale[1] if len(shape) == 2 else _VECTOR_HEIGHT


def _tensor(
    name: str, placed: PlacedTensor, x: float, y: float, scale: _Scale, holder: str
) -> list[str]:
    parts = []
    for whole, ranks in _holders(placed).items():
        box = _flat_box(placed.shape, whole)
        width, height = _extent(box.shape, scale)
        left = x + box.offset[-1] * scale[0]
        top = y + (box.offset[0] * scale[1] if box.ndim == 2 else 0)
        fill = (
            f'class="box r{ranks[0] % NUMCOLOURS}"'
            if len(ranks) == 1
            else f'class="box" fill="url(#{_stripes_id(ranks)})"'
        )
        who = _who(ranks, holder)
        title = html.escape(f"{name} {box} on {who}")
        parts.append(
            f'<rect {fill} data-tensor="{html.escape(name)}" '
            f'x="{left:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}">'
            f"<title>{title}</title></rect>"
        )
        parts.extend(_label(who, ranks, _times(box.shape), (left, top, width, height)))
    return parts


def _label(
    who: str, ranks: tuple[int, ...], size: str, area: tuple[float, float, float, float]
) -> list[str]:
    """The fullest wording that fits into a drawn box; the box's tooltip has it all anyway."""
    left, top, width, height = area
    numbers = ",".join(map(str, ranks[:_MAX_RANKS]))
    wordings = [(who, size), (f"{who}: {size}",), (who,), (numbers,)]
    for lines in wordings:
        fits_across = max(map(len, lines)) * _FONT_WIDTH + 6 <= width
        if fits_across and len(lines) * _LINE_HEIGHT + 2 <= height:
            middle = top + height / 2 + 4 - (len(lines) - 1) * _LINE_HEIGHT / 2
            style = "in" if len(ranks) == 1 else "in halo"
            return [
                _text(left + width / 2, middle + number * _LINE_HEIGHT, line, style)
                for number, line in enumerate(lines)
            ]
    return []


def _who(ranks: tuple[int, ...], holder: str) -> str:
    if len(ranks) == 1:
        return f"{holder} {ranks[0]}"
    if len(ranks) > _MAX_RANKS:
        return f"{len(ranks)} {holder}s: {ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    return f"{holder}s " + ", ".join(map(str, ranks))


def _wrapped(name: str) -> list[str]:
    """A name in lines that fit beside the drawings, cut at its dots."""
    lines = [""]
    for word in name.replace(".", ". ").split():
        if lines[-1] and len(lines[-1] + word) * _FONT_WIDTH * 1.1 > _NAME_WIDTH - 16:
            lines.append("")
        lines[-1] += word
    return lines


def _times(shape: Sequence[int]) -> str:
    return " \u00d7 ".join(map(str, shape))


# ---------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------


def page(title: str, sections: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A whole HTML file, which is XML too."""
    body = []
    for heading, pieces in sections:
        content = "\n".join(pieces)
        head = f"<h2>{html.escape(heading)}</h2>\n" if heading else ""
        body.append(f"<section>\n{head}{content}\n</section>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{html.escape(title)}</title>\n<style>{COLOURS}{_PAGE_STYLE}{DRAWING_STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n<h1>{html.escape(title)}</h1>\n" + "\n".join(body) + "\n</main>\n</body>\n"
        "</html>\n"
    )


def paragraph(text: str) -> str:
    """Plain words as HTML."""
    return f"<p>{html.escape(text)}</p>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain words in rows as HTML."""
    lines = [
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
        for tag, cells in (("th", head), *(("td", row) for row in rows))
    ]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    content = "\n".join(parts)
    # A narrow drawing is not blown up to the width of the page.
    size = f'style="min-width:0;max-width:{width:.0f}px" ' if width < _NARROW else ""
    return (
        f'<div class="wide"><svg class="drawing" {size}viewBox="0 0 {width:.0f} {height:.0f}" '
        f'role="img" aria-label="{html.escape(label)}" xmlns="http://www.w3.org/2000/svg">\n'
        f"{content}\n</svg></div>"
    )


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.2f}" y="{y:.2f}">{html.escape(text)}</text>'


FONTS = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif'

COLOURS = """
:root { color-scheme: light dark;
  --page: #ffffff; --ink: #1c2128; --soft: #5b6570; --grid: #e3e7ec; --edge: #3b434d;
  --r0: #9ccbff; --r1: #ffc078; --r2: #a3dfac; --r3: #dfb3f2;
  --r4: #f5e08a; --r5: #f4a9a3; --r6: #9fe0de; --r7: #cfd4da;
  --b: #b86a00; --kill: #c2261d; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14181d; --ink: #e8ecf1; --soft: #9aa5b1; --grid: #2b323a; --edge: #0c0f13;
  --r0: #22609f; --r1: #965012; --r2: #2a7241; --r3: #74408c;
  --r4: #726312; --r5: #93383a; --r6: #1a6f72; --r7: #535b64;
  --b: #f0a440; --kill: #ff7b72; } }
"""

_PAGE_STYLE = """
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 25px; margin: 0 0 8px; }
h2 { font-size: 18px; margin: 34px 0 6px; }
p { margin: 6px 0 10px; max-width: 78ch; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 10px 0; }
.key { display: inline-flex; align-items: center; gap: 7px; }
.wide { overflow-x: auto; }
.drawing { display: block; width: 100%; min-width: 700px; height: auto; }
table { border-collapse: collapse; margin: 12px 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--grid); }
th { color: var(--soft); font-weight: 600; }
"""

DRAWING_STYLE = """
text { font-size: 11px; fill: var(--ink); }
.head { font-size: 14px; font-weight: 600; }
.name { font-size: 12px; }
.soft, .tick { fill: var(--soft); }
.in, .middle { text-anchor: middle; }
.right { text-anchor: end; }
.halo { paint-order: stroke; stroke: var(--page); stroke-width: 4px; stroke-linejoin: round; }
.box { stroke: var(--edge); stroke-width: 1; }
.r0 { fill: var(--r0); } .r1 { fill: var(--r1); } .r2 { fill: var(--r2); } .r3 { fill: var(--r3); }
.r4 { fill: var(--r4); } .r5 { fill: var(--r5); } .r6 { fill: var(--r6); } .r7 { fill: var(--r7); }
.grid { stroke: var(--grid); }
.line { fill: none; stroke-width: 1.8; }
.line.b { stroke: var(--b); }
.mark { stroke: var(--soft); stroke-dasharray: 3 3; }
"""
