# ruff: noqa: INP001 - a script, not a package
"""Draw the pictures of the pages from real runs: `python docs/update_pictures.py [DIRECTORY]`.

* `layout.svg`: a checkpoint that 4 ranks have saved, and who holds what of it in two other layouts.
* `save.svg`: the moments of a background save of 2 ranks, from its `Timeline`.
* `byte.svg`: one element of a tensor, from the rank that saves it over the file to the rank that
  loads it.
* `node.svg`: the states of a node: what the state machine of the master does with a few nodes
  that join, fail, are drained, are tested and end.

They take some seconds. Times differ from run to run; all else is the same, which a test compares.
"""

from __future__ import annotations

import html
import math
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

import remesh
from remesh.core.geometry import Box
from remesh.core.index import Piece
from remesh.demo import picture
from remesh.elastic.failures import ProcessFailure
from remesh.elastic.job import Event, JobState, NodeLost, Policy, Tick, apply, content_of
from remesh.elastic.liveness import Liveness
from remesh.elastic.nodes import Outcome, Settings
from remesh.elastic.protocol import (
    Drain,
    Join,
    Leave,
    NodeTest,
    ReportFailures,
    ReportTest,
    Sender,
    TestResult,
)
from remesh.elastic.status import status_of
from remesh.events import Timeline
from remesh.exchange import ThreadExchange

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support import run_ranks

PICTURES = Path(__file__).parent / "pictures"


# ---------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------


