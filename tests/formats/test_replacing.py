"""A save where a checkpoint of another format is: refused, or instead of it if asked."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import remesh
from remesh.errors import CheckpointExistsError, StateError
from remesh.formats.table import WRITERS
from tests.compat.test_flex_paddle import DATA

OLD = {"w": np.arange(6.0).reshape(2, 3), "left": np.ones(2)}
NEW = {"w": np.zeros((2, 3))}


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("new", WRITERS)
@pytest.mark.parametrize("old", WRITERS)
def test_one_format_over_another(old: str, new: str, tmp_path: Path) -> None:
    remesh.save(OLD, tmp_path, format=old)
    before = files_in(tmp_path)
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        remesh.save(NEW, tmp_path, format=new)
    assert files_in(tmp_path) == before
    remesh.save(NEW, tmp_path, format=new, overwrite=True)
    found = remesh.Checkpoint(tmp_path)
    assert [*found] == ["w"]
    np.testing.assert_array_equal(found.read_array("w"), NEW["w"])
    fresh = tmp_path / "fresh"
    remesh.save(NEW, fresh, format=new)
    assert len(files_in(tmp_path)) == 2 * len(files_in(fresh)), "files of the old one are left"


def test_what_is_only_read_stays(tmp_path: Path) -> None:
    shutil.copytree(DATA / "two_rank", tmp_path, dirs_exist_ok=True)
    before = files_in(tmp_path)
    with pytest.raises(CheckpointExistsError, match="'paddle'"):
        remesh.save(NEW, tmp_path)
    with pytest.raises(StateError, match="move it away"):
        remesh.save(NEW, tmp_path, overwrite=True)
    assert files_in(tmp_path) == before


def test_files_that_are_checkpoints_by_themselves_lie_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "best.pt").write_bytes(b"anything")
    (tmp_path / "other.safetensors").write_bytes(b"anything")
    remesh.save(NEW, tmp_path)
    assert [*remesh.Checkpoint(tmp_path)] == ["w"]
