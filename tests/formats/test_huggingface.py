"""Hugging Face folders and safetensors files, written by the libraries that define them."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import remesh
from remesh.errors import FormatVersionError, StateError
from remesh.exchange import Exchange
from tests.engine.bits import bits_of
from tests.recipes.models import logits_of, make
from tests.support import run_processes
from tests.support.torch_versions import needs

pytest.importorskip("transformers")

LLAMAS = {"plain": "Llama", "tied": "tied Llama"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of two models: `plain` and `tied`, in one file and in several; one by torch.save."""
    root = tmp_path_factory.mktemp("huggingface")
    for name, kind in LLAMAS.items():
        model = make(kind, 0)
        model.save_pretrained(root / name)
        model.save_pretrained(root / f"{name}-sharded", max_shard_size="4KB")
    state = make("Llama", 0).state_dict()
    half = len(state) // 2
    for folder in ("bin", "bin-sharded"):
        (root / folder).mkdir()
        shutil.copy(root / "plain" / "config.json", root / folder)
    torch.save(state, root / "bin" / "pytorch_model.bin")
    files = [f"pytorch_model-{n:05d}-of-00002.bin" for n in (1, 2)]
    for file, part in zip(files, (list(state)[:half], list(state)[half:]), strict=True):
        torch.save({name: state[name] for name in part}, root / "bin-sharded" / file)
    places = {name: files[number >= half] for number, name in enumerate(state)}
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
    (root / "bin-sharded" / "pytorch_model.bin.index.json").write_text(index)
    return root


KINDS = ("plain", "plain-sharded", "tied", "tied-sharded", "bin", "bin-sharded")


@pytest.mark.parametrize("kind", KINDS)
def test_what_save_pretrained_writes_loads_into_the_model(kind: str, saved: Path) -> None:
    tied = kind.startswith("tied")
    model, expected = (make(LLAMAS["tied" if tied else "plain"], seed) for seed in (1, 0))
    report = remesh.load(model, saved / kind, unexpected="error")
    assert torch.equal(logits_of(model), logits_of(expected))
    assert report.derived == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    checkpoint = remesh.Checkpoint(saved / kind)
    assert checkpoint.format == "huggingface"
    assert ("lm_head.weight" in checkpoint) is not tied
    norm = checkpoint.read("model.norm.weight")
    assert torch.equal(norm, expected.model.norm.weight)


def test_a_model_that_is_not_tied_misses_what_a_tied_one_left_out(saved: Path) -> None:
    with pytest.raises(remesh.MismatchError) as caught:
        remesh.load(make("Llama", 0), saved / "tied")
    assert caught.value.missing == ("lm_head.weight",)


def write_by_dcp(_exchange: Exchange, root: Path) -> None:
    """What DCP's Hugging Face writer makes of two ranks' shards."""
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "rows": distribute_tensor(torch.arange(20.0).reshape(5, 4), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.arange(8.0).reshape(2, 4), mesh, [Shard(1)]),
    }
    for name, joined in {"parts": False, "joined": True}.items():
        writer = HuggingFaceStorageWriter(
            str(root / name), save_distributed=True, enable_consolidation=joined
        )
        dcp.save(state, storage_writer=writer)


@pytest.fixture(scope="module")
def by_dcp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dcp")
    run_processes(2, write_by_dcp, root)
    return root


@needs("hugging face shards")
@pytest.mark.parametrize("place", ["parts", "joined", "joined/sharded"])
def test_what_dcp_writes_for_hugging_face(place: str, by_dcp: Path) -> None:
    whole = {"rows": torch.arange(20.0).reshape(5, 4), "columns": torch.arange(8.0).reshape(2, 4)}
    checkpoint = remesh.Checkpoint(by_dcp / place)
    assert set(checkpoint) == set(whole)
    assert all(torch.equal(checkpoint.read(name), whole[name]) for name in whole)


DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
)  # fmt: skip


def test_every_element_type_of_safetensors(tmp_path: Path) -> None:
    state = {str(dtype): torch.arange(2, 14).reshape(3, 4).to(dtype) for dtype in DTYPES}
    state |= {"empty": torch.zeros(0, 3), "number": torch.tensor(3.0)}
    packed = torch.arange(8, dtype=torch.uint8).reshape(2, 4)
    state["packed"] = packed.view(torch.float4_e2m1fn_x2)
    save_file(state, tmp_path / "x.safetensors", {"format": "pt", "a": "b"})
    checkpoint = remesh.Checkpoint(tmp_path / "x.safetensors")
    assert set(checkpoint) == set(state)
    for name, tensor in state.items():
        assert bits_of(checkpoint.read(name)) == bits_of(tensor)


