"""Checkpoints of Megatron's `zarr`, whose arrays zarr itself writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zarr


def write_zarr(
    arrays: Mapping[str, npt.NDArray[Any]], folder: Path, values: Mapping[str, object] | None = None
) -> None:
    """Write arrays, each dim cut in two, as Megatron up to 0.15 left them.

    Values are common, or under a name such as `rng/shard_0_1` an element of a sharded object.
    """
    for name, array in arrays.items():
        made = zarr.create_array(
            store=str(folder / name),
            shape=array.shape,
            dtype=array.dtype,
            zarr_format=2,
            compressors=None,
            chunks=tuple(max(math.ceil(n / 2), 1) for n in array.shape),
            config={"write_empty_chunks": True},
        )
        made[...] = array
    common = dict(values or {})
    for name in [name for name in common if "/shard_" in name]:
        (folder / name).parent.mkdir()
        torch.save(common.pop(name), folder / f"{name}.pt")
    if values is not None:
        torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))


def write_bfloat16(name: str, tensor: torch.Tensor, folder: Path) -> None:
    """Write an array of one chunk in a type that zarr does not know, as Megatron named it."""
    (folder / name).mkdir()
    described = {"zarr_format": 2, "shape": tensor.shape, "chunks": tensor.shape, "order": "C"}
    described |= {"dtype": "bfloat16", "compressor": None, "filters": None, "fill_value": None}
    (folder / name / ".zarray").write_text(json.dumps(described))
    raw = tensor.contiguous().view(torch.int16).numpy()
    (folder / name / ".".join("0" * tensor.ndim)).write_bytes(np.asarray(raw).tobytes())
