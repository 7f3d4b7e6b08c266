"""Frozen files that did not change are not written again, and every checkpoint stands alone."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import remesh
from remesh.checkpoint import unchanged
from remesh.core.state import Description, Role, TensorEntry
from remesh.events import Event
from remesh.exchange import Exchange
from remesh.pipeline import Compress
from remesh.storage import LocalStorage, MemoryStorage, Storage
from tests.engine.scenes import all_are, errors_of, share_of
from tests.support import InjectedError, run_ranks

WIDTH = 1088


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "MIN_BYTES", 1 << 10)


class Adapted(nn.Module):
    """A frozen layer and a small one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = self.base(x) + self.adapter(x)
        return whole


def training() -> tuple[Adapted, dict[str, Any], Callable[[], None]]:
    torch.manual_seed(0)
    model = Adapted()
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad]
    )

    def step() -> None:
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, {"model": model, "optimizer": optimizer}, step


class Bytes:
    """A listener that adds up what all ranks have written and kept."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.kept: list[int] = []

    def __call__(self, event: Event) -> None:
        if event.point == "save.parts_gathered":
            self.written.append(event.num_bytes)
        elif event.point == "save.kept":
            self.kept.append(event.num_bytes)


def data_bytes(path: Path) -> int:
    return sum(file.num_bytes for file in remesh.Checkpoint(path).index.files)


def tensors_of(path: Path | Storage) -> dict[str, bytes]:
    checkpoint = remesh.Checkpoint(path)
    assert checkpoint.verify().ok
    return {name: checkpoint.read_array(name).tobytes() for name in checkpoint.index}


Way = Literal["save", "thread", "process"]


def save_with(
    saver: remesh.Saver, way: Way, state: Any, path: Any, **options: Any
) -> remesh.checkpoint.SaveReport:
    if way == "save":
        return saver.save(state, path, **options)
    return saver.save_async(state, path, **options).result(timeout=240)


def saver_of(way: Way, **options: Any) -> remesh.Saver:
    return remesh.Saver(writer="process" if way == "process" else "thread", **options)


@pytest.mark.parametrize(
    ("way", "compress"),
    [("save", None), ("save", "zstd"), ("thread", None), ("process", "zstd")],
)
def test_an_adapter_run_writes_the_adapter(
    way: Way, compress: Compress | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "remesh")
    model, state, step = training()
    seen, expected = Bytes(), []
    with saver_of(way, on_event=seen, compress=compress) as saver:
        for number in range(3):
            step()
            report = save_with(saver, way, state, tmp_path / str(number))
            assert (report.bytes_written, report.bytes_kept) == (seen.written[-1], seen.kept[-1])
            expected.append(model.state_dict()["adapter.0.weight"].numpy().tobytes())
    base = model.state_dict()["base.weight"].numpy().tobytes()
    whole = data_bytes(tmp_path / "0")
    assert seen.written[0] == whole
    assert seen.kept[0] == 0
    for number in (1, 2):
        assert seen.written[number] <= 0.02 * whole
        assert seen.written[number] + seen.kept[number] == data_bytes(tmp_path / str(number))
    assert f"; {seen.kept[2] / 1e6:.1f} MB did not change: " in caplog.messages[-1]
    assert len({path.stat().st_ino for path in tmp_path.glob("*/data-*/*-1.safetensors")}) == 1
    # Each checkpoint stands alone: it can be moved, and the others removed.
    moved = tmp_path / "moved"
    (tmp_path / "1").rename(moved)
    shutil.rmtree(tmp_path / "0")
    for place, adapter in ((moved, expected[1]), (tmp_path / "2", expected[2])):
        stored = tensors_of(place)
        assert stored["model.base.weight"] == base
        assert stored["model.adapter.0.weight"] == adapter
        assert remesh.Checkpoint(place).index.is_compressed == (compress is not None)


def test_the_frozen_part_may_change_after_all(tmp_path: Path) -> None:
    model, state, _ = training()
    seen = Bytes()
    with remesh.Saver(on_event=seen) as saver:
        for number in range(5):
            if number in (1, 2):
                with torch.no_grad():
                    model.base.weight[WIDTH // 2, 0] += 1
            saver.save(state, tmp_path / str(number))
            stored = tensors_of(tmp_path / str(number))["model.base.weight"]
            assert stored == model.base.weight.numpy().tobytes()
    assert [kept > 0 for kept in seen.kept] == [False, False, False, True, True]


def frozen_part(exchange: Exchange, whole: np.ndarray[Any, Any], dim: int) -> Description:
    """A rank's share of a frozen tensor that is cut in one dim."""
    parts = share_of("w", whole, exchange.rank, exchange.world_size, dim).parts
    entry = TensorEntry("w", "float32", whole.shape, parts, Role.MAIN, is_frozen=True)
    return Description(tensors=[entry])


