"""Hugging Face weights, written from shards and read by the libraries that define them."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file
from torch.distributed.device_mesh import init_device_mesh

import remesh
from remesh.checkpoint import convert
from remesh.errors import CheckpointExistsError, StorageError
from remesh.exchange import Exchange
from remesh.pipeline import collect
from remesh.pipeline.write import CHUNK_SIZE
from remesh.storage import MemoryStorage, Storage
from remesh.training import export_weights
from tests.engine.test_shared_place import OwnDisk
from tests.recipes.models import logits_of, make, read_by_transformers, shard, tensors_in
from tests.support import run_processes, run_ranks

pytest.importorskip("transformers")

LIMIT = 4096


KINDS = ("Llama", "tied Llama")


def write_in_ranks(exchange: Exchange, root: Path) -> None:
    """Live FSDP2 modules: in one file and several, now, in the background, and exported."""
    mesh = init_device_mesh("cpu", (2,))
    for kind in KINDS:
        model, place = make(kind, 0), str(root / kind)
        config = json.loads(model.config.to_json_string())
        shard(model, "fsdp", mesh)
        remesh.save(model, place, format="huggingface", metadata=config)
        remesh.save(model, f"{place}-single", format="torch_file")
        export_weights(
            {"model": model}, f"{place}-exported", dtype=None, max_file_bytes=LIMIT, config=config
        )
        with remesh.Saver(
            format="huggingface", format_options={"max_shard_bytes": LIMIT}, writer="process"
        ) as saver:
            handle = saver.save_async(model, f"{place}-sharded", metadata=config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            handle.result()


def check_written(root: Path) -> None:
    """`from_pretrained` reads what ranks have written, and it is what `save_pretrained` writes."""
    for kind in KINDS:
        expected = make(kind, 0)
        expected.save_pretrained(root / "theirs" / kind)
        theirs = tensors_in(root / "theirs" / kind)
        for folder in (root / kind, root / f"{kind}-exported", root / f"{kind}-sharded"):
            assert torch.equal(logits_of(read_by_transformers(folder)), logits_of(expected))
            files, ours = sorted(folder.glob("*.safetensors")), tensors_in(folder)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)
            assert remesh.Checkpoint(folder).format == "huggingface"
            left = {path.name for path in folder.iterdir()} - {file.name for file in files}
            index = {"model.safetensors.index.json"} if len(files) > 1 else set()
            assert left == {"config.json", *index}
        sizes = [sum(t.nbytes for t in load_file(file).values()) for file in files]
        assert len(files) > 2
        assert max(sizes) <= LIMIT
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(sizes)
        single = torch.load(root / f"{kind}-single" / "state.pt", weights_only=True)
        assert all(torch.equal(single[key], one) for key, one in expected.state_dict().items())


def test_from_pretrained_reads_what_ranks_have_written(tmp_path: Path) -> None:
    run_processes(2, write_in_ranks, tmp_path)
    check_written(tmp_path)


def whole(fill: int) -> dict[str, Any]:
    """Tensors longer than a chunk, one that all ranks have, one of rank 1, an empty one."""
    return {
        "wide": np.arange(1_050_000, dtype=np.float32).reshape(700, 1500) + fill,
        "tall": np.arange(1_500_000, dtype=np.int16).reshape(1500, 1000) + np.int16(fill),
        "same": np.arange(5.0) + fill,
        "alone": np.full((3, 3), fill, np.float16),
        "empty": np.zeros((0, 2), np.float32),
    }


def cut(rank: int, fill: int) -> dict[str, Any]:
    """What one of three ranks has of it: columns and rows of the long ones."""
    state, few = whole(fill), slice(500 * rank, 500 * (rank + 1))
    wide, tall = state["wide"], state["tall"]
    state["wide"] = remesh.ShardedTensor.at_offset(
        "wide", wide[:, few].copy(), wide.shape, (0, few.start)
    )
    state["tall"] = remesh.ShardedTensor.at_offset(
        "tall", tall[few].copy(), tall.shape, (few.start, 0)
    )
    if rank != 1:
        del state["alone"]
    return state


def check(found: dict[str, Any], fill: int) -> None:
    expected = whole(fill)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(np.asarray(found[name]), value), name


@pytest.mark.parametrize("limit", [10**9, 4_000_000])
def test_tensors_are_written_in_place_and_replaced(limit: int, tmp_path: Path) -> None:
    options = {"max_shard_bytes": limit}

    def one(exchange: Exchange) -> None:
        for fill in (0, 1):
            remesh.save(
                cut(exchange.rank, fill), tmp_path, format="huggingface",
                format_options=options, overwrite=fill > 0, group=exchange,
            )  # fmt: skip

    run_ranks(3, one)
    assert len(list(tmp_path.iterdir())) == (1 if limit == 10**9 else 3)
    check(tensors_in(tmp_path), 1)
    remesh.save({"w": torch.ones(2)}, tmp_path, format="safetensors", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def save(saver: remesh.Saver, state: dict[str, Any], storage: Storage, **options: Any) -> None:
    """Save now or in the background, by which time the state is another one."""
    if options.pop("in_background"):
        handle = saver.save_async(state, storage, **options)
        for value in state.values():
            is_cut = isinstance(value, remesh.ShardedTensor)
            array: Any = value.parts[0].data if is_cut else value
            array[...] = -1
        handle.result()
    else:
        saver.save(state, storage, **options)


@pytest.mark.parametrize("limit", [10**9, 4_000_000])
@pytest.mark.parametrize("in_background", [False, True])
def test_tensors_are_collected_for_an_object_store(
    limit: int, in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket has no files of several writers: each file is written by one rank."""
    monkeypatch.setattr(collect, "ROUND_BYTES", CHUNK_SIZE)
    storage = MemoryStorage()
    options = {"max_shard_bytes": limit}

    def one(exchange: Exchange) -> None:
        with remesh.Saver(group=exchange, format="huggingface", format_options=options) as saver:
            for fill in (0, 1):
                how: Any = {"in_background": in_background, "overwrite": fill > 0}
                state = cut(exchange.rank, fill)
                save(saver, state, storage, metadata={"model_type": "mine"}, **how)

    run_ranks(3, one)
    places = json.loads(storage.read("model.safetensors.index.json"))["weight_map"]
    files = {*places.values()}
    left = {*storage.list()} - {"model.safetensors.index.json", "config.json"}
    assert left == files, "files of the first save are left"
    assert len(files) == (1 if limit == 10**9 else 2)
    found = {name: value for path in files for name, value in load(storage.read(path)).items()}
    assert {name: places[name] for name in found} == places
    check(found, 1)
    stored = remesh.Checkpoint(storage)
    assert stored.format == "huggingface"
    check({name: stored[name] for name in stored}, 1)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("name", ["safetensors", "torch_file"])
