"""Repair: what is whole is saved bit for bit, what is not is named, and nothing wrong is saved."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remesh
from remesh.checkpoint import convert
from remesh.core.geometry import Box
from remesh.core.integrity import BLOCK_SIZE
from remesh.core.safetensors_file import decode_header
from remesh.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError
from remesh.exchange import Exchange
from remesh.formats import native, native_writer
from remesh.maintenance.repair import RepairReport, plan_repair, repair
from remesh.pipeline import Compress
from remesh.storage import LocalStorage, MemoryStorage
from tests.engine.scenes import saved_by, share_of
from tests.engine.small_checkpoint import flip, stored_place
from tests.support import run_ranks

BLOCK_ELEMENTS = BLOCK_SIZE // 4


def truth() -> dict[str, Any]:
    """The global tensors: one of several blocks on each rank, and small ones."""
    return {
        "large": np.arange(6 * BLOCK_ELEMENTS, dtype=np.float32).reshape(6, BLOCK_ELEMENTS),
        "rows": np.arange(40, dtype=np.int64).reshape(10, 4),
        "half": np.arange(30, dtype=np.float16).reshape(10, 3),
        "pairs": (np.arange(4) + 1j * np.arange(4)).astype(np.complex128),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 3), np.float32),
    }


def save_part(exchange: Exchange, path: Path, compress: Compress | None = None) -> None:
    """Half of the rows of what has many, everything else whole; a list and a tie."""
    rank, state = exchange.rank, truth()
    for name in ("large", "rows", "half"):
        state[name] = share_of(name, state[name], rank, 2)
    state["tied"] = state["pairs"]
    state["layers"] = [np.full(3, number, np.float32) for number in range(3)]
    state["seed"] = remesh.sharding.ShardedObject("seed", rank, (2,), (rank,))
    state["config"] = {"lr": 0.5, "betas": (0.9, 0.95)}
    remesh.save(state, path, group=exchange, metadata={"git": "abc"}, compress=compress)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("repair")
    run_ranks(2, save_part, root / "plain")
    run_ranks(2, save_part, root / "compressed", "zstd")
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def original(request: pytest.FixtureRequest, originals: dict[str, Path]) -> Path:
    """A plain checkpoint, or one of a kind that a test names."""
    return originals[getattr(request, "param", "plain")]


both = pytest.mark.parametrize("original", ["plain", "compressed"], indirect=True)


@pytest.fixture
def damaged(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "damaged"))


VALUES = {"config.lr", "config.betas", "seed/shard_0_2", "seed/shard_1_2"}
ALL = {"large", "rows", "half", "pairs", "scalar", "empty", "layers.0", "layers.1", "layers.2"}


def the_file(path: Path, name: str) -> Path:
    (found,) = path.rglob(name)
    return found


def content_of(path: Path) -> dict[str, tuple[bytes, int]]:
    files = [file for file in path.rglob("*") if file.is_file()]
    return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def check_new(path: Path, names: set[str]) -> remesh.Checkpoint:
    """The new checkpoint is sound, holds these tensors, and all of them are right."""
    checkpoint = remesh.Checkpoint(path)
    assert checkpoint.verify().ok
    index = checkpoint.index
    assert set(index.tensors.names) == names
    expected = truth() | {f"layers.{number}": np.full(3, number, "f4") for number in range(3)}
    for name in names:
        stored = checkpoint.read_array(name)
        assert (stored.dtype, stored.shape) == (expected[name].dtype, expected[name].shape)
        assert stored.tobytes() == expected[name].tobytes(), name
    return checkpoint


def repaired(damaged: Path, *, keeps: set[str], keep_unchecked: bool = False) -> RepairReport:
    before = content_of(damaged)
    target = damaged.with_name("repaired")
    report = repair(damaged, target, keep_unchecked=keep_unchecked)
    assert content_of(damaged) == before
    assert set(report.saved) == keeps
    assert report.target == str(target)
    assert check_new(target, keeps).verify().unchecked == report.unchecked
    assert keep_unchecked or report.unchecked == ()
    return report


# ---------------------------------------------------------------------------------------------
# Small files
# ---------------------------------------------------------------------------------------------


@both
def test_a_sound_checkpoint_is_taken_over_by_links(damaged: Path) -> None:
    report = repaired(damaged, keeps=ALL)
    assert report.is_complete
    assert (report.record, report.index, report.values) == ("intact",) * 3
    assert not report.unchecked + report.left_out + report.notes
    assert not report.lost
    new = remesh.Checkpoint(report.target)
    assert new.metadata == {"git": "abc", "repaired_from": str(damaged), "num_lost": 0}
    assert new.record.world_size == 2
    assert new.values == {"config.lr": 0.5, "config.betas": (0.9, 0.95)}
    assert list(new.objects.values()) == [0, 1]
    assert dict(new.index.aliases) == {"tied": "pairs"}
    for name in ("00000.safetensors", "00001.safetensors"):
        assert the_file(damaged, name).samefile(the_file(Path(report.target), name))


@both
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_without_a_record_the_rest_must_prove_itself(damaged: Path, damage: str) -> None:
    record = damaged / native.RECORD_NAME
    if damage == "missing":
        record.unlink()
    else:
        record.write_text(record.read_text().replace("abc", "abd"))
    report = repaired(damaged, keeps=ALL - {"empty"})
    assert (report.record, report.index, report.values) == (damage, "decodes", "decodes")
    # The digests of the index prove the bytes of tensors, and nothing proves the rest.
    assert not report.is_complete
    assert set(report.left_out) == VALUES | {"empty", "tied"}
    new = remesh.Checkpoint(report.target)
    assert new.metadata == {"repaired_from": str(damaged), "num_lost": 6}
    assert new.values == new.objects == dict(new.index.aliases) == {}
    shutil.rmtree(report.target)
    report = repaired(damaged, keeps=ALL, keep_unchecked=True)
    assert set(report.unchecked) == VALUES | {"empty", "tied"}
    assert report.left_out == ()
    new = remesh.Checkpoint(report.target)
    assert new.values == {"config.lr": 0.5, "config.betas": (0.9, 0.95)}
    assert dict(new.index.aliases) == {"tied": "pairs"}


@both
@pytest.mark.parametrize("damage", ["missing", "damaged", "no index"])
def test_the_index_is_made_anew(damaged: Path, damage: str) -> None:
    file = the_file(damaged, "index.safetensors")
    if damage == "missing":
        file.unlink()
    elif damage == "damaged":
        flip(file, file.stat().st_size - 1)
    else:
        file.write_bytes(b"no index")
    report = repaired(damaged, keeps=ALL - {"empty"})
    assert report.index == ("missing" if damage == "missing" else "damaged")
    # The record's digest of each whole file proves the bytes.
    assert report.unchecked == ()
    assert report.is_complete
    assert report.notes == (
        "tensors without elements were only in the index: they are not listed here",
    )
    assert remesh.Checkpoint(report.target).state()["tied"].tolist() == truth()["pairs"].tolist()


@both
@pytest.mark.parametrize("with_values", [True, False])
def test_without_record_and_index_nothing_is_proven(damaged: Path, with_values: bool) -> None:
    for name in (native.RECORD_NAME, "index.safetensors", "values.msgpack")[: 3 - with_values]:
        the_file(damaged, name).unlink()
    with pytest.raises(CheckpointError, match="keep_unchecked=True saves what no digest proves"):
        repair(damaged, damaged.with_name("repaired"))
    report = repaired(damaged, keeps=ALL - {"empty"}, keep_unchecked=True)
    assert (report.record, report.index) == ("missing", "missing")
    assert report.values == ("decodes" if with_values else "missing")
    assert {file.state for file in report.files} == {"readable"}
    in_values = VALUES | {"tied"} if with_values else set()
    assert set(report.unchecked) == ALL - {"empty"} | in_values
    assert not report.is_complete
    assert report.lost == ()
    assert report.notes[0].startswith("the index is lost, and with it what lost files held")
    assert with_values or "nothing shows that this save was ever finished" in report.notes[-1]
    assert remesh.Checkpoint(report.target).record.world_size == 2


@pytest.mark.parametrize("damage", ["with a record", "without a record", "another number"])
def test_lost_values(damaged: Path, damage: str) -> None:
    file, with_record = the_file(damaged, "values.msgpack"), damage != "without a record"
    if damage == "another number":  # which decodes
        flip(file, file.read_bytes().index(np.array(0.5, ">f8").tobytes()) + 1)
    else:
        file.write_bytes(b"\xc1")
    if not with_record:
        (damaged / native.RECORD_NAME).unlink()
    report = repaired(damaged, keeps=ALL, keep_unchecked=not with_record)
    assert report.values == "damaged"
    assert report.num_values == 0
    assert not report.is_complete
    new = remesh.Checkpoint(report.target)
    assert new.values == {}
    assert dict(new.index.aliases) == {"tied": "pairs"}


# ---------------------------------------------------------------------------------------------
# Data files
# ---------------------------------------------------------------------------------------------


def names_in(path: Path, number: int) -> set[str]:
    """The tensors of which a data file holds pieces."""
    index = remesh.Checkpoint(path).index
    rows = np.unique(index.boxes.tensor[index.file == number]).tolist()
    return {index.tensors.names[row] for row in rows}


def position_of(path: Path, name: str, number: int) -> int:
    return remesh.Checkpoint(path).index.pieces(name)[number].position


def damage_large(damaged: Path) -> None:
    """Damage a block of the second file that holds nothing but rows of `large`."""
    position = position_of(damaged, "large", 1) + 2 * BLOCK_SIZE
    place = stored_place(remesh.Checkpoint(damaged).index, 1, position)
    flip(the_file(damaged, "00001.safetensors"), place)


@both
def test_a_damaged_block_costs_the_tensors_in_it(damaged: Path) -> None:
    file = the_file(damaged, "00001.safetensors")
    damage_large(damaged)
    others = names_in(damaged, 1) - {"large"}
    report = repaired(damaged, keeps=ALL - {"large"})
    (lost,) = report.lost
    assert (lost.name, lost.dtype, lost.shape) == ("large", "float32", (6, BLOCK_ELEMENTS))
    assert lost.holes == (Box((3, 0), (3, BLOCK_ELEMENTS)),)
    assert lost.files == (str(file.relative_to(damaged)),)
    assert [found.state for found in report.files] == ["sound", "damaged"]
    assert report.files[1].problem == "1 of 4 blocks are not what was written"
    assert not report.is_complete
    new = the_file(Path(report.target), "00001.safetensors")
    header = decode_header(new.read_bytes(), str(new))
    assert {key.partition("@")[0] for key in header.entries} == others
    state = remesh.Checkpoint(report.target).state()
    assert "large" not in state
    assert len(state["layers"]) == 3


@both
def test_a_damaged_header_block(damaged: Path) -> None:
    """With the index, pieces behind it are found; without, the whole file is lost."""
    flip(the_file(damaged, "00000.safetensors"), 20)
    index = remesh.Checkpoint(damaged).index
    name = index.files[0].path
    near = {
        stored
        for stored in names_in(damaged, 0)
        if any(p.path == name and p.position < BLOCK_SIZE for p in index.pieces(stored))
    }
    assert near < names_in(damaged, 0)
    with_index = plan_repair(damaged).report
    assert {tensor.name for tensor in with_index.lost} == near
    assert with_index.files[0].state == "damaged"
    assert set(with_index.lost_aliases) == {"tied"}
    the_file(damaged, "index.safetensors").unlink()
    without = plan_repair(damaged).report
    assert without.files[0].state == "unreadable"
    assert {tensor.name for tensor in without.lost} == {"large", "rows", "half"}


def test_a_file_that_was_cut_short(damaged: Path) -> None:
    file = the_file(damaged, "00000.safetensors")
    index = remesh.Checkpoint(damaged).index
    cut = index.pieces("large")[0].position + 5
    os.truncate(file, cut)
    name = str(file.relative_to(damaged))
    behind = {
        stored
        for stored in index
        for piece in index.pieces(stored)
        if piece.path == name and piece.position + piece.num_bytes > cut
    } - {"tied"}
    assert "large" in behind
    assert "rows" not in behind
    # They share a block with the cut, so their digest cannot be compared.
    beside = {stored for stored in names_in(damaged, 0) - behind if stored != "tied"}
    assert "rows" in beside
    report = repaired(damaged, keeps=ALL - behind - beside)
    assert set(report.left_out) - {"tied"} == beside
    shutil.rmtree(report.target)
    report = repaired(damaged, keeps=ALL - behind, keep_unchecked=True)
    assert set(report.unchecked) - {"tied"} == beside
    assert report.files[0].state == "truncated"
    assert report.files[0].problem == f"it has {cut} of {index.files[0].num_bytes} bytes"


@pytest.mark.parametrize("lost", [1, 7, 8, 16, 512, 4096])
def test_a_file_that_lost_its_first_bytes_is_not_taken_for_whole(tmp_path: Path, lost: int) -> None:
    """All pieces seem to be there, each at the place of its neighbour."""
    state = {
        "w": np.arange(210_000, dtype=np.float32).reshape(300, 700),
        "b": np.arange(5.0),
        "s": np.array(4.5),
        "step": 5,
    }
    remesh.save(state, tmp_path / "damaged")
    file = the_file(tmp_path / "damaged", "00000.safetensors")
    file.write_bytes(file.read_bytes()[lost:])
    report = repair(tmp_path / "damaged", tmp_path / "repaired")
    assert report.saved == report.unchecked == ()
    assert set(report.left_out) | {tensor.name for tensor in report.lost} == {"w", "b", "s"}
    assert remesh.Checkpoint(tmp_path / "repaired").values == {"step": 5}


def test_what_is_unchecked_is_told_by_loads_and_verifications(
    damaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = the_file(damaged, "00000.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    report = repair(damaged, damaged.with_name("repaired"), keep_unchecked=True)
    (name, *_) = (name for name in report.unchecked if name in truth())
    assert remesh.Checkpoint(report.target).verify().unchecked == report.unchecked
    assert remesh.load({name: truth()[name]}, report.target).unchecked == (name,)
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert f"no digest proves that these are what was saved: {name}" in warning.getMessage()
    caplog.clear()
    proven = next(name for name in report.saved if name not in report.unchecked)
    assert remesh.load({proven: truth()[proven]}, report.target).unchecked == ()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    # A repair of the repaired one proves no more.
    again = repair(report.target, damaged.with_name("again"))
    assert again.unchecked == report.unchecked
    # And a conversion keeps the marks where they have a place.
    caplog.clear()
    native_copy, foreign = damaged.with_name("native"), damaged.with_name("foreign")
    rules = {name: f"new.{name}"}
    done = convert(report.target, native_copy, format="remesh", transform=rules)
    assert f"new.{name}" in done.unchecked
    assert remesh.Checkpoint(native_copy).verify().unchecked == tuple(sorted(done.unchecked))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    convert(report.target, foreign, format="torch_dcp")
    assert f"no digest proves {name}" in caplog.text


@both
@pytest.mark.parametrize("small", [(), (native.RECORD_NAME,), ("index.safetensors",)])
def test_a_missing_data_file(damaged: Path, small: tuple[str, ...]) -> None:
    gone = names_in(damaged, 1)
    the_file(damaged, "00001.safetensors").unlink()
    for name in small:
        the_file(damaged, name).unlink()
    has_index = "index.safetensors" not in small
    proves_empty = small == ()
    report = repaired(damaged, keeps=ALL - gone - (set() if proves_empty else {"empty"}))
    assert report.files[1].state == "missing"
    # Without the index, only those are known of which the other file holds pieces.
    torn = {"large", "rows", "half"}
    assert {tensor.name for tensor in report.lost} == (gone if has_index else torn)
    assert len(report.notes) == (0 if has_index else 2)
    rows = next(tensor for tensor in report.lost if tensor.name == "rows")
    assert rows.holes == (Box((5, 0), (5, 4)),)
    assert not report.is_complete


@both
def test_bytes_too_many(damaged: Path) -> None:
    with the_file(damaged, "00000.safetensors").open("ab") as file:
        file.write(b"more")
    report = repaired(damaged, keeps=ALL)
    assert report.files[0].state == "damaged"
    assert report.files[0].problem.endswith("4 too many")
    assert report.is_complete


@both
def test_an_index_without_a_record_still_finds_damage(damaged: Path) -> None:
    damage_large(damaged)
    (damaged / native.RECORD_NAME).unlink()
    repaired(damaged, keeps=ALL - {"large", "empty"})


@both
def test_a_file_of_which_only_the_whole_is_known_to_be_wrong(damaged: Path) -> None:
    damage_large(damaged)
    gone = names_in(damaged, 1)
    the_file(damaged, "index.safetensors").unlink()
    report = repaired(damaged, keeps=ALL - gone - {"empty"})
    assert report.files[1].state == "unreadable"
    assert not report.knows_all


def test_blocks_that_cannot_be_read(damaged: Path) -> None:
    start = position_of(damaged, "large", 1)

    class Bad(LocalStorage):
        def read_into(self, path: str, start_at: int, buffer: Any) -> int:
            bad = start + 2 * BLOCK_SIZE
            if path.endswith("/00001.safetensors") and start_at <= bad < start_at + buffer.size:
                raise remesh.StorageError(errno.EIO, "the disk failed")
            return super().read_into(path, start_at, buffer)

    report = repair(Bad(damaged), damaged.with_name("repaired"))
    assert report.files[1].problem == "1 of 4 blocks cannot be read"
    assert {tensor.name for tensor in report.lost} == {"large"}
    check_new(damaged.with_name("repaired"), ALL - {"large"})


def test_a_lost_item_of_a_list_moves_no_other(tmp_path: Path) -> None:
    layers = [np.full(BLOCK_ELEMENTS, number, np.float32) for number in range(3)]
    remesh.save({"layers": layers, "others": [1, 2]}, tmp_path / "damaged")
    piece = remesh.Checkpoint(tmp_path / "damaged").index.pieces("layers.0")[0]
    flip(the_file(tmp_path / "damaged", "00000.safetensors"), piece.position)
    report = repair(tmp_path / "damaged", tmp_path / "repaired")
    assert [tensor.name for tensor in report.lost] == ["layers.0"]
    state = remesh.Checkpoint(tmp_path / "repaired").state()
    assert list(state["layers"]) == [1, 2]
    assert state["layers"][2][0] == 2
    assert state["others"] == [1, 2]


def test_no_wrong_value_whatever_is_damaged(original: Path, tmp_path: Path) -> None:
    """Random damage in small files and data: what is saved is right, what is not is listed."""
    chance = random.Random(5)
    small = (native.RECORD_NAME, "index.safetensors", "values.msgpack")
    for trial in range(25):
        damaged = Path(shutil.copytree(original, tmp_path / f"damaged-{trial}"))
        spoiled = chance.sample(small, chance.randrange(3))
        for name in spoiled:
            file = the_file(damaged, name)
            flip(file, chance.randrange(file.stat().st_size), 1 << chance.randrange(8))
        if len({native.RECORD_NAME, "index.safetensors"}.intersection(spoiled)) < 2:
            file = the_file(damaged, chance.choice(["00000.safetensors", "00001.safetensors"]))
            flip(file, chance.randrange(file.stat().st_size), 1 << chance.randrange(8))
        target = tmp_path / f"repaired-{trial}"
        report = repair(damaged, target)
        lost = {tensor.name for tensor in report.lost}
        assert not lost.intersection(report.saved)
        check_new(target, set(report.saved))
        shutil.rmtree(damaged)
        shutil.rmtree(target)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (rb"[6,2]", rb"[7,2]"),  # the entry's shape, but not its bytes
        (rb"[10,2],[0,0]", rb"[10,2],[7,0]"),  # leaves the tensor
        (rb"[10,2],[0,0]", rb"[10,2],[0]  "),
        (rb"[10,2],[0,0]", rb"[10,2],[-1,0]"),
        (rb"[10,2],[0,0]", rb"[9223372036854775807,9223372036854775807],[0,0]"),
        (rb"[10,2],[0,0]", rb"[18446744073709551615,2],[0,0]"),
        (rb"int64", rb"int65"),
        (rb"int64", rb"float64"),
        (rb"pieces", rb"places"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path: Path, old: bytes, new: bytes) -> None:
    """Without index and record nothing proves a header, so its numbers must fit each other."""

    def state_of(rank: int) -> Any:
        start, stop = ((0, 6), (6, 10))[rank]
        rows = np.arange(2 * start, 2 * stop).reshape(-1, 2)
        return {"rows": remesh.ShardedTensor.at_offset("rows", rows, (10, 2), (start, 0))}

    saved_by(2, state_of, tmp_path / "damaged")
    for name in (native.RECORD_NAME, "index.safetensors"):
        the_file(tmp_path / "damaged", name).unlink()
    report = plan_repair(tmp_path / "damaged", keep_unchecked=True).report
    assert report.saved == report.unchecked == ("rows",)
    file = the_file(tmp_path / "damaged", "00000.safetensors")
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    assert content[8:start].count(old) == 1
    text = content[8:start].rstrip().replace(old, new).ljust(start - 8)
    assert len(text) == start - 8
    file.write_bytes(content[:8] + text + content[start:])
    report = plan_repair(tmp_path / "damaged", keep_unchecked=True).report
    assert report.files[0].state == "unreadable"
    assert [(tensor.name, tensor.holes) for tensor in report.lost] == [
        ("rows", (Box((0, 0), (6, 2)),))
    ]


# ---------------------------------------------------------------------------------------------
# Places
# ---------------------------------------------------------------------------------------------


@both
def test_other_storages_get_copies(damaged: Path) -> None:
    target = MemoryStorage()
    repair(damaged, target)
    checkpoint = remesh.Checkpoint(target)
    assert checkpoint.verify().ok
    assert not checkpoint.index.is_compressed
    assert checkpoint.read_array("large").tobytes() == truth()["large"].tobytes()


def test_copies_where_there_are_no_links(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def refuse(source: Path, new: Path) -> None:
        if new.suffix == ".safetensors":
            raise OSError(errno.EXDEV, "other device")
        link(source, new)

    monkeypatch.setattr(os, "link", refuse)
    report = repaired(damaged, keeps=ALL)
    new = the_file(Path(report.target), "00000.safetensors")
    assert not new.samefile(the_file(damaged, "00000.safetensors"))


def _occupied(damaged: Path) -> Path:
    target = damaged.with_name("occupied")
    target.mkdir()
    (target / "notes").write_text("mine")
    return target


@pytest.mark.parametrize(
    "target_of", [_occupied, lambda damaged: damaged, lambda damaged: damaged / "below"]
)
def test_a_target_that_is_not_free(damaged: Path, target_of: Callable[[Path], Path]) -> None:
    target = target_of(damaged)
    before = content_of(damaged.parent)
    with pytest.raises(CheckpointExistsError, match="choose another place"):
        repair(damaged, target)
    assert content_of(damaged.parent) == before


def test_several_saves(damaged: Path) -> None:
    record = remesh.Checkpoint(damaged).record
    other = damaged / "data-0123456789ab"
    other.mkdir()
    (other / "00000.safetensors").write_bytes(bytes(100))
    assert plan_repair(damaged).report.save_id == record.save_id
    (damaged / native.RECORD_NAME).unlink()
    with pytest.raises(CheckpointError, match="files of 2 saves") as caught:
        plan_repair(damaged)
    assert "0123456789ab" in str(caught.value)
    assert plan_repair(damaged, save_id=record.save_id).report.save_id == record.save_id
    with pytest.raises(CheckpointNotFoundError, match="no files of a save 'ffff'"):
        plan_repair(damaged, save_id="ffff")


def test_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nothing to repair"):
        repair(tmp_path, tmp_path.with_name("repaired"))
    folder = tmp_path / "data-0123456789ab"
    folder.mkdir()
    (folder / "00000.safetensors").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match="nothing can be saved"):
        repair(tmp_path, tmp_path.with_name("repaired"))
    assert not tmp_path.with_name("repaired").exists()


def test_a_failure_leaves_nothing_at_the_target(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object) -> None:
        raise remesh.StorageError("no")

    monkeypatch.setattr(native_writer, "build_index", fail)
    target = damaged.with_name("repaired")
    with pytest.raises(remesh.StorageError):
        repair(damaged, target)
    assert content_of(target) == {}


def test_pieces_that_contradict_each_other(tmp_path: Path) -> None:
    """Two files that both hold the same box: nobody knows which is right."""
    remesh.save({"a": np.ones(3), "b": np.ones(4)}, tmp_path / "damaged")
    file = the_file(tmp_path / "damaged", "00000.safetensors")
    shutil.copy(file, file.with_name("00001.safetensors"))
    (tmp_path / "damaged" / native.RECORD_NAME).unlink()
    the_file(tmp_path / "damaged", "index.safetensors").unlink()
    report = plan_repair(tmp_path / "damaged").report
    assert {tensor.name for tensor in report.lost} == {"a", "b"}
    assert all(tensor.holes == () for tensor in report.lost)
