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


def rows_of(shape: tuple[int, ...], num_ranks: int) -> PlacedTensor:
    """A tensor cut along its first dim as torch.chunk does."""
    size = -(-shape[0] // num_ranks)
    boxes = []
    for rank in range(num_ranks):
        start, stop = min(rank * size, shape[0]), min((rank + 1) * size, shape[0])
        boxes.append((rank, Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))))
    return PlacedTensor(shape, tuple(boxes))


def drawn_boxes(drawing: str) -> dict[str, list[ET.Element]]:
    found = defaultdict(list)
    for box in ET.fromstring(drawing).iter("div"):
        if "data-tensor" in box.attrib:
            found[box.attrib["data-tensor"]].append(box)
    return found


def style(element: ET.Element) -> dict[str, str]:
    """The properties of an element; lengths are in pixels, without the unit."""
    properties = [each.split(": ") for each in element.attrib["style"].split("; ")]
    return {name: value.removesuffix("px") for name, value in properties}


def area(box: ET.Element) -> float:
    return float(style(box)["width"]) * float(style(box)["height"])


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
    drawing = picture.layout(columns)
    drawn = drawn_boxes(drawing)
    wholes = [one for one in ET.fromstring(drawing).iter("div") if one.get("class") == "tensor"]
    assert len(wholes) == len(shapes) * len(worlds)
    width = float(style(wholes[0])["width"])
    assert width * len(worlds) < 740
    for name, shape in shapes.items():
        expected = [
            f"{name} {box} on rank {rank}"
            for column in columns
            for rank, box in column.tensors[name].boxes
            if box.size
        ]
        assert [box.attrib["title"] for box in drawn[name]] == expected
        height = min(max(shape[0] * width / shape[-1], 48), 240) if len(shape) == 2 else 20
        whole = width * height
        total = sum(area(box) for box in drawn[name])
        assert total == pytest.approx(whole * len(columns), rel=0.02, abs=len(expected) * 3)


def test_boxes_of_a_tensor_lie_side_by_side() -> None:
    placed = PlacedTensor((4, 6), ((0, Box((0, 0), (4, 4))), (1, Box((0, 4), (4, 2)))))
    first, second = drawn_boxes(picture.layout([Column("t", "s", {"w": placed})]))["w"]
    one, other = style(first), style(second)
    assert float(one["left"]) + float(one["width"]) == float(other["left"])
    assert one["top"] == other["top"]
    assert area(first) == pytest.approx(2 * area(second))
    assert (one["background"], other["background"]) == ("var(--r0)", "var(--r1)")


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_a_tensor_without_elements_is_drawn(shape: tuple[int, ...]) -> None:
    placed = PlacedTensor(shape, ((0, Box.whole(shape)),))
    assert picture.times(shape) in picture.layout([Column("t", "s", {"w": placed})])


def test_replicas_are_one_striped_box() -> None:
    whole = Box.whole((8,))
    drawing = picture.layout(
        [Column("t", "s", {"n": PlacedTensor((8,), ((0, whole), (3, whole)))})]
    )
    (box,) = drawn_boxes(drawing)["n"]
    assert box.attrib["title"] == "n [0:8] on ranks 0, 3"
    stripes = "repeating-linear-gradient(45deg, var(--r0) 0px 9px, var(--r3) 9px 18px)"
    assert style(box)["background"] == stripes


def test_the_last_dims_of_a_tensor_lie_beside_each_other() -> None:
    column = Column("t", "s", {"w": rows_of((2, 3, 4), 2)})
    first, second = drawn_boxes(picture.layout([column]))["w"]
    assert (first.attrib["title"], area(first)) == ("w [0:1, 0:3, 0:4] on rank 0", area(second))


def test_the_page_is_xml_and_keeps_odd_characters() -> None:
    text = picture.page(
        "A & B",
        [
            ("first <one>", [picture.paragraph("x < y")]),
            ("", [picture.table(["h&"], [["c<"]])]),
        ],
    )
    root = ET.fromstring(text)
    assert [h.text for h in root.iter("h1")] == ["A & B"]
    assert [h.text for h in root.iter("h2")] == ["first <one>"]
    assert next(p.text for p in root.iter("p")) == "x < y"
    assert [td.text for td in root.iter("td")] == ["c<"]
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text
