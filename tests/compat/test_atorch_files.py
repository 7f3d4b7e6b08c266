"""Directories in the layout of ATorch, with its pickled meta files, made here by hand.

Two units, of which the first is padded for alignment and both at the end, on two ranks.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import remesh
from remesh.compat.atorch import (
    ShardOptim,
    init_empty_weights_with_disk_offload,
    save_fsdp_flat_param,
    save_fsdp_optim_param,
)
from remesh.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    MismatchError,
    PickleRefusedError,
    UnsupportedValueError,
)

SHAPES = {"block.weight": (3, 5), "block.bias": (3,), "head.weight": (2, 3), "head-x.scale": (1,)}
UNITS = {"block": ["block.weight", "block.bias"], "": ["head.weight", "head-x.scale"]}


def content(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    start = 100 * list(SHAPES).index(name)
    return torch.arange(start, start + int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def write(folder: Path, *, version: int | None = 1) -> None:
    """What two ranks of ATorch leave behind."""
    ranges: dict[str, dict[str, tuple[int, int]]] = {}
    flat = {}
    for unit, names in UNITS.items():
        pieces: list[torch.Tensor] = []
        for name in names:
            begin = sum(map(len, pieces))
            ranges.setdefault(unit, {})[name] = (begin, begin + content(name).numel())
            pieces += [content(name).reshape(-1), torch.full((begin % 4,), 42.0)]
        whole = torch.cat(pieces)
        flat[unit] = torch.cat([whole, torch.full((len(whole) % 2,), 42.0)])
    for rank in range(2):
        meta: dict[str, Any] = {}
        for unit, of_unit in ranges.items():
            half = len(flat[unit]) // 2
            for name, (start, stop) in of_unit.items():
                low, high = max(start, rank * half), min(stop, (rank + 1) * half)
                if low < high:
                    meta[name] = {
                        "param_names": name.removeprefix(f"{unit}."),
                        "param_shapes": torch.Size(SHAPES[name]),
                        "param_numels": stop - start,
                        "param_offsets": (low - rank * half, high - rank * half),
                        "pad": 0,
                        "rank": rank,
                        "striped_fsdp_name": unit,
                    }
        halves = {unit: full.chunk(2)[rank].clone() for unit, full in flat.items()}
        save_file(halves, folder / f"flat_param.{rank:05d}-00002")
        units = {unit: {"numels": (1,), "is_padding_mask": [False]} for unit in UNITS}
        document = {"param_meta": meta, "flat_param_meta": units} if version else meta
        (folder / f"flat_meta.{rank:05d}-00002").write_bytes(pickle.dumps(document))
    save_file({"running": torch.tensor([7.0, 8.0])}, folder / "buffers")
    if version is not None:
        wrapped = {("package.module", "Block")}
        meta = {"version": version, "world_size": 2, "wrap_class": wrapped}
        (folder / "ckpt_meta").write_bytes(pickle.dumps(meta))


def write_optimizer(folder: Path) -> None:
    """The optimizer's state of the same ranks; a rank has none of what it does not hold."""
    halves = {"block.weight": (9, 15), "block.bias": (0, 3), "head-x.scale": (0, 1)}
    for rank in range(2):
        state: dict[str, torch.Tensor] = {}
        for name, (cut, size) in halves.items():
            own = (content(name) + 0.5).reshape(-1)[
                slice(0, cut) if rank == 0 else slice(cut, size)
            ]
            if len(own):
                moments = {f"{name}-{key}": own.clone() for key in ("exp_avg", "exp_avg_sq")}
                state |= moments | {f"{name}-step": torch.tensor(4.0)}
        save_file(state, folder / f"optim_param.{rank:05d}-00002")
    group = {
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "params": list(halves),
        "params_names": dict(enumerate(halves)),
    }
    (folder / "optim_meta").write_bytes(pickle.dumps([group]))


