"""The page that shows the layouts and the losses: HTML with drawings in SVG, in one file.

Every drawing is a pure function from plain data to text. A tensor is drawn as a rectangle, its
first dim downwards and its last dim to the right (a vector lies along the right), cut into the
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

_PLOT_LEFT, _PLOT_RIGHT, _PLOT_TOP, _PLOT_HEIGHT = 52, _WIDTH - 6, 34, 220
_NOTE_FONT_WIDTH = 7.2
_LINE_STYLES = ("a", "b")


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


@dataclass(frozen=True, slots=True)
class Curve:
    """The losses of one run by step, and the name of its style (`a` to `d`)."""

    label: str
    style: str
    losses: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at a step, with words beside it; `style` is `kill`, `resume` or `save`."""

    step: int
    text: str
    style: str


# ---------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------


def layout_svg(columns: Sequence[Column]) -> str:
    """Vectors and matrices of the first column, as they lie in each of the columns.

    Each has a scale of its own, so that all are as wide and none is too high or low to be read.
    """
    shapes = {name: placed.shape for name, placed in columns[0].tensors.items()}
    for name, shape in shapes.items():
        if len(shape) not in (1, 2):
            raise ValueError(f"{name}: only vectors and matrices can be drawn, not shape {shape}")
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
    for box, ranks in _holders(placed).items():
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
# Losses
# ---------------------------------------------------------------------------------------------


def loss_svg(curves: Sequence[Curve], marks: Sequence[Mark]) -> str:
    """Loss by step, with marks: runs in the styles a and b as lines, others as dots."""
    last = max(step for curve in curves for step in curve.losses)
    values = [loss for curve in curves for loss in curve.losses.values()]
    low, high = math.floor(min(values) * 2) / 2, math.ceil(max(values) * 2) / 2

    def y_of(loss: float) -> float:
        return _PLOT_TOP + _PLOT_HEIGHT * (high - loss) / (high - low)

    num_ticks = round((high - low) * 2)
    ticks = [(low + tick / 2, f"{low + tick / 2:.1f}") for tick in range(num_ticks + 1)]
    parts = _frame(last, [(y_of(value), text) for value, text in ticks], "loss")
    rows: list[float] = []
    for mark in sorted(marks, key=lambda mark: mark.step):
        parts.extend(_mark(mark, last, rows))
    for curve in curves:
        points = [(_x_of(step, last), y_of(loss)) for step, loss in sorted(curve.losses.items())]
        if curve.style in _LINE_STYLES:
            path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
            parts.append(f'<polyline class="line {curve.style}" points="{path}"/>')
        else:
            parts.extend(_dot(curve.style, x, y) for x, y in points)
    return _svg(_PLOT_RIGHT + 6, _PLOT_TOP + _PLOT_HEIGHT + 36, "Loss by step", parts)


def curve_legend(curves: Sequence[Curve]) -> str:
    """A line of HTML that names the curves."""
    keys = []
    for curve in curves:
        sample = (
            f'<polyline class="line {curve.style}" points="0,7 28,7"/>'
            if curve.style in _LINE_STYLES
            else _dot(curve.style, 14, 7)
        )
        keys.append(
            f'<span class="key"><svg class="swatch" width="28" height="14" aria-hidden="true">'
            f"{sample}</svg> {html.escape(curve.label)}</span>"
        )
    return f'<p class="legend">{" ".join(keys)}</p>'


def _x_of(step: float, last: int) -> float:
    return _PLOT_LEFT + (_PLOT_RIGHT - _PLOT_LEFT) * step / last


def _frame(last: int, ticks: Sequence[tuple[float, str]], what: str) -> list[str]:
    bottom = _PLOT_TOP + _PLOT_HEIGHT
    parts = [_text(0, 14, what, "soft")]
    for y, text in ticks:
        parts.append(
            f'<line class="grid" x1="{_PLOT_LEFT}" x2="{_PLOT_RIGHT}" y1="{y:.2f}" y2="{y:.2f}"/>'
        )
        parts.append(_text(_PLOT_LEFT - 8, y + 4, text, "tick right"))
    step_of_ticks = max(1, last // 8)
    parts.extend(
        _text(_x_of(step, last), bottom + 17, str(step), "tick middle")
        for step in range(0, last + 1, step_of_ticks)
    )
    parts.append(_text(_PLOT_RIGHT, bottom + 32, "steps done", "soft right"))
    return parts


def _mark(mark: Mark, last: int, rows: list[float]) -> list[str]:
    """A line with its words, in the first row of words that has room."""
    x = _x_of(mark.step, last)
    width = len(mark.text) * _NOTE_FONT_WIDTH + 10
    left = min(x, _PLOT_RIGHT - width)
    row = next((number for number, end in enumerate(rows) if end <= left), len(rows))
    rows[row : row + 1] = [left + width]
    bottom = _PLOT_TOP + _PLOT_HEIGHT
    line = (
        f'<line class="mark {mark.style}" x1="{x:.2f}" x2="{x:.2f}" y1="{_PLOT_TOP - 8}" '
        f'y2="{bottom}"/>'
    )
    return [
        line,
        _text(left + 5, _PLOT_TOP + 4 + row * _LINE_HEIGHT, mark.text, f"note {mark.style} halo"),
    ]


def _dot(style: str, x: float, y: float) -> str:
    """A circle, an open circle, a cross or a diamond: styles differ by more than colour."""
    if style == "c":
        return f'<circle class="dot c" cx="{x:.2f}" cy="{y:.2f}" r="4"/>'
    if style == "e":
        return f'<path class="dot e" d="M{x:.2f} {y - 3:.2f}l3 3l-3 3l-3 -3z"/>'
    if style == "d":
        return f'<path class="dot d" d="M{x - 3.5:.2f} {y - 3.5:.2f}l7 7m0 -7l-7 7"/>'
    return f'<circle class="dot {style}" cx="{x:.2f}" cy="{y:.2f}" r="2.2"/>'


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
  --a: #a9b2bd; --b: #b86a00; --c: #0b62c4; --d: #b3167f; --e: #2a8a3e; --kill: #c2261d; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14181d; --ink: #e8ecf1; --soft: #9aa5b1; --grid: #2b323a; --edge: #0c0f13;
  --r0: #22609f; --r1: #965012; --r2: #2a7241; --r3: #74408c;
  --r4: #726312; --r5: #93383a; --r6: #1a6f72; --r7: #535b64;
  --a: #77828e; --b: #f0a440; --c: #62aeff; --d: #ff7cc8; --e: #6fd487; --kill: #ff7b72; } }
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
.line.a { stroke: var(--a); stroke-width: 7; stroke-linejoin: round; }
.line.b { stroke: var(--b); }
.dot.b { fill: var(--b); }
.dot.c { fill: none; stroke: var(--c); stroke-width: 1.6; }
.dot.d { fill: none; stroke: var(--d); stroke-width: 1.6; }
.dot.e { fill: none; stroke: var(--e); stroke-width: 1.6; }
.mark { stroke: var(--soft); stroke-dasharray: 3 3; }
.mark.kill { stroke: var(--kill); stroke-width: 1.4; }
.note { fill: var(--soft); font-size: 12px; }
.note.kill { fill: var(--kill); }
"""
