"""Charts as SVG, in colours that can be read on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, LABEL, BAR, GAP, TOP = 780, 285, 13, 14, 58
COLORS = ("#2f6fde", "#e08a1e", "#8a63c9", "#5f9e54", "#3aa6b0", "#c65b7c", "#8a8f98")

_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f; }
  .title { font-size: 14px; font-weight: 600; }
  .number { font-size: 10.5px; }
  .limit { stroke: #24292f; stroke-dasharray: 4 3; }
  .grid { stroke: #8c959f; stroke-opacity: 0.4; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .limit { stroke: #e6edf3; }
  }
"""


def bar_chart(
    title: str, groups: Mapping[str, Mapping[str, float]], *, limit: float, longest: float
) -> str:
    """Horizontal bars, a group for each task and a colour for each contestant.

    Args:
        title: What is shown, with its unit.
        groups: Task → contestant → value.
        limit: Where a dashed line is drawn.
        longest: The value of the longest bar that is drawn whole; longer ones are cut, and their
            number says how long they are.

    Returns:
        The text of the SVG file.
    """
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)}
    scale = (WIDTH - LABEL - 60) / longest
    body, top = _legend(title, colors)
    y = top
    for task, group in groups.items():
        middle = y + len(group) * BAR / 2 + 4
        body.append(
            f'<text x="{LABEL - 10}" y="{middle:.0f}" text-anchor="end">{escape(task)}</text>'
        )
        for name, value in group.items():
            length = min(value, longest) * scale
            body.append(
                f'<rect x="{LABEL}" y="{y + 1}" width="{length:.1f}" height="{BAR - 2}" rx="2" '
                f'fill="{colors[name]}"><title>{escape(name)}: {value:.2f}</title></rect>'
            )
            more = " →" if value > longest else ""
            body.append(
                f'<text class="number" x="{LABEL + length + 5:.1f}" y="{y + BAR - 3}">'
                f"{value:.2f}{more}</text>"
            )
            y += BAR
        y += GAP
    x = LABEL + limit * scale
    body.append(
        f'<line class="limit" x1="{x:.1f}" y1="{top - 4}" x2="{x:.1f}" y2="{y - GAP + 4}"/>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">\n'
        f"<style>{_STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def line_chart(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_title: str,
    bottom: float,
    top: float = 1.0,
) -> str:
    """Lines over a logarithmic axis; the values are percentages.

    Args:
        title: What is shown.
        lines: Points (x, value) of each line, x ascending and positive, values from 0 to 1.
        x_title: What x is.
        bottom: The value of the lower edge.
        top: The value of the upper edge.

    Returns:
        The text of the SVG file.
    """
    colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(lines)}
    body, upper = _legend(title, colors)
    left, right, lower = 56, WIDTH - 16, upper + 280
    numbers = sorted({x for points in lines.values() for x, _ in points})
    first, last = math.log(numbers[0]), math.log(numbers[-1])

    def place(x: float, value: float) -> tuple[float, float]:
        across = (math.log(x) - first) / (last - first)
        down = (top - max(value, bottom)) / (top - bottom)
        return left + across * (right - left), upper + down * (lower - upper)

    for tick in range(6):
        value = bottom + (top - bottom) * tick / 5
        y = place(numbers[0], value)[1]
        body.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        body.append(
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value * 100:.4g} %</text>'
        )
    for x in numbers:
        across = place(x, bottom)[0]
        body.append(
            f'<text class="number" x="{across:.1f}" y="{lower + 16}" text-anchor="middle">'
            f"{x:g}</text>"
        )
    middle = (left + right) / 2
    body.append(
        f'<text x="{middle:.0f}" y="{lower + 36}" text-anchor="middle">{escape(x_title)}</text>'
    )
    for name, points in lines.items():
        path = " ".join("{:.1f},{:.1f}".format(*place(x, value)) for x, value in points)
        body.append(
            f'<polyline points="{path}" fill="none" stroke="{colors[name]}" stroke-width="2">'
            f"<title>{escape(name)}</title></polyline>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {lower + 48}" role="img">\n'
        f"<style>{_STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _legend(title: str, colors: Mapping[str, str]) -> tuple[list[str], int]:
    """The title, the names with their colours, and where the chart begins below them."""
    body = [f'<text class="title" x="10" y="20">{escape(title)}</text>']
    x, y = 10.0, 31
    for name, color in colors.items():
        width = 36 + 7.4 * len(name)
        if x > 10 and x + width > WIDTH:
            x, y = 10.0, y + 18
        body.append(f'<rect x="{x:.0f}" y="{y}" width="11" height="11" rx="2" fill="{color}"/>')
        body.append(f'<text x="{x + 16:.0f}" y="{y + 10}">{escape(name)}</text>')
        x += width
    return body, y + TOP - 31


def group_rows(rows: Sequence[Mapping[str, object]], value: str) -> dict[str, dict[str, float]]:
    """Rows of measurements as groups: task → contestant → value, the limit itself left out."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["contestant"] != "limit":
            number = row[value]
            assert isinstance(number, float)
            groups.setdefault(str(row["task"]), {})[str(row["contestant"])] = number
    return groups
