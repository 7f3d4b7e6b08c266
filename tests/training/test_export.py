"""Weights for inference: written from live shards and from checkpoints, read by other libraries."""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file
from torch import nn

import remesh
from remesh.core.dtypes import BY_NAME, DTYPES
from remesh.errors import StateError, StorageError, UnsupportedValueError
from remesh.exchange import Exchange, ThreadExchange
from remesh.formats.whole_tensors import (
    FileTensor,
    WholeFile,
    WholeFiles,
    decode_files,
    give_to_ranks,
    split_into_files,
)
from remesh.pipeline import collect
from remesh.pipeline.write import CHUNK_SIZE
from remesh.storage import Buffer, LocalStorage, MemoryStorage
from remesh.storage.local import LocalWriter
from remesh.training.export import export_weights
from tests.recipes.models import make
from tests.support import Fail, FaultyStorage, run_processes, run_ranks


class Small(nn.Module):
    """A model with tied weights, a buffer of integers and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.body = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("steps", torch.arange(5))


def small_model(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small()


def halves(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.half() if value.is_floating_point() else value.clone()
        for name, value in model.state_dict().items()
    }


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value)
        for name, value in expected.items()
    )


def untied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if name != "head.weight"}


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory of safetensors files, found by its index."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors = load_file(directory / file)
        assert all(index["weight_map"][name] == file for name in tensors)
        found |= tensors
    assert found.keys() == index["weight_map"].keys()
    sizes = [value.numel() * value.itemsize for value in found.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    return found


# ---------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------

file_tensors = st.builds(
    FileTensor,
    name=st.just("w"),
    dtype=st.sampled_from(["float16", "float32", "int64", "bool"]),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
)


@given(st.lists(file_tensors, max_size=12), st.integers(1, 400))
def test_files_hold_every_tensor_once_and_no_more_than_the_limit(
    tensors: list[FileTensor], limit: int
) -> None:
    files = split_into_files(tensors, limit)
    found = [tensor for file in files for tensor in file]
    assert sorted(map(id, found)) == sorted(map(id, tensors))
    for file in files:
        assert len(file) == 1 or sum(tensor.num_bytes for tensor in file) <= limit
        sizes = [BY_NAME[tensor.dtype].itemsize for tensor in file]
        assert sizes == sorted(sizes, reverse=True)
    assert len(split_into_files(tensors, None)) == (1 if tensors else 0)


# ---------------------------------------------------------------------------------------------
# One process
# ---------------------------------------------------------------------------------------------


def test_a_module_as_safetensors(tmp_path: Path) -> None:
    model = small_model()
    report = export_weights(model, tmp_path, dtype=torch.float16)
    assert report.files == ("model.safetensors",)
    assert report.tied == {"head.weight": "embed.weight"}
    assert same(load_file(tmp_path / "model.safetensors"), untied(halves(model)))
    assert report.num_bytes == (40 * 8 + 24 * 8 + 24 + 8 * 24 + 8 + 1) * 2 + 5 * 8
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"weights_only": False}])
def test_a_module_as_pth(tmp_path: Path, options: dict[str, Any]) -> None:
    model = small_model()
    report = export_weights(model, tmp_path, dtype="float16", format="pth", name="full_sft_512")
    assert report.files == ("full_sft_512.pth",)
    found = torch.load(tmp_path / "full_sft_512.pth", **options)
    assert same(found, halves(model))
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert zipfile.ZipFile(tmp_path / "full_sft_512.pth").testzip() is None
    small_model(1).half().load_state_dict(found)


def test_a_checkpoint(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    remesh.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    report = export_weights(tmp_path / "c", tmp_path / "a", dtype="float16", max_file_bytes=500)
    assert report.files == tuple(f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4))
    assert same(load_all(tmp_path / "a"), untied(halves(model)))
    export_weights(str(tmp_path / "c"), tmp_path / "b", format="pth")
    assert same(torch.load(tmp_path / "b/model.pth"), dict(model.state_dict()))
    remesh.save(model, tmp_path / "bare")
    export_weights(tmp_path / "bare", tmp_path / "d", entry=None, dtype="bfloat16")
    found = load_file(tmp_path / "d/model.safetensors")
    assert torch.equal(found["body.0.weight"], model.state_dict()["body.0.weight"].bfloat16())


def test_weights_of_another_system(tmp_path: Path) -> None:
    model = small_model()
    export_weights(model, tmp_path / "a", dtype="float16", format="pth")
    export_weights(tmp_path / "a" / "model.pth", tmp_path / "b", entry=None)
    assert same(untied(load_file(tmp_path / "b/model.safetensors")), untied(halves(model)))


def test_names_are_the_callers_business(tmp_path: Path) -> None:
    model = small_model()

    def rename(name: str) -> str | None:
        return None if name.startswith("body") else f"net.{name}"

    export_weights(model, tmp_path, names=rename)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == {"net.embed.weight", "net.scale", "net.steps"}
    # Where the first name of tied weights is left out, the other one stands for them.
    export_weights(model, tmp_path, names=lambda name: name if name == "head.weight" else None)
    assert list(load_file(tmp_path / "model.safetensors")) == ["head.weight"]
    with pytest.raises(StateError, match="scale and steps would both be called w"):
        export_weights(model, tmp_path, names=lambda _name: "w")


def test_what_is_exported_replaces_what_was(tmp_path: Path) -> None:
    export_weights(small_model(0), tmp_path, max_file_bytes=500)
    (tmp_path / "other.safetensors").write_bytes(b"stays")
    (tmp_path / "model.safetensors.0123456789ab").write_bytes(b"of one that was killed")
    export_weights(small_model(1), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.safetensors",
        "other.safetensors",
    ]
    export_weights(small_model(2), tmp_path, dtype="float16", max_file_bytes=1000)
    assert not (tmp_path / "model.safetensors").exists()
    assert same(load_all(tmp_path), untied(halves(small_model(2))))


def test_a_configuration(tmp_path: Path) -> None:
    class Config:
        def to_dict(self) -> dict[str, object]:
            return {"hidden_size": 8}

    export_weights(small_model(), tmp_path, config={"hidden_size": 512})
    assert json.loads((tmp_path / "config.json").read_text()) == {"hidden_size": 512}
    export_weights(small_model(), tmp_path, config=Config())
    assert json.loads((tmp_path / "config.json").read_text()) == {"hidden_size": 8}


@pytest.mark.parametrize("said", ["dtype", "torch_dtype"])
def test_a_configuration_says_the_dtype_of_the_files(tmp_path: Path, said: str) -> None:
    config = {said: "float32"}
    export_weights(small_model(), tmp_path, dtype="bfloat16", config=config)
    assert json.loads((tmp_path / "config.json").read_text()) == {said: "bfloat16"}
    assert config == {said: "float32"}
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    export_weights(mixed, tmp_path, config=config)
    assert json.loads((tmp_path / "config.json").read_text()) == config
    assert same(load_file(tmp_path / "model.safetensors"), dict(mixed.state_dict()))


class Watched(MemoryStorage):
    """A store that can be read at any time: after each change, an export is there, whole."""

    is_watched = False

    def check(self) -> None:
        names = self.list()
        index = [name for name in names if name.endswith(".index.json")]
        maps = [json.loads(self.read(name))["weight_map"] for name in index]
        places = {file for one in maps for file in one.values()}
        single = {"qwen-7b.safetensors", "qwen-7b.pth"} & {*names}
        assert not self.is_watched or single or (places and places <= {*names}), names

    def delete(self, path: str) -> None:
        super().delete(path)
        self.check()

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        super().put(path, data, overwrite=overwrite)
        self.check()

    def _end(self, path: str, content: Buffer | None) -> None:
        super()._end(path, content)
        self.check()


@pytest.mark.parametrize("limits", [(500, 500), (500, 10**6), (10**6, 500), (10**6, 10**6)])
def test_in_an_object_store_the_old_export_is_there_until_the_new_one_is(
    limits: tuple[int, int],
) -> None:
    storage = Watched()
    beside = "qwen-7b-202401011200-00001-of-00002.safetensors"  # of an export of that name
    storage.put(beside, b"", overwrite=False)
    for seed, limit in enumerate(limits):
        model = small_model(seed)
        report = export_weights(
            model, storage, dtype="float16", name="qwen-7b", max_file_bytes=limit
        )
        storage.is_watched = True
        index = ["qwen-7b.safetensors.index.json"] if limit == 500 else []
        assert len(report.files) == (4 if limit == 500 else 1)
        assert {*storage.list()} == {*report.files, *index, beside}
        found = {n: w for file in report.files for n, w in load(storage.read(file)).items()}
        del found["head.weight" if "head.weight" in found else "embed.weight"]
        assert all(torch.equal(found[name], halves(model)[name]) for name in found)


def test_a_pth_file_in_an_object_store_is_replaced_when_the_new_one_is_whole() -> None:
    storage = Watched()
    for seed in (0, 1):
        export_weights(small_model(seed), storage, dtype="float16", name="qwen-7b", format="pth")
        storage.is_watched = True
    found = torch.load(io.BytesIO(storage.read("qwen-7b.pth")))
    assert same(found, halves(small_model(1)))


@pytest.mark.parametrize("format", ["safetensors", "pth"])
def test_an_export_that_fails_leaves_the_old_one(format: Literal["safetensors", "pth"]) -> None:  # noqa: A002
    storage = MemoryStorage()
    export_weights(small_model(), storage, format=format)
    [path] = storage.list()
    old = storage.read(path)
    failing = FaultyStorage(storage, [Fail("write", path)])
    with pytest.raises(StorageError, match="injected"):
        export_weights(small_model(1), failing, format=format)
    assert storage.list() == [path]
    assert storage.read(path) == old


# ---------------------------------------------------------------------------------------------
# What cannot be exported
# ---------------------------------------------------------------------------------------------


def test_values_beyond_the_dtype_are_refused(tmp_path: Path) -> None:
    export_weights({"model": {"w": torch.ones(200)}}, tmp_path, dtype="float16")
    large = {"model": {"w": torch.full((200,), 70000.0)}}
    with pytest.raises(StateError, match="w: has values beyond float16, whose largest number is 6"):
        export_weights(large, tmp_path, dtype="float16")
    with pytest.raises(StateError, match="w: has values beyond float8_e4m3fn, whose largest"):
        export_weights(large, tmp_path, dtype="float8_e4m3fn")
    with pytest.raises(StateError, match="w: has values beyond float32, whose largest"):
        export_weights(
            {"model": {"w": torch.tensor([1e300], dtype=torch.float64)}}, tmp_path, dtype="float32"
        )
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], torch.ones(200).half())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    export_weights(large, tmp_path, dtype="bfloat16")
    assert load_file(tmp_path / "model.safetensors")["w"][0] == 70144.0
    mask = torch.tensor([1.0, -torch.inf])  # infinite before it is converted, if it is
    for weight in (mask, mask.half()):
        export_weights({"model": {"w": weight}}, tmp_path, dtype="float16")
        assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], mask.half())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exported", [None, "float32", "float16", "float8_e5m2"])
def test_values_that_are_infinite_may_stay_so(
    tmp_path: Path, dtype: torch.dtype, exported: str | None
) -> None:
    mask = torch.full((9, 9), -math.inf, dtype=dtype).triu(1)
    export_weights({"model": {"mask": mask}}, tmp_path, dtype=exported)
    found = load_file(tmp_path / "model.safetensors")["mask"]
    assert torch.equal(found.double(), mask.double())


def test_states_without_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no weights in entry 'model'; the state has net, step"):
        export_weights({"net": small_model(), "step": 1}, tmp_path)
    remesh.save({"net": small_model()}, tmp_path / "c")
    with pytest.raises(StateError, match=r"the state has net\nName the one"):
        export_weights(tmp_path / "c", tmp_path)
    with pytest.raises(StateError, match="cannot be exported as int8"):
        export_weights(small_model(), tmp_path, dtype="int8")
    with pytest.raises(ValueError, match="'safetensors' or 'pth', got 'onnx'"):
        export_weights(small_model(), tmp_path, format="onnx")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'step_1/model': .* has no '/'"):
        export_weights(small_model(), tmp_path, name="step_1/model")


@pytest.mark.parametrize("name", [dtype.name for dtype in DTYPES if dtype.is_opaque])
@pytest.mark.parametrize("kind", ["safetensors", "pth"])
def test_types_that_are_names_for_bytes_are_not_called_integers(
    name: str, kind: Literal["safetensors", "pth"], tmp_path: Path
) -> None:
    state = {"model": {"z": torch.zeros(2, dtype=getattr(torch, name)), "w": torch.ones(2)}}
    for dtype in (None, "bfloat16"):
        with pytest.raises(
            UnsupportedValueError, match=rf"(?s)z: weight files have no name .*{name}\n"
        ):
            export_weights(state, tmp_path, format=kind, dtype=dtype)
    export_weights(state, tmp_path, format=kind, names=lambda own: None if own == "z" else own)


def test_types_that_a_format_has_no_name_for(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match=r"(?s)z: a safetensors file .* complex128"):
        export_weights({"model": {"z": torch.zeros(2, dtype=torch.complex128)}}, tmp_path)
    export_weights(
        {"model": {"z": torch.ones(2, dtype=torch.complex128), "e": torch.zeros(0, 3)}},
        tmp_path,
        format="pth",
    )
    found = torch.load(tmp_path / "model.pth")
    assert torch.equal(found["z"], torch.ones(2, dtype=torch.complex128))
    assert found["e"].shape == (0, 3)


# ---------------------------------------------------------------------------------------------
# Several ranks
# ---------------------------------------------------------------------------------------------


class NoRoom(LocalStorage):
    """A directory in which one file cannot be made."""

    def open_shared(self, path: str, num_bytes: int) -> LocalWriter:
        if "00002-of" in path:
            raise StorageError("no room for this one")
        return super().open_shared(path, num_bytes)


def test_a_failure_on_one_rank_is_one_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    storage = NoRoom(tmp_path)

    def run(exchange: ThreadExchange) -> str:
        state = {"model": {f"w{n}": torch.full((50,), float(n)) for n in range(4)}}
        with pytest.raises(StorageError, match="no room for this one") as caught:
            export_weights(state, storage, max_file_bytes=100, group=exchange)
        return str(caught.value)

    assert len(run_ranks(3, run)) == 3
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_hold_different_layers(tmp_path: Path) -> None:
    """As in pipeline parallelism: nobody knows all names."""

    def run(exchange: ThreadExchange) -> tuple[str, ...]:
        state = {"model": {f"layer{exchange.rank}": torch.full((3, 40), float(exchange.rank))}}
        return export_weights(state, tmp_path, max_file_bytes=300, group=exchange).files

    reports = run_ranks(3, run)
    assert reports[0] == reports[2]
    assert len(reports[0]) == 3
    found = load_all(tmp_path)
    assert {name: float(value[0, 0]) for name, value in found.items()} == {
        "layer0": 0.0,
        "layer1": 1.0,
        "layer2": 2.0,
    }


def _export_sharded(exchange: Exchange, directory: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = small_model()
    for module in (model.body[0], model.body[2], model):
        fully_shard(module, reshard_after_forward=False)
    export_weights(model, directory + "/live", dtype="float16", max_file_bytes=500)
    export_weights(model, directory + "/pth", dtype="float16", format="pth")
    remesh.save({"model": model}, directory + "/c")
    export_weights(directory + "/c", directory + "/stored", dtype="float16", max_file_bytes=500)


def test_shards_of_a_model(tmp_path: Path) -> None:
    run_processes(2, _export_sharded, str(tmp_path))
    expected = halves(small_model())
    assert same(load_all(tmp_path / "live"), untied(expected))
    assert same(load_all(tmp_path / "stored"), untied(expected))
    assert same(torch.load(tmp_path / "pth/model.pth"), expected)
    assert zipfile.ZipFile(tmp_path / "pth/model.pth").testzip() is None
    for file in (tmp_path / "live").iterdir():
        assert file.read_bytes() == (tmp_path / "stored" / file.name).read_bytes()


@given(st.lists(st.integers(1, 1000), max_size=20), st.integers(1, 6))
def test_files_are_given_to_ranks_evenly(sizes: list[int], world_size: int) -> None:
    files = [WholeFile(f"{number}", size, []) for number, size in enumerate(sizes)]
    given = decode_files(give_to_ranks(WholeFiles(files, {}).encode(), world_size, "final"))
    loads = np.bincount(given.writers, sizes, world_size)
    assert len(given.writers) == len(sizes)
    assert len(loads) == world_size
    assert loads.max() - loads.min() <= max(sizes, default=0)


def test_one_rank_writes_an_archive_of_what_others_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksums go through tensors that are longer than a round, on any storage."""
    monkeypatch.setattr(collect, "ROUND_BYTES", CHUNK_SIZE)
    wide = torch.arange(3_000_000, dtype=torch.int32).view(1500, 2000)
    store = MemoryStorage()

    def run(exchange: ThreadExchange) -> None:
        columns = wide.chunk(2, 1)[exchange.rank].contiguous()
        cut = remesh.ShardedTensor.at_offset("w", columns, wide.shape, (0, 1000 * exchange.rank))
        state = {"w": cut, "b": torch.ones(3), "empty": torch.zeros(0)}
        for place in (tmp_path, store):
            export_weights(state, place, format="pth", entry=None, group=exchange)

    run_ranks(2, run)
    (tmp_path / "stored").write_bytes(store.read("model.pth"))
    for path in (tmp_path / "model.pth", tmp_path / "stored"):
        assert zipfile.ZipFile(path).testzip() is None
        found = torch.load(path)
        assert torch.equal(found["w"], wide)
        assert torch.equal(found["b"], torch.ones(3))
    assert store.list() == ["model.pth"]


@given(st.data())
def test_checksums_stand_behind_what_they_are_of(data: st.DataObject) -> None:
    stream = np.frombuffer(data.draw(st.binary(min_size=40, max_size=80)), np.uint8).copy()
    bounds = sorted(data.draw(st.lists(st.integers(0, 30), min_size=4, max_size=4)))
    first, second = (bounds[0], bounds[1], (32,)), (bounds[2], bounds[3], (36,))
    expected = stream.copy()
    for start, stop, [place] in (first, second):
        expected[place : place + 4] = np.frombuffer(
            zlib.crc32(stream[start:stop].data).to_bytes(4, "little"), np.uint8
        )
    checksums = collect.Checksums([first, second])
    size = data.draw(st.integers(1, 50))
    for start in range(0, len(stream), size):
        checksums.complete(start, stream[start : start + size])
    assert stream.tobytes() == expected.tobytes()


# ---------------------------------------------------------------------------------------------
# Hugging Face
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Llama", "tied Llama"])
def test_transformers_loads_what_was_exported(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    model = make(kind, 0)
    export_weights(model, tmp_path, dtype="float16", max_file_bytes=3000, config=model.config)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(dict(loaded.state_dict()), halves(model))