@pytest.mark.parametrize("version", [1, 0, None])
def test_parameters_and_buffers(tmp_path: Path, version: int | None) -> None:
    write(tmp_path, version=version)
    checkpoint = remesh.Checkpoint(tmp_path)
    assert checkpoint.format == "flat_param"
    assert sorted(checkpoint.index) == sorted(["model.running", *(f"model.{n}" for n in SHAPES)])
    for name in SHAPES:
        assert torch.equal(checkpoint.read(f"model.{name}"), content(name)), name
    assert checkpoint.read("model.running").tolist() == [7, 8]
    corner = checkpoint.read("model.block.weight", remesh.sharding.Box((1, 2), (2, 3)))
    assert torch.equal(corner, content("block.weight")[1:, 2:])


def test_unsigned_integers_of_a_file_are_unsigned_integers(tmp_path: Path) -> None:
    write(tmp_path)
    counts = torch.tensor([7, 8], dtype=torch.uint8)
    save_file({"a": counts, "b": counts.to(torch.uint16)}, tmp_path / "buffers")
    checkpoint = remesh.Checkpoint(tmp_path)
    assert [checkpoint.tensor(f"model.{n}").dtype for n in "ab"] == ["uint8", "uint16"]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.Linear(5, 3)
        self.head = torch.nn.Linear(3, 2, bias=False)
        self.register_buffer("running", torch.zeros(2))


def test_into_a_model_and_its_optimizer(tmp_path: Path) -> None:
    write(tmp_path)
    write_optimizer(tmp_path)
    model = Model()
    optimizer = torch.optim.Adam(model.block.parameters())
    remesh.load({"model": model, "optimizer": optimizer}, tmp_path)
    assert torch.equal(model.block.weight, content("block.weight"))
    assert torch.equal(model.head.weight, content("head.weight"))
    state = optimizer.state[model.block.weight]
    assert torch.equal(state["exp_avg"], content("block.weight") + 0.5)
    assert state["step"] == 4
    assert optimizer.param_groups[0]["lr"] == 0.1


def blocks(width: int) -> torch.nn.Module:
    model = torch.nn.ModuleDict({"block": torch.nn.Linear(width, 3), "head-x": torch.nn.Module()})
    model["head-x"].register_parameter("scale", torch.nn.Parameter(torch.zeros(1)))
    return model


