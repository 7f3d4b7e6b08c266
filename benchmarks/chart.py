"""A bar chart as SVG, in colours that can be read on light and on dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, LABEL, BAR, GAP, TOP = 780, 285, 13, 14, 58
COLORS = ("#2f6fde", "#e08a1e", "#8a63c9", "#5f9e54", "#3aa6b0", "#c65b7c")

_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f; }
  .title { font-size: 14px; font-weight: 600; }
  .number { font-size: 10.5px; }
  .limit { stroke: #24292f; stroke-dasharray: 4 3; }
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
    body, y = _legend(title, colors), TOP
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
        f'<line class="limit" x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{y - GAP + 4}"/>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">\n'
        f"<style>{_STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _legend(title: str, colors: Mapping[str, str]) -> list[str]:
    body = [f'<text class="title" x="10" y="20">{escape(title)}</text>']
    x = 10.0
    for name, color in colors.items():
        body.append(f'<rect x="{x:.0f}" y="31" width="11" height="11" rx="2" fill="{color}"/>')
        body.append(f'<text x="{x + 16:.0f}" y="41">{escape(name)}</text>')
        x += 36 + 6.6 * len(name)
    return body


def group_rows(rows: Sequence[Mapping[str, object]], value: str) -> dict[str, dict[str, float]]:
    """Rows of measurements as groups: task → contestant → value, the limit itself left out."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["contestant"] != "limit":
            number = row[value]
            assert isinstance(number, float)
            groups.setdefault(str(row["task"]), {})[str(row["contestant"])] = number
    return groups
