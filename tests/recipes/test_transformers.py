"""Models of transformers: from their files into any layout, and back into files, same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import remesh
from remesh.checkpoint import convert
from remesh.errors import MismatchError, TransformError
from remesh.exchange import Exchange
from remesh.recipes import hub, huggingface_to_module, module_to_huggingface
from tests.recipes.models import (
    has_experts,
    logits_of,
    make,
    read_by_transformers,
    shard,
    tensors_in,
)
from tests.support import run_processes

pytest.importorskip("transformers", minversion="5")


def go_around(exchange: Exchange, root: Path, kinds: tuple[str, ...]) -> None:
    """From files into each layout, from there into a checkpoint, and into files again."""
    mesh = init_device_mesh("cpu", (exchange.world_size,))
    for kind in kinds:
        original, hub = make(kind, 0), root / kind / "hub"
        expected = logits_of(original)
        if exchange.rank == 0:
            original.save_pretrained(hub, max_shard_size="20KB")
        dist.barrier()
        for layout in ("fsdp", "tp", "ep") if has_experts(original) else ("fsdp", "tp"):
            model, native = make(kind, 1), root / kind / layout
            shard(model, layout, mesh)
            remesh.load(model, hub, transform=huggingface_to_module(model))
            found = logits_of(model)
            # Who adds up parts of sums on several ranks adds in another order.
            torch.testing.assert_close(
                found, expected, rtol=0, atol=0 if layout == "fsdp" else 2e-7
            )
            remesh.save({"model": model, "step": 3}, native)
            if exchange.rank == 0:
                back = module_to_huggingface(model, prefix="model.")
                config = json.loads(original.config.to_json_string())
                convert(
                    native, f"{native}-hub", format="huggingface", only="model.*", transform=back,
                    metadata=config,
                )  # fmt: skip
                theirs, ours = tensors_in(hub), tensors_in(Path(f"{native}-hub"))
                assert theirs.keys() == ours.keys()
                assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
                assert torch.equal(logits_of(read_by_transformers(f"{native}-hub")), expected)
            dist.barrier()


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("tied Llama", "Mixtral"), id="two"),
        pytest.param(
            ("GPT-NeoX", "Llama", "Qwen3-MoE", "DeepSeek-V3"), id="rest", marks=pytest.mark.slow
        ),
    ],
)
def test_logits_are_those_of_the_model_that_was_saved(
    kinds: tuple[str, ...], tmp_path: Path
) -> None:
    run_processes(2, go_around, tmp_path, kinds)


def vision_model() -> Any:
    import transformers

    return transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            image_size=8, patch_size=4,
        )
    )  # fmt: skip


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: {"net": {"m": model}}])
@pytest.mark.parametrize("kind", ["Mixtral", "vision"])
def test_a_plain_load_of_other_tensors_tells_the_recipe(
    kind: str, wrap: Any, tmp_path: Path
) -> None:
    saved, model = (vision_model() if kind == "vision" else make(kind, seed) for seed in (0, 1))
    saved.save_pretrained(tmp_path)
    state = wrap(model)
    with pytest.raises(MismatchError, match="has other tensors than its files") as caught:
        remesh.load(state, tmp_path)
    assert caught.value.missing
    call = str(caught.value).rpartition("transform=")[2].removesuffix(")")
    where = {"huggingface_to_module": huggingface_to_module, "state": state, "model": model}
    remesh.load(state, tmp_path, transform=eval(call, where))
    found = model.state_dict()
    assert all(torch.equal(found[name], one) for name, one in saved.state_dict().items())


def test_a_weight_that_only_the_saved_model_ties_is_told_how_to_fill(tmp_path: Path) -> None:
    saved, model = make("tied Llama", 0), make("Llama", 1)
    saved.save_pretrained(tmp_path)
    with pytest.raises(MismatchError, match=r"does not tie these weights. To fill both") as caught:
        remesh.load(model, tmp_path)
    assert caught.value.missing == ("lm_head.weight",)
    transform = eval(str(caught.value).rpartition("transform=")[2])
    assert transform == "model.embed_tokens.weight -> lm_head.weight"
    remesh.load(model, tmp_path, transform=transform)
    found = model.state_dict()
    assert found["lm_head.weight"].data_ptr() != found["model.embed_tokens.weight"].data_ptr()
    assert all(torch.equal(found[name], one) for name, one in saved.state_dict().items())


def test_no_recipe_is_told_that_would_not_help(tmp_path: Path) -> None:
    make("Mixtral", 0).save_pretrained(tmp_path / "Mixtral")
    make("Llama", 0).save_pretrained(tmp_path / "Llama")
    for kind, folder in (("Mixtral", "Llama"), ("Qwen3-MoE", "Mixtral"), ("GPT-NeoX", "Llama")):
        with pytest.raises(MismatchError, match=r"^the state does not fit the checkpoint"):
            remesh.load(make(kind, 1), tmp_path / folder)


def test_each_operation_of_the_table_is_a_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading as table

    model = torch.nn.ParameterDict(
        {name: torch.zeros(shape) for name, shape in
         {"q": (2, 3), "k": (2, 3), "turned": (3, 2), "all": (2, 4, 3), "cut": (2, 3)}.items()}
    )  # fmt: skip
    entries = [
        table.WeightConverter(["qk"], ["q", "k"], [table.Chunk(dim=0)]),
        table.WeightConverter(["w"], ["turned"], [table.Transpose(0, 1)]),
        table.WeightConverter(
            ["e.*.a", "e.*.b"], ["all"], [table.MergeModulelist(0), table.Concatenate(1)]
        ),
        table.WeightRenaming("piece", "cut"),
    ]
    monkeypatch.setattr(hub, "_table_of", lambda _model: entries)
    stored = {
        "qk": torch.rand(4, 3), "w": torch.rand(2, 3), "piece": torch.rand(2, 3),
        **{f"e.{n}.{x}": torch.rand(2, 3) for n in range(2) for x in "ab"},
    }  # fmt: skip
    made = huggingface_to_module(model, prefix="net.").apply(stored)
    assert {name: tuple(one.shape) for name, one in made.items()} == {
        f"net.{name}": tuple(one.shape) for name, one in model.items()
    }
    assert torch.equal(made["net.turned"], stored["w"].T)
    assert torch.equal(made["net.all"][1, 2:], stored["e.1.b"])
    back = module_to_huggingface(model, prefix="net.").apply(made)
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], one) for name, one in stored.items())
    entries[0] = table.WeightConverter(["qk"], ["q"], [table.Interleave(dim=0)])
    with pytest.raises(TransformError, match="makes q with Interleave, for which there is no"):
        huggingface_to_module(model)
