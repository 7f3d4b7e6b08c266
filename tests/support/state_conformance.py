"""What every format and every adapter must do, as tests to inherit.

`FormatConformance` is for what turns files on disk into an `Index`; `AdapterConformance` for what
turns an object of a framework into named tensors and values; `LayoutConformance` for what cuts
state between ranks. Subclass one, supply its hooks, and pytest runs the whole of it, as with
`tests.support.conformance`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from remesh.checkpoint import Checkpoint, load, save
from remesh.checkpoint.local import describe_local, memory_of
from remesh.core import values
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box, uncovered
from remesh.core.index import Index
from remesh.errors import CorruptCheckpointError, MismatchError
from remesh.exchange import Exchange
from remesh.pipeline.source import TensorSource
from remesh.storage import MemoryStorage, Storage
from tests.support.ranks import run_ranks

Arrays = Mapping[str, npt.NDArray[Any]]


class FormatConformance:
    """The suite for formats; supply `write` and `open`."""

    def write(self, arrays: Arrays, folder: Path) -> None:
        """Write a checkpoint of the format that holds these tensors."""
        raise NotImplementedError

    def open(self, folder: Path) -> tuple[Storage, Index]:
        """Open what `write` wrote."""
        raise NotImplementedError

    @pytest.fixture
    def arrays(self) -> Arrays:
        """Tensors of several types and shapes; override for what a format cannot hold."""
        random = np.random.default_rng(0)
        return {
            "model.weight": random.random((33, 17), dtype=np.float32),
            "model.bias": random.random(17),
            "steps": np.arange(24, dtype=np.int64).reshape(2, 3, 4),
            "mask": random.random((5, 7)) > 0.5,
        }

    @pytest.fixture
    def opened(self, arrays: Arrays, tmp_path: Path) -> tuple[Storage, Index]:
        """A checkpoint of the format."""
        self.write(arrays, tmp_path)
        return self.open(tmp_path)

    def test_names_dtypes_and_shapes(self, arrays: Arrays, opened: tuple[Storage, Index]) -> None:
        _, index = opened
        assert set(index) == set(arrays)
        for name, array in arrays.items():
            assert (index[name].dtype, index[name].shape) == (array.dtype.name, array.shape)

    def test_pieces_cover_each_tensor_once(self, opened: tuple[Storage, Index]) -> None:
        _, index = opened
        for name, stored in index.items():
            boxes = [piece.box for piece in index.pieces(name)]
            assert uncovered(Box.whole(stored.shape), boxes) == []
            assert sum(box.size for box in boxes) == Box.whole(stored.shape).size

    def test_pieces_lie_in_their_files(self, opened: tuple[Storage, Index]) -> None:
        storage, index = opened
        sizes = {file.path: storage.size(file.path) for file in index.files}
        assert sizes == {file.path: file.num_bytes for file in index.files}
        for name, stored in index.items():
            for piece in index.pieces(name):
                assert piece.num_bytes == piece.box.size * BY_NAME[stored.dtype].itemsize
                assert 0 <= piece.position <= sizes[piece.path] - piece.num_bytes

    def test_contents_whole_and_in_part(
        self, arrays: Arrays, opened: tuple[Storage, Index]
    ) -> None:
        storage, index = opened
        for name, array in arrays.items():
            whole = Box.whole(array.shape)
            inner = Box(tuple(n // 3 for n in array.shape), tuple(n - n // 3 for n in array.shape))
            for box in (whole, inner):
                found = TensorSource(storage, index).read([(name, box)])[0]
                np.testing.assert_array_equal(found, array[box.slices], name)

    def test_a_missing_file_is_named(
        self, arrays: Arrays, opened: tuple[Storage, Index], tmp_path: Path
    ) -> None:
        storage, index = opened
        name = next(iter(arrays))
        path = index.pieces(name)[0].path
        (tmp_path / path).unlink()
        with pytest.raises(CorruptCheckpointError, match=Path(path).name):
            TensorSource(storage, index).read([(name, Box.whole(index[name].shape))])[0]

    def test_a_file_that_is_cut_short_is_refused(
        self, arrays: Arrays, opened: tuple[Storage, Index], tmp_path: Path
    ) -> None:
        _, index = opened
        for file in index.files:
            path = tmp_path / file.path
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2])
            with pytest.raises(CorruptCheckpointError):
                self._read_all(arrays, tmp_path)
            path.write_bytes(whole)
        self._read_all(arrays, tmp_path)

    def _read_all(self, arrays: Arrays, folder: Path) -> None:
        storage, index = self.open(folder)
        for name, array in arrays.items():
            TensorSource(storage, index).read([(name, Box.whole(array.shape))])[0]


class AdapterConformance:
    """The suite for adapters; supply `make`."""

    def make(self, seed: int) -> Any:
        """A state with the object, the same structure for every seed but other content."""
        raise NotImplementedError

    def test_describing_changes_nothing_and_is_repeatable(self) -> None:
        state = self.make(0)
        first = _content(state)
        assert first
        assert _content(state) == first

    def test_seeds_differ(self) -> None:
        assert _content(self.make(0)) != _content(self.make(1))

    def test_round_trip_into_an_object_with_other_content(self) -> None:
        storage, state, target = MemoryStorage(), self.make(0), self.make(1)
        expected = _content(state)
        save(state, storage)
        assert _content(state) == expected
        load(target, storage, unexpected="error")
        assert _content(target) == expected

    def test_a_second_save_stores_the_same(self) -> None:
        one, two, state = MemoryStorage(), MemoryStorage(), self.make(0)
        save(state, one)
        save(state, two)
        target = self.make(1)
        load(target, one)
        load(target, two)
        assert _content(target) == _content(state)

    def test_what_does_not_fit_changes_nothing(self) -> None:
        storage, target = MemoryStorage(), self.make(1)
        save({"something": "else"}, storage)
        before = _content(target)
        with pytest.raises(MismatchError) as caught:
            load(target, storage)
        assert caught.value.missing
        assert _content(target) == before


class LayoutConformance:
    """The suite for what cuts state between ranks; supply `make`. Ranks are threads."""

    numbers_of_ranks: ClassVar[tuple[int, ...]] = (2, 4, 3)

    def make(self, rank: int, num_ranks: int, seed: int) -> Any:
        """A rank's part of a state; of one rank, all of it. Other seeds have other content."""
        raise NotImplementedError

    def test_any_number_of_ranks_stores_the_same(self) -> None:
        first = MemoryStorage()
        save(self.make(0, 1, 0), first)
        expected = _stored(first)
        assert expected
        source = first
        for num_ranks in (*self.numbers_of_ranks, 1):
            source = self._move(source, num_ranks)
            assert _stored(source) == expected, f"{num_ranks} ranks"

    def test_no_rank_holds_all_and_none_is_needless(self) -> None:
        num_ranks = self.numbers_of_ranks[0]
        whole = _content(self.make(0, 1, 0))
        parts = [_content(self.make(rank, num_ranks, 0)) for rank in range(num_ranks)]
        assert all(part != whole for part in parts)
        assert all(_num_bytes(part) < _num_bytes(whole) for part in parts)
        assert sum(map(_num_bytes, parts)) >= _num_bytes(whole)

    def test_describing_changes_nothing_and_is_repeatable(self) -> None:
        state = self.make(1, 2, 0)
        assert _content(state) == _content(state)

    def test_what_does_not_fit_changes_nothing(self) -> None:
        storage, target = MemoryStorage(), self.make(1, 2, 1)
        save({"something": "else"}, storage)
        before = _content(target)
        with pytest.raises(MismatchError) as caught:
            load(target, storage)
        assert caught.value.missing
        assert _content(target) == before

    def _move(self, source: MemoryStorage, num_ranks: int) -> MemoryStorage:
        """Load into a layout, and save from it."""
        target = MemoryStorage()
        # One after the other: threads share torch's random numbers.
        states = [self.make(rank, num_ranks, 1) for rank in range(num_ranks)]

        def move(exchange: Exchange) -> None:
            state = states[exchange.rank]
            load(state, source, group=exchange, unexpected="error")
            save(state, target, group=exchange)

        run_ranks(num_ranks, move)
        return target


def _stored(storage: MemoryStorage) -> dict[str, bytes]:
    """Everything in a checkpoint, by name and kind."""
    checkpoint = Checkpoint(storage)
    index = checkpoint.index
    found = {name: values.encode(value) for name, value in checkpoint.values.items()}
    for name, stored in index.items():
        array = TensorSource(storage, index).read([(name, Box.whole(stored.shape))])[0]
        found[f"{name} {stored.dtype} {stored.shape}"] = array.tobytes()
    return found


def _num_bytes(content: Mapping[str, bytes]) -> int:
    return sum(map(len, content.values()))


def _content(state: Any) -> dict[str, bytes]:
    """Everything that a state says it has, by name and box."""
    description = describe_local(state)
    found = {name: values.encode(value) for name, value in description.values.items()}
    for entry in description.tensors:
        for part in entry.parts:
            memory = memory_of(part.data, entry.name)
            array = np.empty(part.box.shape, memory.carrier)
            memory.copy_out(Box.whole(part.box.shape), array)
            found[f"{entry.name} {entry.dtype} {part.box}"] = array.tobytes()
    return found