def test_adapters_and_pipelines(tmp_path: Path) -> None:
    """In the layouts that PEFT and diffusers document; neither is needed to read them."""
    lora = {"base_model.model.q.lora_A.weight": torch.ones(2, 3)}
    (tmp_path / "adapter").mkdir()
    save_file(lora, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert list(remesh.Checkpoint(tmp_path / "adapter")) == list(lora)

    pipeline = tmp_path / "pipeline"
    parts = {
        "unet": "diffusion_pytorch_model.safetensors",
        "text_encoder": "model.safetensors",
        "vae": "diffusion_pytorch_model.fp16.safetensors",
    }
    for number, (part, file) in enumerate(parts.items()):
        (pipeline / part).mkdir(parents=True)
        save_file({"w.x": torch.full((2,), float(number))}, pipeline / part / file)
    (pipeline / "scheduler").mkdir()
    (pipeline / "scheduler" / "scheduler_config.json").write_text("{}")
    (pipeline / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    checkpoint = remesh.Checkpoint(pipeline)
    assert {name: checkpoint.read(name)[0].item() for name in checkpoint} == {
        "text_encoder.w.x": 1, "unet.w.x": 0, "vae.w.x": 2,
    }  # fmt: skip
    state = {"unet": {"w.x": torch.zeros(2)}, "vae": {"w.x": torch.zeros(2)}}
    remesh.load(state, pipeline)
    assert state["vae"]["w.x"].tolist() == [2, 2]


def test_what_is_chosen_where_there_are_several(tmp_path: Path) -> None:
    def write(name: str, number: float) -> None:
        save_file({"w": torch.tensor([number])}, tmp_path / name)

    write("model.fp16.safetensors", 1)
    assert remesh.Checkpoint(tmp_path).read("w") == 1
    write("model.bf16.safetensors", 2)
    with pytest.raises(StateError, match=r"(?s)several variants.*model\.bf16\.safetensors"):
        remesh.Checkpoint(tmp_path)
    torch.save({"w": torch.tensor([3.0])}, tmp_path / "pytorch_model.bin")
    write("model.safetensors", 4)
    write("consolidated.safetensors", 5)
    assert remesh.Checkpoint(tmp_path).read("w") == 4
    assert remesh.Checkpoint(tmp_path / "consolidated.safetensors").read("w") == 5
    assert remesh.Checkpoint(tmp_path / "pytorch_model.bin").read("w") == 3
    with pytest.raises(StateError, match=r"both hold w\nName one file"):
        remesh.Checkpoint(tmp_path, format="safetensors")


def test_what_an_index_says_must_be_there(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    shutil.copytree(saved / "plain-sharded", folder)
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    lost = document["weight_map"].pop("lm_head.weight")
    index.write_text(json.dumps({"weight_map": document["weight_map"] | {"other": lost}}))
    with pytest.raises(
        remesh.CorruptCheckpointError, match=r"(?s)1 tensors that are not in .* other"
    ):
        remesh.Checkpoint(folder)
    (folder / lost).unlink()
    with pytest.raises(remesh.CorruptCheckpointError, match=f"{lost}: missing"):
        remesh.Checkpoint(folder)
    index.write_text(json.dumps({"weight_map": {"w": "../../etc/passwd"}}))
    with pytest.raises(remesh.StorageError, match="not a path inside a storage"):
        remesh.Checkpoint(folder)


@pytest.mark.parametrize("ranges", [[(0, 2), (1, 3)], [(0, 2), (3, 5)], [(0, 2), (0, 2), (3, 5)]])
def test_tensors_that_overlap_or_leave_holes_are_damage(
    ranges: list[tuple[int, int]], tmp_path: Path
) -> None:
    entries = {
        str(number): {"dtype": "U8", "shape": [2], "data_offsets": bounds}
        for number, bounds in enumerate(ranges)
    }
    header, path = json.dumps(entries).encode(), tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(ranges[-1][1]))
    with pytest.raises(SafetensorError, match="invalid offset"):
        load_file(path)
    with pytest.raises(remesh.CorruptCheckpointError, match="overlap, or some bytes between"):
        remesh.Checkpoint(path)


def test_an_index_names_tied_weights_of_pickled_files(tmp_path: Path) -> None:
    """transformers puts weights that share memory into one file, and names both in the index."""
    tied, name = torch.arange(3.0), "pytorch_model-0000{}-of-00002.bin"
    torch.save({"wte.weight": tied, "lm_head.weight": tied}, tmp_path / name.format(1))
    torch.save({"bias": torch.ones(2)}, tmp_path / name.format(2))
    numbers = {"wte.weight": 1, "lm_head.weight": 1, "bias": 2}
    weight_map = {weight: name.format(number) for weight, number in numbers.items()}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = remesh.Checkpoint(tmp_path)
    assert checkpoint.index.aliases == {"lm_head.weight": "wte.weight"}
    assert checkpoint["lm_head.weight"].tolist() == [0, 1, 2]


def test_an_unknown_element_type_is_named(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F6_E3M2","shape":[4],"data_offsets":[0,3]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(3))
    with pytest.raises(FormatVersionError, match="a: elements of type 'F6_E3M2'"):
        remesh.Checkpoint(tmp_path)
