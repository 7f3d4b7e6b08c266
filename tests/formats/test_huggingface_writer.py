"""Hugging Face weights, written from shards and read by the libraries that define them."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import remesh
from remesh.checkpoint import convert
from remesh.errors import CheckpointExistsError, StorageError
from remesh.exchange import Exchange
from remesh.pipeline import collect
from remesh.pipeline.write import CHUNK_SIZE
from remesh.storage import LocalStorage, MemoryStorage, open_storage
from remesh.training import export_weights
from tests.storage.object_servers import BUCKET, ENVIRONMENT, s3_server
from tests.support import run_processes, run_ranks

transformers = pytest.importorskip("transformers")

LIMIT = 4096


def llama(*, tied: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def write_in_ranks(exchange: Exchange, folder: Path) -> None:
    """Live FSDP2 modules, in one file and several, now and in the background."""
    mesh = init_device_mesh("cpu", (2,))
    for tied in (False, True):
        model = llama(tied=tied)
        config = json.loads(model.config.to_json_string())
        fully_shard(model.model.layers[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        place = folder / ("tied" if tied else "plain")
        remesh.save(model, place, format="huggingface", metadata=config)
        with remesh.Saver(
            format="huggingface", format_options={"max_shard_bytes": LIMIT}, writer="process"
        ) as saver:
            handle = saver.save_async(model, f"{place}-sharded", metadata=config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            handle.result()


def test_from_pretrained_reads_what_ranks_have_written(tmp_path: Path) -> None:
    run_processes(2, write_in_ranks, tmp_path)
    tokens = torch.arange(8)[None]
    for name in ("plain", "tied"):
        expected = llama(tied=name == "tied")
        expected.save_pretrained(tmp_path / "theirs" / name)
        theirs = load_file(tmp_path / "theirs" / name / "model.safetensors")
        for folder in (tmp_path / name, tmp_path / f"{name}-sharded"):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
            assert torch.equal(loaded(tokens).logits, expected(tokens).logits)
            files = sorted(folder.glob("*.safetensors"))
            ours = {key: value for file in files for key, value in load_file(file).items()}
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


def columns(rank: int, fill: int) -> dict[str, Any]:
    """Boxes whose rows are far apart in their tensor, of several element types."""
    wide = np.arange(4 * 6 * 5, dtype=np.float64).reshape(4, 6, 5) + fill
    narrow = (np.arange(4 * 6) % 7 + fill).astype(np.int8).reshape(4, 6)
    at = slice(0, 2) if rank == 0 else slice(2, 6)
    first = at.start
    return {
        "wide": remesh.ShardedTensor.at_offset(
            "wide", wide[:, at].copy(), (4, 6, 5), (0, first, 0)
        ),
        "narrow": remesh.ShardedTensor.at_offset(
            "narrow", narrow[:, at].copy(), (4, 6), (0, first)
        ),
    }


@pytest.mark.parametrize("limit", [10**6, 1])
def test_columns_are_written_in_place_and_replaced(limit: int, tmp_path: Path) -> None:
    options = {"max_shard_bytes": limit}

    def one(exchange: Exchange) -> None:
        for fill in (0, 1):
            remesh.save(
                columns(exchange.rank, fill), tmp_path, format="huggingface",
                format_options=options, overwrite=fill > 0, group=exchange,
            )  # fmt: skip

    run_ranks(2, one)
    files = sorted(tmp_path.glob("*"))
    assert len(files) == (1 if limit > 1 else 3)
    found = {k: v for file in files if file.suffix != ".json" for k, v in load_file(file).items()}
    assert found["wide"].flatten().tolist() == (np.arange(120.0) + 1).tolist()
    assert found["narrow"].flatten().tolist() == (np.arange(24) % 7 + 1).tolist()
    remesh.save({"w": torch.ones(2)}, tmp_path, format="safetensors", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


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
                state = cut(exchange.rank, fill)
                saved: Any = {"overwrite": fill > 0, "metadata": {"model_type": "mine"}}
                if in_background:
                    handle = saver.save_async(state, storage, **saved)
                    for value in state.values():
                        is_cut = isinstance(value, remesh.ShardedTensor)
                        array: Any = value.parts[0].data if is_cut else value
                        array[...] = -1
                    handle.result()
                else:
                    saver.save(state, storage, **saved)

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
            if in_background:
                saver.save_async(cut(exchange.rank, 0), storage).result()
            else:
                saver.save(cut(exchange.rank, 0), storage)
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
        state = cut(exchange.rank, 0)
        saver = remesh.Saver(group=exchange, format="huggingface")

        def save() -> None:
            if in_background:
                saver.save_async(state, storage)
                saver.close()
            else:
                saver.save(state, storage)

        with pytest.raises(StorageError, match="denied"):
            save()

    run_ranks(3, one)
    assert [path for path in storage.list() if not path.endswith("failed.msgpack")] == []


def to_bucket(exchange: Exchange, bucket: str, endpoint: str) -> None:
    """A model that FSDP2 has cut, in a bucket: saved, in the background, and exported."""
    os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=endpoint)
    model = llama(tied=True)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    config = json.loads(model.config.to_json_string())
    options = {"max_shard_bytes": LIMIT}
    remesh.save(
        model, f"{bucket}/saved", format="huggingface", format_options=options, metadata=config
    )
    remesh.save(model, f"{bucket}/single", format="torch_file")
    with remesh.Saver(format="huggingface", writer="process") as saver:
        handle = saver.save_async(model, f"{bucket}/background", metadata=config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        handle.result()
    model = llama(tied=True)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    export_weights(
        {"model": model}, f"{bucket}/exported", dtype=None, max_file_bytes=LIMIT, config=config
    )


@pytest.mark.slow
def test_shards_go_to_a_bucket(tmp_path: Path) -> None:
    """Written by two processes to a server of S3, and read by `from_pretrained`."""
    model = llama(tied=True)
    expected = dict(model.state_dict())
    tokens = torch.arange(8)[None]
    with s3_server() as server:
        bucket = f"s3://{BUCKET}"
        run_processes(2, to_bucket, bucket, server.endpoint)
        for name in ("saved", "background", "exported"):
            assert remesh.Checkpoint(f"{bucket}/{name}").format == "huggingface"
            (tmp_path / name).mkdir()
            storage = open_storage(f"{bucket}/{name}")
            for path in storage.list():
                (tmp_path / name / path).write_bytes(storage.read(path))
        single = torch.load(
            io.BytesIO(open_storage(f"{bucket}/single").read("state.pt")), weights_only=True
        )
        assert server.uploads() == []
    assert all(torch.equal(value, expected[key]) for key, value in single.items())
    for name in ("saved", "background", "exported"):
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        assert all(torch.equal(value, expected[key]) for key, value in found.state_dict().items())
        assert torch.equal(found(tokens).logits, model(tokens).logits)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2


def test_a_conversion_to_an_object_store(tmp_path: Path) -> None:
    remesh.save({"w": torch.arange(6.0)}, tmp_path)
    storage = MemoryStorage()
    convert(tmp_path, storage, format="huggingface")
    assert remesh.Checkpoint(storage)["w"].tolist() == list(range(6))


class OwnDisk(LocalStorage):
    """A disk of a node, which has the path that all nodes use."""

    @property
    def url(self) -> str:
        return "/checkpoints/weights"

    def space(self) -> None:
        return None


def test_disks_of_nodes_are_not_taken_for_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node would find a file of the whole size, with only its own bytes in it."""
    monkeypatch.setattr("remesh.checkpoint.sharing.PATIENCE_SECONDS", 0.0)

    def one(exchange: Exchange) -> None:
        place = OwnDisk(tmp_path / str(exchange.rank))
        with pytest.raises(remesh.errors.NotSharedError):
            remesh.save(columns(exchange.rank, 0), place, format="huggingface", group=exchange)

    run_ranks(2, one)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
