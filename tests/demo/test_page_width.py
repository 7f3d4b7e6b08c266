"""The demo's page in a real browser: nothing of it is wider than a window of 800 pixels."""

from __future__ import annotations

from pathlib import Path

import pytest

from remesh.demo import picture
from remesh.demo.picture import Column
from remesh.demo.story import DRAWN, RUN_HEADINGS
from tests.browser import BROWSER, browse
from tests.demo.test_picture import rows_of

MEASURE = """<script>
const parts = [...document.querySelectorAll(".wide, body")];
const wide = parts.filter(e => e.scrollWidth > e.clientWidth);
const right = Math.max(...[...document.querySelectorAll(".box, th, td")].map(
  e => e.getBoundingClientRect().right));
document.title = [innerWidth, wide.length, right < innerWidth].join(" ");
</script>"""


def drawn_page() -> str:
    """A page of three layouts side by side and a run, as long as the demo's."""
    shapes = dict.fromkeys(DRAWN, (640, 256)) | {DRAWN[-1]: (256, 640)}
    columns = [
        Column(
            f"tensor parallel x {num_ranks}",
            f"run D: loaded by {num_ranks} ranks",
            {name: rows_of(shape, num_ranks) for name, shape in shapes.items()},
        )
        for num_ranks in (4, 2, 2)
    ]
    row = [
        "D resumed",
        "tensor parallel x 2",
        "21-40",
        "10, 20, 30",
        "3.0e-07",
        "117.5 s",
        "rank 2 killed in the middle of the save of step 30",
    ]
    sections = [
        [picture.layout(columns)],
        [picture.table(RUN_HEADINGS, [row])],
    ]
    return picture.page("Layouts", [("heading", pieces) for pieces in sections])


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_the_page_fits_800_pixels(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(drawn_page().replace("</body>", MEASURE + "</body>"))
    seen = browse(page.as_uri(), tmp_path, "--window-size=800,900", "--dump-dom")
    assert "<title>800 0 true</title>" in seen
