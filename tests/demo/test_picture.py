"""The drawings show every box, where it is and as large as it is."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.core.geometry import Box
from remesh.demo import picture
from remesh.demo.picture import Column, PlacedTensor

SVG = "{http://www.w3.org/2000/svg}"


def rows_of(shape: tuple[int, ...], num_ranks: int) -> PlacedTensor:
    """A tensor cut along its first dim as torch.chunk does."""
    size = -(-shape[0] // num_ranks)
    boxes = []
    for rank in range(num_ranks):
        start, stop = min(rank * size, shape[0]), min((rank + 1) * size, shape[0])
        boxes.append((rank, Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))))
    return PlacedTensor(shape, tuple(boxes))


def drawn_boxes(svg: str) -> dict[str, list[ET.Element]]:
    found = defaultdict(list)
    for rect in ET.fromstring(svg).iter(f"{SVG}rect"):
        if "data-tensor" in rect.attrib:
            found[rect.attrib["data-tensor"]].append(rect)
    return found


def area(rect: ET.Element) -> float:
    return float(rect.attrib["width"]) * float(rect.attrib["height"])


def tooltip(rect: ET.Element) -> str:
    title = rect.find(f"{SVG}title")
    assert title is not None
    assert title.text is not None
    return title.text


@given(
    st.dictionaries(
        st.sampled_from(["a.weight", "b<&>", "c"]),
        st.one_of(st.tuples(st.integers(1, 90)), st.tuples(st.integers(1, 90), st.integers(1, 90))),
        min_size=1,
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_every_box_is_drawn_and_areas_add_up(
    shapes: dict[str, tuple[int, ...]], worlds: list[int]
) -> None:
    columns = [
        Column(f"{n} ranks", "", {name: rows_of(shape, n) for name, shape in shapes.items()})
        for n in worlds
    ]
    drawn = drawn_boxes(picture.layout_svg(columns))
    width = picture.tensor_width_of(len(worlds))
    for name, shape in shapes.items():
        expected = [
            f"{name} {box} on rank {rank}"
            for column in columns
            for rank, box in column.tensors[name].boxes
            if box.size
        ]
        assert [tooltip(rect) for rect in drawn[name]] == expected
        height = min(max(shape[0] * width / shape[-1], 48), 240) if len(shape) == 2 else 20
        whole = width * height
        total = sum(area(rect) for rect in drawn[name])
        assert total == pytest.approx(whole * len(columns), rel=0.02, abs=len(expected) * 3)


def test_boxes_of_a_tensor_lie_side_by_side() -> None:
    placed = PlacedTensor((4, 6), ((0, Box((0, 0), (4, 4))), (1, Box((0, 4), (4, 2)))))
    first, second = drawn_boxes(picture.layout_svg([Column("t", "s", {"w": placed})]))["w"]
    assert float(first.attrib["x"]) + float(first.attrib["width"]) == float(second.attrib["x"])
    assert first.attrib["y"] == second.attrib["y"]
    assert area(first) == pytest.approx(2 * area(second))
    assert "r0" in first.attrib["class"].split()
    assert "r1" in second.attrib["class"].split()


def test_replicas_are_one_striped_box() -> None:
    whole = Box.whole((8,))
    svg = picture.layout_svg(
        [Column("t", "s", {"n": PlacedTensor((8,), ((0, whole), (3, whole)))})]
    )
    (rect,) = drawn_boxes(svg)["n"]
    assert tooltip(rect) == "n [0:8] on ranks 0, 3"
    assert rect.attrib["fill"] == "url(#ranks-0-3)"
    (pattern,) = ET.fromstring(svg).iter(f"{SVG}pattern")
    assert pattern.attrib["id"] == "ranks-0-3"
    assert [bar.attrib["class"] for bar in pattern] == ["r0", "r3"]


def test_the_last_dims_of_a_tensor_lie_beside_each_other() -> None:
    column = Column("t", "s", {"w": rows_of((2, 3, 4), 2)})
    first, second = drawn_boxes(picture.layout_svg([column]))["w"]
    assert (tooltip(first), area(first)) == ("w [0:1, 0:12] on rank 0", area(second))


def test_the_page_is_xml_and_keeps_odd_characters() -> None:
    text = picture.page(
        "A & B",
        [
            ("first <one>", [picture.paragraph("x < y"), picture.rank_legend(2)]),
            ("", [picture.table(["h&"], [["c<"]])]),
        ],
    )
    root = ET.fromstring(text)
    assert [h.text for h in root.iter("h1")] == ["A & B"]
    assert [h.text for h in root.iter("h2")] == ["first <one>"]
    assert next(p.text for p in root.iter("p")) == "x < y"
    assert [td.text for td in root.iter("td")] == ["c<"]
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