def test_a_single_file_in_an_object_store(
    name: str, in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank writes it, and it is there until another one is."""
    monkeypatch.setattr(collect, "ROUND_BYTES", CHUNK_SIZE)
    storage = MemoryStorage()
    file = {"safetensors": "model.safetensors", "torch_file": "state.pt"}[name]
    olds: list[bytes] = []

    def one(exchange: Exchange) -> None:
        with remesh.Saver(group=exchange, format=name) as saver:
            save(saver, cut(exchange.rank, 0), storage, in_background=in_background)
            olds.append(storage.read(file))
            with pytest.raises(CheckpointExistsError, match="already"):
                saver.save(cut(exchange.rank, 1), storage)
            saver.save(cut(exchange.rank, 1), storage, overwrite=True)
            exchange.all_gather(b"")
            if exchange.rank == 0:
                assert storage.read(file) != olds[0]
            exchange.all_gather(b"")
            saver.save(cut(exchange.rank, 0), storage, overwrite=True)

    run_ranks(3, one)
    [path] = storage.list()
    content = storage.read(path)
    assert content == olds[0]
    is_torch = name == "torch_file"
    found = torch.load(io.BytesIO(content), weights_only=True) if is_torch else load(content)
    check(found, 0)
    if is_torch:
        assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None
    remesh.save({"w": torch.ones(2)}, storage, overwrite=True)
    assert path not in storage.list()


@pytest.mark.parametrize("index", [b'{"weight_map": {"w": "\xa2"}}', b"{", b"[" * 10**5])
def test_an_index_that_cannot_be_read_is_replaced(index: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    remesh.save({"w": torch.ones(2)}, tmp_path, format="huggingface", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors"]
    assert remesh.Checkpoint(tmp_path).read_array("w").tolist() == [1, 1]


def test_the_file_of_another_writer_stays() -> None:
    """A save that finds, too late, that another one was first."""

    class Overtaken(MemoryStorage):
        def create(self, path: str, num_bytes: int, *, overwrite: bool = False) -> Any:
            self.put(path, b"theirs", overwrite=False)
            return super().create(path, num_bytes, overwrite=overwrite)

    storage = Overtaken()

    def one(exchange: Exchange) -> None:
        with pytest.raises(StorageError, match="exists"):
            remesh.save(cut(exchange.rank, 0), storage, format="safetensors", group=exchange)

    run_ranks(3, one)
    assert storage.read("model.safetensors") == b"theirs"


class NoObject(MemoryStorage):
    """A store that takes no files of tensors."""

    def create(self, path: str, num_bytes: int, *, overwrite: bool = False) -> Any:
        raise StorageError(f"{path}: denied")


@pytest.mark.parametrize("in_background", [False, True])
def test_a_failure_of_one_writer_is_raised_by_all(
    in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "ROUND_BYTES", CHUNK_SIZE)
    storage = NoObject()

    def one(exchange: Exchange) -> None:
        saver = remesh.Saver(group=exchange, format="huggingface")
        with pytest.raises(StorageError, match="denied"):
            save(saver, cut(exchange.rank, 0), storage, in_background=in_background)

    run_ranks(3, one)
    assert [path for path in storage.list() if not path.endswith("failed.msgpack")] == []


def test_a_conversion_to_an_object_store(tmp_path: Path) -> None:
    remesh.save({"w": torch.arange(6.0)}, tmp_path)
    storage = MemoryStorage()
    convert(tmp_path, storage, format="huggingface")
    assert remesh.Checkpoint(storage)["w"].tolist() == list(range(6))


def test_disks_of_nodes_are_not_taken_for_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node would find a file of the whole size, with only its own bytes in it."""
    monkeypatch.setattr("remesh.checkpoint.sharing.PATIENCE_SECONDS", 0.0)

    def one(exchange: Exchange) -> None:
        place = OwnDisk(tmp_path / str(exchange.rank))
        with pytest.raises(remesh.errors.NotSharedError):
            remesh.save(cut(exchange.rank, 0), place, format="huggingface", group=exchange)

    run_ranks(3, one)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
