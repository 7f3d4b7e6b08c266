"""Random programs, and what they mean in plain numpy.

A program is drawn together with its meaning: a dictionary of arrays is kept beside the text, and
every statement is written only after numpy has executed it on the arrays. The engine under test
sees the text and shapes alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from tests.strategies import shapes
from tests.transform.simulated import Array, converted


@dataclass
class Tensor:
    """An array that stands for one of another dtype: float32 with few enough digits."""

    array: Array
    dtype: str = "float32"


@dataclass
class Program:
    """A program and its meaning.

    Attributes:
        statements: The text, a statement an item.
        sources: What it is applied to.
        names: What each name stands for at the end.
    """

    statements: list[str] = field(default_factory=list)
    sources: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, Tensor] = field(default_factory=dict)

    def write(self, text: str, **results: Tensor) -> None:
        """Add a statement and what it assigns."""
        self.statements.append(text)
        self.names.update(results)


class Writer:
    """Writes statements that make sense, with random operands."""

    def __init__(self, draw: st.DrawFn, program: Program) -> None:
        self.draw = draw
        self.program = program
        self.fresh = (f"n{number}" for number in itertools.count())

    def statement(self) -> None:
        """Add one statement."""
        kinds: list[Callable[[str, Tensor], None]] = [
            self.rename,
            self.transpose,
            self.permute,
            self.split,
            self.concat,
            self.cast,
            self.stack,
            self.unstack,
            self.reshape,
            self.interleave,
            self.untie,
        ]
        name = self.pick()
        self.draw(st.sampled_from(kinds))(name, self.program.names[name])

    def pick(self) -> str:
        return self.draw(st.sampled_from(sorted(self.program.names)))

    def target(self) -> str:
        """Mostly a new name, sometimes one that is taken."""
        return self.pick() if self.draw(st.integers(0, 3)) == 0 else next(self.fresh)

    def axis(self, ndim: int) -> tuple[int, int]:
        """An axis, and as it is written: maybe counted from the end."""
        axis = self.draw(st.integers(0, ndim - 1))
        return axis, axis - ndim if self.draw(st.booleans()) else axis

    def rename(self, name: str, tensor: Tensor) -> None:
        target = self.target()
        self.program.write(f"{name} -> {target}", **{target: tensor})

    def transpose(self, name: str, tensor: Tensor) -> None:
        target = self.target()
        turned = Tensor(tensor.array.T, tensor.dtype)
        self.program.write(f"{name}^T -> {target}", **{target: turned})

    def permute(self, name: str, tensor: Tensor) -> None:
        target = self.target()
        order = self.draw(st.permutations(range(tensor.array.ndim)))
        array = tensor.array.transpose(order) if order else tensor.array
        self.program.write(
            f"{name} -> {target}, permute='{order}'", **{target: Tensor(array, tensor.dtype)}
        )

    def split(self, name: str, tensor: Tensor) -> None:
        if not tensor.array.ndim:
            return
        axis, written = self.axis(tensor.array.ndim)
        extent = tensor.array.shape[axis]
        if self.draw(st.booleans()):
            count = self.draw(st.sampled_from([n for n in range(1, 7) if extent % n == 0]))
            sizes, attribute = [extent // count] * count, ""
        else:
            cuts = self.draw(st.lists(st.integers(0, extent), max_size=3).map(sorted))
            sizes = [b - a for a, b in itertools.pairwise([0, *cuts, extent])]
            attribute = f", sizes={sizes}"
        if len(sizes) == 1:
            attribute = ""
        targets = [next(self.fresh) for _ in sizes]
        ends = list(itertools.accumulate(sizes))[:-1]
        parts = np.split(tensor.array, ends, axis)
        text = f"{name} -> {', '.join(targets)}, axis={written}{attribute}"
        results = {t: Tensor(a, tensor.dtype) for t, a in zip(targets, parts, strict=True)}
        self.program.write(text, **results)

    def concat(self, name: str, tensor: Tensor) -> None:
        if not tensor.array.ndim:
            return
        axis, written = self.axis(tensor.array.ndim)

        def rest(array: Array) -> tuple[int, ...]:
            return (*array.shape[:axis], *array.shape[axis + 1 :])

        fitting = [
            other
            for other, found in sorted(self.program.names.items())
            if found.dtype == tensor.dtype
            and found.array.ndim == tensor.array.ndim
            and rest(found.array) == rest(tensor.array)
        ]
        names = [name, *self.draw(st.lists(st.sampled_from(fitting), min_size=1, max_size=3))]
        arrays = [self.program.names[other].array for other in names]
        if sum(array.size for array in arrays) > 500:
            return
        turned = self.draw(st.booleans())
        if turned:
            # ^T stands with each name, so the axis counts after it.
            arrays = [array.T for array in arrays]
            axis = tensor.array.ndim - 1 - axis
            written = axis
        target = self.target()
        left = ", ".join(f"{other}^T" if turned else other for other in names)
        self.program.write(
            f"{left} -> {target}, axis={written}",
            **{target: Tensor(np.concatenate(arrays, axis), tensor.dtype)},
        )

    def cast(self, name: str, tensor: Tensor) -> None:
        target = self.target()
        dtype = self.draw(st.sampled_from(["float16", "bfloat16", "float32"]))
        result = Tensor(converted(tensor.array, [dtype]), dtype)
        attribute = f"dtype='{dtype}'"
        if self.draw(st.booleans()):
            attribute = f"src_dtype={tensor.dtype}, dst_dtype={dtype}"
        self.program.write(f"{name} -> {target}, {attribute}", **{target: result})

    def stack(self, name: str, tensor: Tensor) -> None:
        same = [
            other
            for other, found in sorted(self.program.names.items())
            if found.dtype == tensor.dtype and found.array.shape == tensor.array.shape
        ]
        names = [name, *self.draw(st.lists(st.sampled_from(same), min_size=1, max_size=2))]
        axis, written = self.axis(tensor.array.ndim + 1)
        arrays = [self.program.names[other].array for other in names]
        if sum(array.size for array in arrays) > 500:
            return
        target = self.target()
        result = Tensor(np.stack(arrays, axis), tensor.dtype)
        self.program.write(f"{', '.join(names)} -> {target}, stack={written}", **{target: result})

    def unstack(self, name: str, tensor: Tensor) -> None:
        axes = [axis for axis, extent in enumerate(tensor.array.shape) if 1 <= extent <= 6]
        if not axes:
            return
        axis = self.draw(st.sampled_from(axes))
        targets = [next(self.fresh) for _ in range(tensor.array.shape[axis])]
        results = {
            target: Tensor(np.asarray(tensor.array.take(index, axis)), tensor.dtype)
            for index, target in enumerate(targets)
        }
        self.program.write(f"{name} -> {', '.join(targets)}, unstack={axis}", **results)

    def reshape(self, name: str, tensor: Tensor) -> None:
        shape = self.draw(st.sampled_from(factorings(tensor.array.size)))
        if shape == tensor.array.shape:
            return
        target = self.target()
        result = Tensor(tensor.array.reshape(shape), tensor.dtype)
        self.program.write(f"{name} -> {target}, reshape='{list(shape)}'", **{target: result})

    def interleave(self, name: str, tensor: Tensor) -> None:
        """Gate and up: from any number of blocks to any other."""
        axes = [a for a, extent in enumerate(tensor.array.shape) if extent and extent % 2 == 0]
        if not axes:
            return
        axis = self.draw(st.sampled_from(axes))
        half = tensor.array.shape[axis] // 2
        divisors = [n for n in range(1, half + 1) if half % n == 0]
        before, after = (self.draw(st.sampled_from(divisors)) for _ in range(2))
        blocks = np.split(tensor.array, 2 * before, axis)
        gate, up = (np.concatenate(blocks[i::2], axis) for i in range(2))
        mixed = zip(np.split(gate, after, axis), np.split(up, after, axis), strict=True)
        array = np.concatenate([part for pair in mixed for part in pair], axis)
        target = self.target()
        self.program.write(
            f"{name} -> {target}, fused_ffn, axis={axis}, src_parts={before}, dst_parts={after}",
            **{target: Tensor(array, tensor.dtype)},
        )

    def untie(self, name: str, tensor: Tensor) -> None:
        targets = [next(self.fresh), next(self.fresh)]
        self.program.write(
            f"{name} -> {', '.join(targets)}, untie", **dict.fromkeys(targets, tensor)
        )


def factorings(size: int) -> list[tuple[int, ...]]:
    """Shapes of up to three axes with as many elements."""
    if size == 0:
        return [(0,), (2, 0), (0, 3)]
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    pairs = [(n, size // n) for n in divisors]
    triples = [(n, m, size // n // m) for n in divisors for m in divisors if size // n % m == 0]
    return [(size,), *pairs, *(t for t in triples if math.prod(t) == size)]


@st.composite
def programs(draw: st.DrawFn, *, max_statements: int = 8) -> Program:
    """A random program with its meaning."""
    program = Program()
    start = 0
    for number in range(draw(st.integers(1, 3))):
        shape = draw(shapes(min_extent=0, max_dims=3, max_extent=6))
        array = np.arange(start, start + math.prod(shape), dtype=np.float32).reshape(shape)
        # Thirds have more digits than the short dtypes keep, so that a lost cast shows.
        dtype = draw(st.sampled_from(["float32", "float32", "float16", "bfloat16"]))
        rounded = converted(np.asarray(array / np.float32(3)), [dtype])
        program.sources[f"s{number}"] = Tensor(rounded, dtype)
        start += array.size
    program.names.update(program.sources)
    writer = Writer(draw, program)
    for _ in range(draw(st.integers(0, max_statements))):
        writer.statement()
    return program
