"""Pages that show layouts: HTML in one file, which is XML too.

Every piece is a pure function from plain data to text. A tensor is drawn as a rectangle, its
first dim downwards and all others to the right (a vector lies along the right), cut into the
boxes that the ranks hold and coloured by rank. A box that several ranks hold alike is drawn once,
striped in their colours.

Colours are CSS variables with a light and a dark set, so the page follows the reader's setting.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remesh.core.geometry import Box

NUM_COLOURS = 8

_WIDTH = 740
"""Width of a drawing: what a window of 800 pixels shows."""
_NAME_WIDTH, _COLUMN_GAP = 150, 24
_MAX_WIDTH = 240
_VECTOR_HEIGHT = 20
_MIN_HEIGHT, _MAX_HEIGHT = 48, 240
_LINE_HEIGHT = 14
_LABEL_WIDTH = 40
"""Width of a box into which the name of a rank fits; the shape of the box needs as much again."""
_MAX_RANKS = 12
"""Ranks that are listed as the holders of a box."""


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


def layout(columns: Sequence[Column]) -> str:
    """The tensors of the first column, as they lie in each of the columns.

    Each has a scale of its own, so that all are as wide and none is too high or low to be read.
    """
    width = min((_WIDTH - _NAME_WIDTH) // len(columns) - _COLUMN_GAP, _MAX_WIDTH)
    heads = [_two_lines(column.title, column.subtitle) for column in columns]
    rows = [f"<tr><th></th>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for name, placed in columns[0].tensors.items():
        # A long name is broken after its dots.
        label = _two_lines(name, times(placed.shape)).replace(".", ".<wbr/>")
        drawn = [_tensor(name, column.tensors[name], column.holder, width) for column in columns]
        rows.append(f"<tr><th>{label}</th>{''.join(f'<td>{one}</td>' for one in drawn)}</tr>")
    return '<div class="wide"><table class="layout">\n' + "\n".join(rows) + "\n</table></div>"


def times(shape: Sequence[int]) -> str:
    """A shape as people write it."""
    return " \u00d7 ".join(map(str, shape)) or "scalar"


def _two_lines(first: str, second: str) -> str:
    return f"{html.escape(first)}<br/><small>{html.escape(second)}</small>"


def _tensor(name: str, placed: PlacedTensor, holder: str, width: int) -> str:
    holders: dict[Box, list[int]] = {}
    for rank, box in placed.boxes:
        if box.size:
            holders.setdefault(box, []).append(rank)
    _, lengths = _flat(placed.shape, Box.whole(placed.shape))
    num_rows, num_columns = max(lengths[0], 1), max(lengths[1], 1)
    height = min(max(num_rows * width / num_columns, _MIN_HEIGHT), _MAX_HEIGHT)
    if len(placed.shape) < 2:
        height = _VECTOR_HEIGHT
    boxes = []
    for box, ranks in holders.items():
        (row, column), (rows, columns) = _flat(placed.shape, box)
        own_width, own_height = width * columns / num_columns, height * rows / num_rows
        place = (
            f"left: {width * column / num_columns:.2f}px; top: {height * row / num_rows:.2f}px; "
            f"width: {own_width:.2f}px; height: {own_height:.2f}px; background: {_fill(ranks)}"
        )
        who, label = _who(ranks, holder), ""
        # The tooltip has what does not fit in.
        if own_width >= _LABEL_WIDTH:
            gap = "<br/>" if own_height > 2 * _LINE_HEIGHT else ": "
            size = gap + times(box.shape) if own_width >= 2 * _LABEL_WIDTH else ""
            label = f"<span>{who}{size}</span>"
        style = "box" if len(ranks) == 1 else "box shared"
        title = html.escape(f"{name} {box} on {who}")
        boxes.append(
            f'<div class="{style}" data-tensor="{html.escape(name)}" title="{title}" '
            f'style="{place}">{label}</div>'
        )
    size = f"width: {width}px; height: {height:.2f}px"
    return f'<div class="tensor" style="{size}">{"".join(boxes)}</div>'


def _flat(shape: tuple[int, ...], box: Box) -> tuple[tuple[int, int], tuple[int, int]]:
    """Offset and shape of a box in two dims: the first, and all others together.

    A box that is cut further in is drawn as its hull.
    """
    missing = max(2 - len(shape), 0)
    offset, lengths = (0,) * missing + box.offset, (1,) * missing + box.shape
    start = last = 0
    for extent, at, length in zip(shape[1 - missing :], offset[1:], lengths[1:], strict=True):
        start, last = start * extent + at, last * extent + at + length - 1
    return (offset[0], start), (lengths[0], last + 1 - start)


def _fill(ranks: Sequence[int]) -> str:
    """The colour of a rank, or stripes in the colours of several."""
    colours = [f"var(--r{rank % NUM_COLOURS})" for rank in ranks[:NUM_COLOURS]]
    if len(colours) == 1:
        return colours[0]
    bars = [f"{colour} {9 * n}px {9 * n + 9}px" for n, colour in enumerate(colours)]
    return f"repeating-linear-gradient(45deg, {', '.join(bars)})"


def _who(ranks: Sequence[int], holder: str) -> str:
    if len(ranks) == 1:
        return f"{holder} {ranks[0]}"
    if len(ranks) > _MAX_RANKS:
        return f"{len(ranks)} {holder}s: {ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    return f"{holder}s " + ", ".join(map(str, ranks))


# ---------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------


def page(title: str, sections: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A whole HTML file."""
    body = []
    for heading, pieces in sections:
        head = [f"<h2>{html.escape(heading)}</h2>"] if heading else []
        body.append("\n".join(["<section>", *head, *pieces, "</section>"]))
    content = "\n".join(body)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{html.escape(title)}</title>\n<style>{COLOURS}{_STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n<h1>{html.escape(title)}</h1>\n{content}\n</main>\n</body>\n</html>\n"
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

_STYLE = f"""
body {{ margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 {FONTS}; }}
main {{ max-width: 1000px; margin: 0 auto; padding: 28px 20px 48px; }}
h1 {{ font-size: 25px; margin: 0 0 8px; }}
h2 {{ font-size: 18px; margin: 34px 0 6px; }}
p {{ margin: 6px 0 10px; max-width: 78ch; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: 12px 0; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--grid); }}
th {{ color: var(--soft); font-weight: 600; }}
.layout th, .layout td {{ border: 0; padding: 0 {_COLUMN_GAP}px 20px 0; vertical-align: top; }}
.layout th {{ color: var(--ink); font-size: 12px; line-height: 1.3; }}
small {{ color: var(--soft); font-weight: 400; }}
.tensor {{ position: relative; }}
.box {{ position: absolute; box-sizing: border-box; border: 1px solid var(--edge);
  display: flex; align-items: center; justify-content: center; overflow: hidden;
  font-size: 11px; line-height: {_LINE_HEIGHT}px; text-align: center; white-space: nowrap; }}
.shared span {{ background: var(--page); padding: 0 3px; border-radius: 3px; }}
"""