def layout_picture(directory: Path) -> str:
    """Weights of a model as 4 ranks have saved them, and in two other layouts."""
    shapes = {
        "attention_norm.weight": (256,),
        "attention.q_proj.weight": (256, 256),
        "attention.o_proj.weight": (256, 256),
        "mlp.up_proj.weight": (640, 256),
        "mlp.down_proj.weight": (256, 640),
    }

    def save(exchange: ThreadExchange) -> None:
        state = {}
        for name, shape in shapes.items():
            rows = np.ones((shape[0] // exchange.world_size, *shape[1:]), np.float32)
            at = (0, exchange.rank, exchange.world_size)
            state[name] = remesh.ShardedTensor.from_rank_offsets(name, rows, at)
        remesh.save(state, directory / "layout", group=exchange)

    run_ranks(4, save)
    index = remesh.Checkpoint(directory / "layout").index
    columns = []
    by_rows = dict.fromkeys(shapes, 0)
    cut_by_inputs = ("attention.o_proj.weight", "mlp.down_proj.weight")
    by_layers = {name: int(name in cut_by_inputs) for name, shape in shapes.items() if shape[1:]}
    for title, dims in (("FSDP2, 2 ranks", by_rows), ("tensor parallel, 2 ranks", by_layers)):
        held = {name: _halves(shape, dims.get(name)) for name, shape in shapes.items()}
        columns.append(picture.Column(title, "loaded", _tensors(shapes, held)))
    numbers = {file.path: number for number, file in enumerate(index.files)}
    stored = {
        name: [(numbers[piece.path], piece.box) for piece in index.pieces(name)] for name in shapes
    }
    saved = picture.Column("FSDP2, 4 ranks", "saved: a file each", _tensors(shapes, stored))
    bars = [f'<rect class="r{rank}" x="{9 * rank}" width="9" height="20"/>' for rank in range(2)]
    parts = [f'<pattern id="both" {STRIPED}>{"".join(bars)}</pattern>']
    lefts = [160 + number * (TENSOR_WIDTH + 24) for number in range(3)]
    for left, column in zip(lefts, [saved, *columns], strict=True):
        parts += [_text(left, 18, column.title, "head"), _text(left, 34, column.subtitle, "soft")]
    top = 46.0
    for name, shape in shapes.items():
        first, _, last = name.rpartition(".")
        label = ((f"{first}.", "name"), (last, "name"), (picture.times(shape), "soft"))
        parts += [_text(0, top + 11 + 14 * n, *line) for n, line in enumerate(label)]
        height = 20.0 if len(shape) < 2 else shape[0] * min(TENSOR_WIDTH / shape[1], 240 / shape[0])
        for left, column in zip(lefts, [saved, *columns], strict=True):
            parts += _placed(column.tensors[name], column.holder, left, top, height)
        top += max(height, 42) + 26
    return _file(top - 24, "How the tensors lie on the ranks", parts)


def _halves(shape: tuple[int, ...], dim: int | None) -> list[tuple[int, Box]]:
    """The boxes of two ranks that cut a tensor along a dim, or have all of it."""
    if dim is None:
        return [(rank, Box.whole(shape)) for rank in range(2)]
    half = tuple(size // (1 + (number == dim)) for number, size in enumerate(shape))
    second = tuple(half[dim] * (number == dim) for number in range(len(shape)))
    return [(0, Box((0,) * len(shape), half)), (1, Box(second, half))]


def _tensors(
    shapes: Mapping[str, tuple[int, ...]], held: Mapping[str, Sequence[tuple[int, Box]]]
) -> dict[str, picture.PlacedTensor]:
    return {name: picture.PlacedTensor(shapes[name], tuple(boxes)) for name, boxes in held.items()}


TENSOR_WIDTH = 177.0
STRIPED = 'width="18" height="20" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"'


def _placed(
    placed: picture.PlacedTensor, holder: str, left: float, top: float, height: float
) -> Iterator[str]:
    """The boxes of a tensor; one that two ranks hold is striped in their colours."""
    holders: dict[Box, list[int]] = {}
    for rank, box in placed.boxes:
        holders.setdefault(box, []).append(rank)
    across, down = TENSOR_WIDTH / placed.shape[-1], height / placed.shape[0]
    for box, ranks in holders.items():
        y, high = (box.offset[0] * down, box.shape[0] * down) if box.ndim > 1 else (0, height)
        x, wide = left + box.offset[-1] * across, box.shape[-1] * across
        style = "both" if len(ranks) > 1 else f"r{ranks[0]}"
        yield _cell(x, top + y, wide, high, style)
        who = f"{holder}{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        yield _text(x + wide / 2, top + y + high / 2 + 4, who, "in halo")


# ---------------------------------------------------------------------------------------------
# The timeline of a save
# ---------------------------------------------------------------------------------------------

PHASES = {
    "plan": ("r3", "describe and plan"),
    "copy": ("r1", "copy into host memory: training waits"),
    "write": ("r0", "write and digest, a chunk of 2 MiB each mark"),
    "commit": ("r2", "index and commit record"),
}
"""Phase → its colour and its name."""


def save_picture(directory: Path) -> str:
    """Phases of a background save on 2 ranks."""
    timeline = Timeline()

    def save(exchange: ThreadExchange) -> None:
        rows = np.ones((8, 1 << 20), np.float32)
        at = (0, exchange.rank, exchange.world_size)
        weight = remesh.ShardedTensor.from_rank_offsets("weight", rows, at)
        with remesh.Saver({"weight": weight}, group=exchange, on_event=timeline) as saver:
            saver.save_async({"weight": weight}, directory / "save").result()

    run_ranks(2, save)
    moments = timeline.moments
    began, ended = moments[0].seconds, moments[-1].seconds
    left, right, row = 150.0, 726.0, 26

    def x(seconds: float) -> float:
        return left + (right - left) * (seconds - began) / (ended - began)

    def lane(y: float, name: str, style: str, start: float, stop: float) -> list[str]:
        bar = (
            f'<rect class="box {style}" x="{x(start):.1f}" y="{y}" '
            f'width="{max(x(stop) - x(start), 1.5):.1f}" height="{row - 10}"/>'
        )
        return [_text(0, y + 12, name), bar]

    parts = [*_legend(PHASES.values())]
    top = 16.0 + 20 * len(PHASES)
    for rank in range(2):
        at: dict[str, float] = {}
        chunks = []
        for moment in moments:
            if moment.event.rank == rank:
                at.setdefault(moment.event.point, moment.seconds)
                if moment.event.point == "save.chunk_written":
                    chunks.append(moment.seconds)
        # Rank 0 makes the plan; the others wait for it until their first chunk is copied.
        planned = at["save.planned"] if rank == 0 else at["save.file_created"]
        parts.append(_text(0, top + 12, f"rank {rank}", "head"))
        top += row
        parts += lane(top, "  its trainer", "r3", began, planned)
        parts += lane(top, "  its trainer", "r1", planned, at["save.staged"])[1:]
        parts.append(_text(x(at["save.staged"]) + 8, top + 12, "trains again", "soft"))
        top += row
        parts += lane(top, "  background", "r0", at["save.file_created"], at["save.file_finished"])
        for second in chunks:
            line = f'x1="{x(second):.1f}" x2="{x(second):.1f}" y1="{top + 2}" y2="{top + row - 12}"'
            parts.append(f'<line class="mark" {line}/>')
        if rank == 0:
            parts += lane(top, "", "r2", at["save.parts_gathered"], at["save.committed"])[1:]
        top += row + 6
    for tick in range(5):
        seconds = began + (ended - began) * tick / 4
        parts.append(
            f'<line class="grid" x1="{x(seconds):.1f}" x2="{x(seconds):.1f}" y1="{top}" '
            f'y2="{top + 6}"/>'
        )
        label = f"{(seconds - began) * 1000:.0f} ms"
        parts.append(_text(x(seconds), top + 20, label, "tick right" if tick == 4 else "tick"))
    return _file(top + 26, "The phases of a background save on two ranks", parts)


# ---------------------------------------------------------------------------------------------
# The path of a byte
# ---------------------------------------------------------------------------------------------

SHAPE, ELEMENT = (8, 6), (5, 4)
"""A tensor, and the element that is followed."""


def byte_picture(directory: Path) -> str:
    """One element: saved in rows by 4 ranks, stored in a file, loaded in columns by 2 ranks."""
    path = directory / "byte"
    values = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)

    def save(exchange: ThreadExchange) -> None:
        rows = values[2 * exchange.rank :][:2]
        at = (0, exchange.rank, exchange.world_size)
        weight = remesh.ShardedTensor.from_rank_offsets("weight", rows, at)
        remesh.save({"weight": weight}, path, group=exchange)

    def load(exchange: ThreadExchange) -> np.ndarray:
        columns = np.zeros((SHAPE[0], SHAPE[1] // 2), np.float32)
        at = (1, exchange.rank, exchange.world_size)
        weight = remesh.ShardedTensor.from_rank_offsets("weight", columns, at)
        remesh.load({"weight": weight}, path, group=exchange)
        return columns

    run_ranks(4, save)
    loaded = run_ranks(2, load)
    index = remesh.Checkpoint(path).index
    row, column = ELEMENT
    [(writer, piece)] = [
        (rank, piece)
        for rank, piece in enumerate(index.pieces("weight"))
        if piece.box.offset[0] <= row < piece.box.offset[0] + piece.box.shape[0]
    ]
    within = ((row - piece.box.offset[0]) * SHAPE[1] + column) * values.itemsize
    first = piece.position + within
    stored = (path / piece.path).read_bytes()
    reader, place = divmod(column, SHAPE[1] // 2)
    assert (
        stored[first : first + 4]
        == values[ELEMENT].tobytes()
        == loaded[reader][row, place].tobytes()
    )
    return _file(
        268,
        "The path of one element from the rank that saves it to the rank that loads it",
        [
            *_matrix(0, "1. saved in rows", 4, 1, f"weight[{row}, {column}] is on rank {writer}"),
            *_stretch(stored, piece, first, index.block_size),
            *_matrix(578, "3. loaded in columns", 1, 2, f"and now on rank {reader}"),
        ],
    )


def _matrix(left: float, title: str, num_rows: int, num_columns: int, text: str) -> list[str]:
    """A tensor as ranks hold it, with the element marked."""
    cell = 24
    parts = [_text(left, 14, title, "head"), _text(left, 242, text, "soft")]
    for row in range(SHAPE[0]):
        for column in range(SHAPE[1]):
            rank = row * num_rows // SHAPE[0] + column * num_columns // SHAPE[1]
            style = "kill" if (row, column) == ELEMENT else f"r{rank}"
            parts.append(_cell(left + column * cell, 26 + row * cell, cell, cell, style))
    return parts


def _stretch(stored: bytes, piece: Piece, first: int, block_size: int) -> list[str]:
    """A file as a column of its parts, with the element marked."""
    left, width = 236, 266
    parts = [_text(left, 14, f"2. bytes {first} to {first + 4} of a file", "head")]
    header, end = piece.position, piece.position + piece.num_bytes
    parts.append(_cell(left, 26, width, 48, "r7"))
    parts.append(_text(left + width / 2, 54, f"header, bytes 0 to {header}", "in"))
    parts.append(_cell(left, 74, width, 144, "r2"))
    parts.append(_text(left + width / 2, 104, f"piece {piece.box}, bytes {header} to {end}", "in"))
    at = 74 + 144 * (first - header) / piece.num_bytes
    parts.append(_cell(left, at, width, 144 * 4 / piece.num_bytes, "kill"))
    name = f"data-.../{Path(piece.path).name}, {len(stored)} bytes"
    digest = f"in block {first // block_size}, whose digest every load checks"
    parts += [_text(left, 242, name, "soft"), _text(left, 260, digest, "soft")]
    for x in (156, 514):
        parts.append(f'<path class="line b" d="M{x} 158 h64 m-8 -5 l8 5 l-8 5"/>')
    return parts


def _cell(x: float, y: float, width: float, height: float, style: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    fills = {"kill": 'fill="var(--kill)"', "both": 'fill="url(#both)"', "": 'fill="none"'}
    fill = fills.get(style, "")
    return f'<rect class="box {style}" {fill} {place}/>'


# ---------------------------------------------------------------------------------------------
# The states of a node
# ---------------------------------------------------------------------------------------------

WIDE, HIGH = 124, 44

PLACES = {
    "": (62, 52),
    "ready": (262, 52),
    "active": (478, 52),
    "finished": (678, 52),
    "draining": (678, 200),
    "gone": (478, 200),
    "excluded": (262, 200),
}
"""State → where it is drawn; the empty one is that of a node which has not joined."""

MEANINGS = {
    "": "not of the job",
    "ready": "waits for a world",
    "active": "trains",
    "finished": "has succeeded",
    "draining": "saves, then leaves",
    "gone": "lost, or has left",
    "excluded": "is not used",
}
JOINED = "its agent joins"


class Nodes:
    """A job whose nodes do what they are told to, and the changes of their states."""

    def __init__(self) -> None:
        self.settings, self.now = Settings(min_nodes=2, max_nodes=3, last_call=1.0), 0.0
        self.job = JobState(policy=Policy(check=True))
        self.agents: dict[int, str] = {}
        self.rounds: dict[int, int] = {}
        self.states: dict[int, str] = {}
        self.changes: dict[tuple[str, str], str] = {}

    def send(self, event: Event, what: str) -> None:
        """Apply an event, and note the states that it changes; `what` is what it means."""
        self.job = apply(self.job, event, self.now)
        status = status_of(self.job, Liveness.after_start(self.job, self.now), self.now)
        for node in status.nodes:
            before, after = self.states.get(node.id, ""), node.state
            self.states[node.id] = after
            if before == after:
                continue
            if after == "active" and before != "ready":  # a world was formed at once
                self.changes[before, "ready"] = what
                before = "ready"
            self.changes[before, after] = "a world is formed" if after == "active" else what

    def join(self, number: int, what: str = JOINED, agent: str = "") -> None:
        """An agent joins, a new one if it has a name."""
        if agent:
            self.agents[number] = f"{number}{agent}"
            self.rounds[number] = 0
        event = Join(
            name=f"host-{number}",
            node_id=number,
            incarnation=self.agents[number],
            address="127.0.0.1",
            num_processes=1,
            after_round=self.rounds[number],
            settings=self.settings,
        )
        self.send(event, what)

    def who(self, number: int) -> Sender:
        """How messages of a node begin."""
        return {
            "node_id": number,
            "incarnation": self.agents[number],
            "round": self.rounds[number],
        }

    def begin(self, broken: int = -1) -> None:
        """The world is formed, its nodes are tested, and begin to train; one may be broken."""
        self.now += self.settings.last_call
        self.send(Tick(), "")
        while self.job.check is not None:
            for node in self.job.world:
                sender = self.who(node.id)
                reply = content_of(self.job, sender)
                if isinstance(reply, NodeTest):
                    is_broken = node.id == broken
                    result = TestResult(passed=not is_broken, broken=is_broken)
                    report = ReportTest(
                        **self.who(node.id),
                        check=reply.check,
                        test_round=reply.test_round,
                        result=result,
                    )
                    self.send(report, "its test fails")
            self.now += 1
            self.send(Tick(), "its test fails")
        self.rounds |= {node.id: self.job.round for node in self.job.world}


def node_changes() -> dict[tuple[str, str], str]:
    """Which states of a node follow which, and after what."""
    nodes = Nodes()
    for number in (0, 1, 2):
        nodes.join(number, agent="a")
    nodes.begin(broken=2)
    nodes.begin()
    nodes.join(2, "a new agent joins", agent="b")
    failure = ProcessFailure(
        node_id=1, round=nodes.rounds[1], rank=1, local_rank=0, exit_code=1, time=nodes.now
    )
    nodes.send(ReportFailures(**nodes.who(1), failures=(failure,)), "")
    for number in (1, 0):
        nodes.join(number, "its processes have stopped")
    nodes.begin()
    lost = NodeLost(node_id=2, incarnation=nodes.agents[2])
    nodes.send(lost, "it is silent too long")
    nodes.join(2, "a new agent joins", agent="c")
    for number in (1, 0):
        nodes.join(number, "its processes have stopped")
    nodes.begin()
    nodes.send(Drain(**nodes.who(2), seconds=30.0), "it has to leave")
    nodes.send(Leave(**nodes.who(2), outcome=Outcome.DRAINED), "its agent leaves")
    for number in (1, 0):
        nodes.join(number, "its processes have stopped")
    nodes.begin()
    nodes.send(Leave(**nodes.who(0), outcome=Outcome.SUCCEEDED), "its processes succeed")
    return nodes.changes


def node_picture(_directory: Path) -> str:
    """The states, and the changes between them."""
    changes = node_changes()
    parts = []
    for (before, after), what in changes.items():
        parts += _arrow(before, after, what, is_pair=(after, before) in changes)
    for state, (x, y) in PLACES.items():
        style = {"active": "r2", "excluded": "r5", "gone": "r7", "": ""}.get(state, "r0")
        parts.append(_cell(x - WIDE / 2, y - HIGH / 2, WIDE, HIGH, style))
        parts.append(_text(x, y - 2, state or "outside", "head in"))
        parts.append(_text(x, y + 14, MEANINGS[state], "in"))
    return _file(230, "The states of a node, and what changes them", parts)


def _arrow(before: str, after: str, what: str, *, is_pair: bool) -> list[str]:
    """An arrow from state to state, beside its opposite if there is one."""
    (x1, y1), (x2, y2) = PLACES[before], PLACES[after]
    length = math.hypot(x2 - x1, y2 - y1)
    along = (x2 - x1) / length, (y2 - y1) / length
    side = 12 if is_pair else 0
    shift = -along[1] * side, along[0] * side

    def edge(x: float, y: float, way: int, gap: float) -> tuple[float, float]:
        """Where the arrow meets the border of a state."""
        across = WIDE / 2 / abs(along[0]) if along[0] else math.inf
        down = HIGH / 2 / abs(along[1]) if along[1] else math.inf
        reach = (min(across, down) + gap) * way
        return x + along[0] * reach + shift[0], y + along[1] * reach + shift[1]

    (ax, ay), (bx, by) = edge(x1, y1, 1, 2), edge(x2, y2, -1, 4)
    u, v = 7 * along[0], 7 * along[1]
    barbs = [f"{bx - u + turn * v * 0.7:.1f} {by - v - turn * u * 0.7:.1f}" for turn in (1, -1)]
    path = f"M{ax:.1f} {ay:.1f} L{bx:.1f} {by:.1f} M{barbs[0]} L{bx:.1f} {by:.1f} L{barbs[1]}"
    words = what.split()
    half = (len(words) + 1) // 2
    # On a slope the words are off the middle, where other arrows may cross.
    part = 0.5 if not along[0] or not along[1] else 0.3
    x, y = ax + part * (bx - ax), ay + part * (by - ay)
    if not along[1]:
        y += 14 if is_pair and shift[1] > 0 else -20
    lines = " ".join(words[:half]), " ".join(words[half:])
    return [
        f'<path class="line b" d="{path}"/>',
        *(_text(x, y + 13 * place, line, "soft in halo") for place, line in enumerate(lines)),
    ]


def _text(x: float, y: float, text: str, style: str = "name") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>'


def _legend(entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    for number, (style, text) in enumerate(entries):
        yield _cell(0, 20 * number, 14, 14, style)
        yield _text(22, 20 * number + 11, text)


STYLE = """
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


def _svg_file(drawing: str) -> str:
    """A drawing of `picture` as an SVG file of its own, in the light and the dark colours."""
    found = re.search(
        r'<svg [^>]*(viewBox="0 0 (\d+) (\d+)")([^>]*)>(.*)</svg>', drawing, re.DOTALL
    )
    assert found is not None
    _, width, height, label, content = found.groups()
    margin = 14
    whole = f"{-margin} {-margin} {int(width) + 2 * margin} {int(height) + 2 * margin}"
    style = f"{picture.COLOURS}text {{ font-family: {picture.FONTS}; }}{STYLE}"
    ground = f'x="{-margin}" y="{-margin}" width="100%" height="100%" rx="6" fill="var(--page)"'
    return (
        f'<svg viewBox="{whole}"{label}>\n<style>{style}</style>\n<rect {ground}/>{content}</svg>\n'
    )


def _file(height: float, label: str, parts: list[str]) -> str:
    head = f'viewBox="0 0 740 {height:.0f}" role="img" aria-label="{label}"'
    svg = f'<svg {head} xmlns="http://www.w3.org/2000/svg">' + "\n".join(parts) + "</svg>"
    return _svg_file(svg)


DRAWN = {
    "layout.svg": layout_picture,
    "save.svg": save_picture,
    "byte.svg": byte_picture,
    "node.svg": node_picture,
}
"""File → what draws it, given a directory for checkpoints."""

TIMED = {"save.svg"}
"""Pictures whose numbers differ from run to run."""


def draw(target: Path) -> None:
    """Write all pictures."""
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        for name, picture_of in DRAWN.items():
            (target / name).write_text(picture_of(Path(directory)))


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
