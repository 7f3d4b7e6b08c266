"""Megatron's folders of before `torch_dist`.

The parts are cut here from whole tensors as Megatron's layers cut them, under its names; Megatron
itself writes them only on GPUs.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import remesh
from remesh.errors import CorruptCheckpointError

NUM_LAYERS, HIDDEN, FFN, VOCABULARY = 4, 4, 6, 8
CUTS = {
    "self_attention.linear_qkv.weight": (3 * HIDDEN, HIDDEN, 0),
    "self_attention.linear_qkv.layer_norm_weight": (HIDDEN, None, None),
    "self_attention.linear_proj.weight": (HIDDEN, HIDDEN, 1),
    "self_attention.linear_proj.bias": (HIDDEN, None, None),
    "mlp.linear_fc1.weight": (2 * FFN, HIDDEN, "gated"),
    "mlp.linear_fc2.weight": (HIDDEN, FFN, 1),
}
Whole = dict[str, tuple[torch.Tensor, Any]]


def whole_model() -> Whole:
    """Name → the whole tensor, and how it is cut."""
    torch.manual_seed(0)
    found: Whole = {"embedding.word_embeddings.weight": (torch.randn(VOCABULARY, HIDDEN), 0)}
    for layer in range(NUM_LAYERS):
        for name, (rows, columns, dim) in CUTS.items():
            shape = (rows,) if columns is None else (rows, columns)
            found[f"decoder.layers.{layer}.{name}"] = (torch.randn(shape), dim)
    found["decoder.final_layernorm.weight"] = (torch.randn(HIDDEN), None)
    found["output_layer.weight"] = (torch.randn(VOCABULARY, HIDDEN), 0)
    return found


def cut(tensor: torch.Tensor, dim: Any, rank: int, count: int) -> torch.Tensor:
    if dim is None:
        return tensor
    if dim == "gated":
        return torch.cat([half.chunk(count)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(count, dim)[rank].clone()


def write(
    folder: Path, model: Whole, ranks: int, stages: int, chunks: int = 1, args: Any = None
) -> None:
    """Write the folders of all ranks; layers go chunk by chunk over the stages."""
    step = NUM_LAYERS // (stages * chunks)
    for rank in range(ranks):
        for stage in range(stages):
            state: dict[str, Any] = {"iteration": 10} | ({} if args is None else {"args": args})
            for chunk in range(chunks):
                first = (chunk * stages + stage) * step
                is_first, is_last = first == 0, first + step == NUM_LAYERS
                part: dict[str, Any] = {"decoder.layers.0.self_attention._extra_state": None}
                for name, (tensor, dim) in model.items():
                    own = cut(tensor, dim, rank, ranks)
                    pieces = name.split(".")
                    if pieces[1] == "layers":
                        number = int(pieces[2]) - first
                        if 0 <= number < step:
                            part[".".join(("decoder", "layers", str(number), *pieces[3:]))] = own
                    elif is_first if name.startswith("embedding") else is_last:
                        part[name] = own
                state["model" if chunks == 1 else f"model{chunk}"] = part
            state["optimizer"] = {"state": {0: {"exp_avg": torch.full((2,), float(rank))}}}
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            (folder / name).mkdir(parents=True)
            torch.save(state, folder / name / "model_optim_rng.pt")


@pytest.mark.parametrize(
    ("ranks", "stages", "chunks"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2)]
)
def test_parts_are_joined(ranks: int, stages: int, chunks: int, tmp_path: Path) -> None:
    model = whole_model()
    args = argparse.Namespace(swiglu=True)
    write(tmp_path / "iter_0000010", model, ranks, stages, chunks, args)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    found = remesh.Checkpoint(tmp_path)
    assert found.format == "megatron_legacy"
    for name, (tensor, _) in model.items():
        assert torch.equal(found[f"model.{name}"], tensor), name
    assert found.values["iteration"] == 10
    own = (
        "optimizer" if ranks * stages == 1 else "mp_rank_00" + "_000" * (stages > 1) + ".optimizer"
    )
    assert f"{own}.state.0.exp_avg" in found
    assert sum(name.startswith("model.") for name in found.index) == len(model)
    assert found.verify().ok
    target = {"model": {name: torch.zeros_like(tensor) for name, (tensor, _) in model.items()}}
    remesh.load(target, tmp_path)
    assert all(torch.equal(target["model"][name], tensor) for name, (tensor, _) in model.items())


def test_parts_without_a_rule_have_names_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = whole_model() | {"decoder.layers.1.adapter.weight": (torch.randn(4, 4), 0)}
    write(tmp_path, model, 2, 1)
    with caplog.at_level(logging.WARNING, "remesh"):
        found = remesh.Checkpoint(tmp_path)
    assert "no rule says how 'model.decoder.layers.1.adapter.weight' was cut" in caplog.text
    name = "mp_rank_01.model.decoder.layers.1.adapter.weight"
    assert torch.equal(found[name], model["decoder.layers.1.adapter.weight"][0][2:])


class _OtherArgs(argparse.Namespace):
    """Arguments of a class that no reader knows."""


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(
    "args",
    [
        None,
        {"swiglu": True},
        argparse.Namespace(swiglu=False, quick_geglu=True),
        argparse.Namespace(swiglu=False),
        _OtherArgs(swiglu=True),
    ],
    ids=["none", "dict", "quick_geglu", "no flag", "unknown class"],
)
def test_the_first_layer_of_an_mlp_is_joined_whatever_the_arguments_say(
    args: Any, is_gated: bool, tmp_path: Path
) -> None:
    model = whole_model()
    if not is_gated:
        for layer in range(NUM_LAYERS):
            name = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
            model[name] = (torch.randn(FFN, HIDDEN), 0)
            model[name.replace("weight", "bias")] = (torch.randn(FFN), 0)
    write(tmp_path, model, 2, 1, args=args)
    found = remesh.Checkpoint(tmp_path)
    for name, (tensor, _) in model.items():
        assert torch.equal(found[f"model.{name}"], tensor), name


def test_a_first_layer_without_a_second_is_not_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = whole_model()
    del model["decoder.layers.3.mlp.linear_fc2.weight"]
    write(tmp_path, model, 2, 1)
    with caplog.at_level(logging.WARNING, "remesh"):
        found = remesh.Checkpoint(tmp_path)
    name = "model.decoder.layers.3.mlp.linear_fc1.weight"
    assert f"nothing says whether {name!r} is gated" in caplog.text
    assert found[f"mp_rank_01.{name}"].shape == (FFN, HIDDEN)


def test_a_missing_part_joins_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, whole_model(), 2, 2)
    (tmp_path / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with caplog.at_level(logging.WARNING, "remesh"):
        found = remesh.Checkpoint(tmp_path)
    assert "no full grid" in caplog.text
    assert "mp_rank_00_000.iteration" in found.values


def test_a_tracker_that_names_nothing(tmp_path: Path) -> None:
    write(tmp_path / "iter_0000010", whole_model(), 1, 1)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    with pytest.raises(CorruptCheckpointError, match="'20'"):
        remesh.Checkpoint(tmp_path)