def test_ranks_keep_their_files_until_the_layout_changes(tmp_path: Path) -> None:
    seen, whole = Bytes(), np.arange(1024 * 1024, dtype=np.float32).reshape(1024, 1024)

    def save(exchange: Exchange) -> None:
        with remesh.Saver(group=exchange, on_event=seen) as saver:
            for number, dim in enumerate([0, 0, 0, 1, 0]):  # rows over ranks, or columns
                saver.save(frozen_part(exchange, whole, dim), tmp_path / str(number))

    run_ranks(2, save)
    assert [kept > 0 for kept in seen.kept] == [False, True, True, False, False]
    for number in range(5):
        assert data_bytes(tmp_path / str(number)) == seen.written[number] + seen.kept[number]
        assert tensors_of(tmp_path / str(number))["w"] == whole.tobytes()


def test_a_last_checkpoint_that_is_gone_or_cut_short_is_not_needed(tmp_path: Path) -> None:
    _, state, _ = training()
    with remesh.Saver() as saver:
        for number in range(3):
            path = tmp_path / str(number)
            saver.save(state, path)
            assert remesh.Checkpoint(path).verify().ok
            if number == 0:
                shutil.rmtree(path)
            elif number == 1:
                for file in path.glob("data-*/*-1.safetensors"):
                    os.truncate(file, 1000)


def test_a_place_is_overwritten_with_files_of_its_own(tmp_path: Path) -> None:
    _, state, _ = training()
    seen = Bytes()
    with remesh.Saver(on_event=seen) as saver:
        for _ in range(3):
            saver.save(state, tmp_path / "latest", overwrite=True)
    assert seen.kept[1:] == [seen.kept[1]] * 2
    assert seen.kept[1] > 0
    assert remesh.Checkpoint(tmp_path / "latest").verify().ok
    assert len(list((tmp_path / "latest").glob("data-*"))) == 1


class NoLinks(LocalStorage):
    def link_from(self, source: Storage, path: str, new: str, num_bytes: int) -> bool:
        return False


def test_what_cannot_be_copied_is_written(tmp_path: Path) -> None:
    _, state, _ = training()
    seen = Bytes()
    places: list[Storage] = [NoLinks(tmp_path / "0"), NoLinks(tmp_path / "1"), MemoryStorage()]
    with remesh.Saver(on_event=seen) as saver:
        for place in places:
            saver.save(state, place)
            assert remesh.Checkpoint(place).verify().ok
    assert seen.kept == [0, 0, 0]


def test_a_link_whose_answer_got_lost_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def link_late(*args: Any) -> None:
        link(*args)
        raise OSError(errno.EIO, "the answer got lost")

    monkeypatch.setattr(os, "link", link_late)
    storage = LocalStorage(tmp_path)
    (tmp_path / "first").write_bytes(b"content")
    assert storage.link_from(storage, "first", "second", 7)
    assert storage.read("second") == b"content"
    assert not storage.link_from(storage, "absent", "third", 7)
    assert not (tmp_path / "third").exists()


def fail_on_rank_1(exchange: Exchange, root: Path, way: Way) -> None:
    """Two saves go well; in the third, rank 1 cannot begin, but rank 0 has links already."""
    state = frozen_part(exchange, np.zeros((1024, 1024), np.float32), 0)
    saver = remesh.Saver(group=exchange)
    for number in range(3):
        save_with(saver, way, state, root / str(number))

    def fail(*_args: Any, **_options: Any) -> Any:
        raise InjectedError("no threads")

    if exchange.rank == 1:
        saver._start = fail  # type: ignore[method-assign]
    save_with(saver, way, state, root / "3")


def test_links_of_a_save_that_could_not_begin_are_removed(tmp_path: Path) -> None:
    all_are(errors_of(2, fail_on_rank_1, tmp_path, "thread"), Exception, "no threads")
    assert not [path for path in (tmp_path / "3").rglob("*") if path.is_file()]
    assert remesh.Checkpoint(tmp_path / "2").verify().ok