@pytest.mark.parametrize("with_model", [True, False])
def test_shard_optim_of_a_plain_model(tmp_path: Path, with_model: bool) -> None:
    if with_model:
        write(tmp_path)
    write_optimizer(tmp_path)
    model = blocks(5)
    found = ShardOptim(tmp_path).reshard_optim_state_dict(model)
    assert found["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1, 2]}]
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(found)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert torch.equal(state["exp_avg"], content(name) + 0.5), name
        assert state["step"] == 4


def test_shard_optim_of_another_model(tmp_path: Path) -> None:
    write_optimizer(tmp_path)
    with pytest.raises(MismatchError, match=r"no parameters block\.bias, block\.weight") as caught:
        ShardOptim(tmp_path).reshard_optim_state_dict(torch.nn.Linear(5, 3))
    assert caught.value.missing == ("block.bias", "block.weight", "head-x.scale")
    with pytest.raises(MismatchError, match=r"(?s)block\.weight.*\(15,\).*\(3, 6\)"):
        ShardOptim(tmp_path).reshard_optim_state_dict(blocks(6))


# ---------------------------------------------------------------------------------------------
# Written here
# ---------------------------------------------------------------------------------------------


def trained() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.head(model.block(torch.randn(4, 5))).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_what_one_rank_writes_and_reads(tmp_path: Path) -> None:
    model, optimizer = trained()
    save_fsdp_flat_param(model, tmp_path)
    save_fsdp_optim_param(model, optimizer, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "buffers",
        "ckpt_meta",
        "flat_meta.00000-00001",
        "flat_param.00000-00001",
        "optim_meta",
        "optim_param.00000-00001",
    ]
    # Any safetensors reader opens the data; the meta files are JSON.
    flat = load_file(tmp_path / "flat_param.00000-00001")
    assert torch.equal(flat["block.weight"].reshape(3, 5), model.block.weight)
    assert load_file(tmp_path / "buffers")["running"].tolist() == [0, 0]
    meta = json.loads((tmp_path / "flat_meta.00000-00001").read_text())["param_meta"]
    assert meta["block.weight"] == {
        "param_names": "block.weight",
        "param_shapes": [3, 5],
        "param_numels": 15,
        "param_offsets": [0, 15],
        "rank": 0,
        "striped_fsdp_name": "block.weight",
    }
    (group,) = json.loads((tmp_path / "optim_meta").read_text())
    assert (group["lr"], group["params"]) == (0.01, ["block.weight", "block.bias", "head.weight"])
    state = load_file(tmp_path / "optim_param.00000-00001")
    expected = optimizer.state[model.block.weight]["exp_avg"]
    assert torch.equal(state["block.weight-exp_avg"].reshape(3, 5), expected)
    assert state["block.weight-step"].shape == ()
    other = Model()
    remesh.load({"model": other}, tmp_path)
    fresh = torch.optim.AdamW(other.parameters())
    fresh.load_state_dict(ShardOptim(tmp_path).reshard_optim_state_dict(other))
    for old, new in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(old, new)
        assert all(
            torch.equal(value, fresh.state[new][key]) for key, value in optimizer.state[old].items()
        )
    assert fresh.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("name", ["complex128", "uint4", "bits16"])
def test_types_that_the_layout_has_no_name_for(tmp_path: Path, name: str) -> None:
    model = Model()
    model.register_buffer("odd", torch.zeros(2, dtype=getattr(torch, name)))
    with pytest.raises(UnsupportedValueError, match=r"(?s)odd: .* cannot be stored in this layout"):
        save_fsdp_flat_param(model, tmp_path / "model")


class Tied(torch.nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([2.0]), persistent=False)


def filled(model: torch.nn.Module) -> None:
    """Give a model memory, and let its modules read."""
    model.to_empty(device="cpu")
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.reset_parameters()


def test_empty_weights_of_a_plain_model(tmp_path: Path) -> None:
    model = Tied()
    save_fsdp_flat_param(model, tmp_path)
    with init_empty_weights_with_disk_offload(ckpt_path=tmp_path):
        empty = Tied()
        small = torch.nn.Linear(1, 1)
    assert all(tensor.is_meta for tensor in [*empty.parameters(), *empty.buffers()])
    filled(empty)
    assert empty.scale.tolist() == [2]
    for name in ("embed.weight", "head.weight"):
        assert torch.equal(empty.get_parameter(name), model.embed.weight)
    # Each module reads once; from then on it is like any other.
    empty.embed.reset_parameters()
    assert not torch.equal(empty.embed.weight, model.embed.weight)
    with pytest.raises(MismatchError, match=r"model\.(weight|bias): not stored"):
        filled(small)
    assert torch.nn.Linear(1, 1).weight.device.type == "cpu"


def test_modules_of_other_threads_are_left_alone(tmp_path: Path) -> None:
    save_fsdp_flat_param(Tied(), tmp_path)
    ended = threading.Event()

    def build() -> torch.nn.Linear:
        return torch.nn.Linear(1, 1)

    def build_many() -> None:
        while not ended.is_set():
            build()

    with ThreadPoolExecutor() as threads:
        builds = threads.submit(build_many)
        try:
            for _ in range(100):
                with init_empty_weights_with_disk_offload(tmp_path):
                    inner = Tied()
            with init_empty_weights_with_disk_offload(tmp_path):
                other = threads.submit(build).result()
        finally:
            ended.set()
        builds.result()
    assert inner.embed.weight.is_meta
    assert not other.weight.is_meta
    other.reset_parameters()  # its own, which asks for no checkpoint


def test_empty_weights_of_another_model(tmp_path: Path) -> None:
    save_fsdp_flat_param(Tied(), tmp_path)
    with init_empty_weights_with_disk_offload(tmp_path):
        other = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3)})
    with pytest.raises(MismatchError, match=r"embed\.weight: stored as float32 \(4, 3\)"):
        filled(other)
    with (
        pytest.raises(CheckpointNotFoundError),
        init_empty_weights_with_disk_offload(tmp_path / "nothing"),
    ):
        pass


