"""What every format must do, as tests to inherit.

Subclass `FormatConformance`, supply its hooks, and pytest runs the whole of it, as with
`tests.support.conformance`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box, uncovered
from remesh.core.index import Index
from remesh.errors import CorruptCheckpointError
from remesh.pipeline.source import TensorSource
from remesh.storage import Storage

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
