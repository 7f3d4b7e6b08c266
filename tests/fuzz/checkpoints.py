"""Small sound checkpoints of every format, which the fuzzer damages."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

import remesh
from remesh.exchange import Exchange
from tests.compat.test_atorch_files import write, write_optimizer
from tests.compat.test_flex_paddle import DATA
from tests.formats.test_readers import (
    write_huggingface_in_several_files,
    write_safetensors_parts,
)
from tests.formats.test_torch_dcp import write_flattened
from tests.formats.test_torch_file import state_of_views
from tests.fuzz.files import Files, files_in
from tests.matrix.writers import DEEPSPEED
from tests.support import run_ranks
from tests.support.zarr_files import write_bfloat16, write_zarr

COMMON = {
    "iteration": 7,
    "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16),
    "nested": {"list": [1, {"a": 2}], 5: "five", "half": 0.5, "time": (1, 2.5, None)},
}


def _sharded_state(exchange: Exchange) -> dict[str, Any]:
    """Rows of two tensors on each rank, values of many kinds, and an element of an object."""
    rank, num_ranks = exchange.rank, exchange.world_size
    weight = torch.arange(48.0).reshape(8, 6).chunk(num_ranks)[rank]
    bias = torch.arange(8).to(torch.bfloat16).chunk(num_ranks)[rank]
    return {
        **COMMON,
        "w": remesh.ShardedTensor.from_rank_offsets("w", weight, (0, rank, num_ranks)),
        "b": remesh.ShardedTensor.from_rank_offsets("b", bias, (0, rank, num_ranks)),
        "count": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "rng": remesh.sharding.ShardedObject(
            "rng", {"s": torch.arange(4), "n": np.arange(3.0)}, (num_ranks,), (rank,)
        ),
    }


def _native(folder: Path, **options: Any) -> None:
    def save(exchange: Exchange) -> None:
        tied = torch.arange(6.0)
        more = {
            "tie": tied,
            "tied": tied,
            "kinds": [torch.float16, torch.Size([2]), torch.device("cpu"), {1, 2}, 2**70, 1j, b"x"],
            "path": Path("a/b"),
            "scalar": np.float32(1.5),
        }
        remesh.save(_sharded_state(exchange) | more, folder, group=exchange, **options)

    run_ranks(2, save)


def _foreign(name: str) -> Callable[[Path], None]:
    def write_it(folder: Path) -> None:
        run_ranks(2, lambda exchange: remesh.save(
            _sharded_state(exchange), folder, format=name, group=exchange
        ))  # fmt: skip

    return write_it


def _dcp(folder: Path, **options: Any) -> None:
    state: dict[str, Any] = {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "t": torch.arange(6).reshape(2, 3).t()},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, {"params": ["a", "b"]}],
        "step": 7,
        "b": torch.ones(3, dtype=torch.bfloat16),
    }
    if options:
        state["model"]["t"] = state["model"]["t"].contiguous()  # safetensors knows no strides
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is no process group
        writer = FileSystemWriter(folder, **options)
        dcp.state_dict_saver.save(state, storage_writer=writer, no_dist=True)


def _torch_file(folder: Path) -> None:
    torch.save(state_of_views(), folder / "model.pt")


def _flat_param(folder: Path) -> None:
    write(folder)
    write_optimizer(folder)


def _flat_param_json(folder: Path) -> None:
    """As remesh writes it: with JSON where ATorch has pickles."""
    save_file({"unit": torch.arange(8.0)}, folder / "flat_param.00000-00001")
    slices = {
        "w": {"param_shapes": [2, 3], "striped_fsdp_name": "unit", "param_offsets": [0, 6]},
        "b": {"param_shapes": [2], "striped_fsdp_name": "unit", "param_offsets": [6, 8]},
    }
    meta = {"param_meta": slices, "flat_param_meta": {"unit": {"numels": [8]}}}
    (folder / "flat_meta.00000-00001").write_text(json.dumps(meta))
    (folder / "ckpt_meta").write_text(json.dumps({"version": 1, "world_size": 1}))
    save_file(
        {"w-exp_avg": torch.arange(6.0), "w-step": torch.tensor(1.0)},
        folder / "optim_param.00000-00001",
    )
    (folder / "optim_meta").write_text(json.dumps([{"lr": 0.1, "params": ["w"]}]))


def _zarr_by_zarr(folder: Path) -> None:
    """Arrays of zarr-python under the names that Megatron gave them."""
    write_zarr({"a": np.arange(35.0).reshape(7, 5), "b.c": np.arange(3)}, folder, COMMON)


def _megatron_zarr(folder: Path) -> None:
    """The same with what zarr does not know."""
    rng = {"s": torch.arange(4), "n": np.arange(3.0)}
    arrays = {"w": np.arange(48.0).reshape(8, 6), "count": np.array(3), "empty": np.zeros((0, 3))}
    write_zarr(arrays, folder, COMMON | {"rng/shard_0_1": rng})
    write_bfloat16("b", torch.arange(8).to(torch.bfloat16), folder)


def _huggingface(folder: Path) -> None:
    """Weights in two files, and a training state beside them."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    write_huggingface_in_several_files(arrays, folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def _diffusers(folder: Path) -> None:
    (folder / "model_index.json").write_text("{}")
    for part in ("unet", "vae"):
        (folder / part).mkdir()
    save_file(
        {"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(2, dtype=torch.bfloat16)},
        folder / "unet" / "diffusion_pytorch_model.safetensors",
    )
    torch.save({"w": torch.arange(4.0)}, folder / "vae" / "diffusion_pytorch_model.bin")


def _safetensors(folder: Path) -> None:
    write_safetensors_parts({"w": np.arange(12.0).reshape(4, 3)}, folder)


def _recorded(source: Path) -> Callable[[Path], None]:
    def copy(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)

    return copy


WRITERS: dict[str, Callable[[Path], object]] = {
    "native": _native,
    "native compressed": partial(_native, compress="zstd"),
    "torch_dcp": _dcp,
    "torch_dcp safetensors": partial(_dcp, serialization_format=SerializationFormat.SAFETENSORS),
    "torch_dcp by remesh": _foreign("torch_dcp"),
    "megatron torch_dist": _foreign("torch_dist"),
    "megatron flattened": write_flattened,
    "megatron zarr": _megatron_zarr,
    "zarr by zarr": _zarr_by_zarr,
    "torch.save": _torch_file,
    "huggingface": _huggingface,
    "diffusers": _diffusers,
    "safetensors": _safetensors,
    "paddle": _recorded(DATA / "two_rank"),
    "paddle flattened": _recorded(DATA / "flat3d"),
    "deepspeed zero 2": _recorded(DEEPSPEED / "rich2"),
    "deepspeed zero 3": _recorded(DEEPSPEED / "zero3"),
    "deepspeed universal": _recorded(DEEPSPEED / "universal"),
    "atorch": _flat_param,
    "atorch by remesh": _flat_param_json,
}


def make_checkpoint(name: str) -> Files:
    """The files of a small checkpoint, by its name in `WRITERS`."""
    with tempfile.TemporaryDirectory() as folder:
        WRITERS[name](Path(folder))
        return files_in(Path(folder))