def test_a_directory_is_written_once(tmp_path: Path) -> None:
    model, optimizer = trained()
    save_fsdp_flat_param(model, tmp_path)
    before = (tmp_path / "flat_param.00000-00001").read_bytes()
    with pytest.raises(CheckpointExistsError, match="save into a new directory"):
        save_fsdp_flat_param(Model(), tmp_path)
    assert (tmp_path / "flat_param.00000-00001").read_bytes() == before
    save_fsdp_optim_param(model, optimizer, tmp_path)
    with pytest.raises(CheckpointExistsError):
        save_fsdp_optim_param(model, optimizer, tmp_path)


def test_an_option_that_is_a_tensor_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(UnsupportedValueError, match="Make an option of a parameter group a number"):
        save_fsdp_optim_param(model, optimizer, tmp_path)
    assert not (tmp_path / "optim_meta").exists()


# ---------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------


def test_a_save_that_was_not_finished(tmp_path: Path) -> None:
    model, _ = trained()
    save_fsdp_flat_param(model, tmp_path)
    (tmp_path / "ckpt_meta").unlink()
    with pytest.raises(CheckpointNotFoundError, match="not finished"):
        remesh.Checkpoint(tmp_path)


def edit_meta(folder: Path, rank: int, change: Callable[[Any], object]) -> None:
    path = folder / f"flat_meta.{rank:05d}-00002"
    document = pickle.loads(path.read_bytes())
    change(document)
    path.write_bytes(pickle.dumps(document))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"param_offsets": (0, 99)}, r"the range \[0, 99\) is not in a tensor"),
        ({"param_offsets": (0, 3)}, "The files have .* elements"),
        ({"param_shapes": (3, 4)}, "on other ranks"),
        ({"striped_fsdp_name": "other"}, "has no unit 'other'"),
        ({"param_offsets": "x"}, "'x' is not the range of a slice"),
    ],
)
def test_meta_that_contradicts_the_data(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write(tmp_path)
    edit_meta(tmp_path, 1, lambda document: document["param_meta"]["block.weight"].update(changes))
    with pytest.raises(CorruptCheckpointError, match=message):
        remesh.Checkpoint(tmp_path)


def test_files_of_other_ranks(tmp_path: Path) -> None:
    write(tmp_path)
    for missing in ("flat_param.00001-00002", "flat_meta.00000-00002"):
        (tmp_path / missing).rename(tmp_path / "away")
        with pytest.raises(CorruptCheckpointError, match="are of ranks"):
            remesh.Checkpoint(tmp_path)
        (tmp_path / "away").rename(tmp_path / missing)
    shutil.copy(tmp_path / "flat_param.00000-00002", tmp_path / "flat_param.00002-00003")
    with pytest.raises(CorruptCheckpointError, match="several checkpoints were saved here"):
        remesh.Checkpoint(tmp_path)


def test_experts_of_ranks_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    experts = {"expert_ranks": [0, 1]}
    edit_meta(tmp_path, 0, lambda document: document["flat_param_meta"]["block"].update(experts))
    with pytest.raises(FormatVersionError, match="expert parallelism"):
        remesh.Checkpoint(tmp_path)


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("file", ["ckpt_meta", "flat_meta.00000-00002", "optim_meta"])
def test_a_pickle_that_runs_something_is_refused(tmp_path: Path, file: str) -> None:
    write(tmp_path)
    write_optimizer(tmp_path)
    evil: dict[str, Any] = {"version": _Touch(tmp_path / "ran")}
    (tmp_path / file).write_bytes(pickle.dumps(evil))
    with pytest.raises(PickleRefusedError, match="system"):
        remesh.Checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()
