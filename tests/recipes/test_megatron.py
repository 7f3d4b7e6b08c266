"""Hugging Face models as models of Megatron Core: same logits, and back bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.distributed.device_mesh import init_device_mesh

import remesh
from remesh.checkpoint import convert
from remesh.cli import cli
from remesh.errors import StateError
from remesh.exchange import Exchange
from remesh.recipes import (
    huggingface_to_megatron,
    huggingface_to_module,
    megatron_to_huggingface,
)
from remesh.transform import TensorInfo
from tests.compat.megatron.layouts import megatron_on_cpu
from tests.recipes.models import KINDS, logits_of, make, shard, tensors_in
from tests.support import run_processes

pytest.importorskip("transformers", minversion="5")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what transformers saves of each model."""
    root = tmp_path_factory.mktemp("hub")
    for kind in ("Llama", "biased Llama", "tied Llama", "Mixtral", "Qwen2", "Qwen3-MoE"):
        make(kind, 0).save_pretrained(root / kind)
    return root


def config_of(kind: str) -> dict[str, Any]:
    name, settings = KINDS[kind]
    return {"model_type": name, **settings}


@pytest.mark.parametrize("layers", ["stacked", "numbered", "singleton"])
@pytest.mark.parametrize(
    "kind", ["Llama", "biased Llama", "tied Llama", "Mixtral", "Qwen2", "Qwen3-MoE"]
)
def test_there_and_back_bit_for_bit(kind: str, layers: Any, saved: Path) -> None:
    """With a vocabulary that was padded meanwhile."""
    expected, config = tensors_in(saved / kind), config_of(kind)
    there = huggingface_to_megatron(config, layers=layers, prefix="model.")
    made = there.apply(expected)
    layer = "" if layers == "stacked" else "1."
    gate_up = ("mlp.experts.experts." if "M" in kind else "mlp.") + "linear_fc1.weight"
    if layers != "singleton":
        assert f"model.decoder.layers.{layer}{gate_up}" in made
    assert {name.split(".")[1] for name in made} <= {"decoder", "embedding", "output_layer"}
    assert "model.output_layer.weight" in made or kind == "tied Llama"
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if f"model.{name}" in made:
            made[f"model.{name}"] = torch.cat([made[f"model.{name}"], torch.ones(2, 16)])
    back = megatron_to_huggingface(config, made).apply(made)
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in expected.items())


def test_layers_that_differ_are_numbered() -> None:
    config = {**config_of("Qwen3-MoE"), "mlp_only_layers": [0]}
    names = str(huggingface_to_megatron(config))
    assert '"decoder.layers.0.mlp.linear_fc1.weight"' in names.replace("'", '"')
    with pytest.raises(StateError, match="cannot be stacked"):
        huggingface_to_megatron(config, layers="stacked")
    with pytest.raises(StateError, match="'bloom': recipes are for llama, mistral"):
        huggingface_to_megatron({"model_type": "bloom"})
    with pytest.raises(StateError, match="not a checkpoint of Megatron Core"):
        megatron_to_huggingface(config, {"w": TensorInfo("float32", (2,))})


def test_the_command_line_converts_there_and_back(saved: Path, tmp_path: Path) -> None:
    hub = saved / "Mixtral"
    for arguments in (
        [hub, tmp_path / "dist", "--format", "torch_dist", "--recipe", "huggingface-to-megatron"],
        [
            tmp_path / "dist", tmp_path / "hub", "--format", "huggingface",
            "--recipe", "megatron-to-huggingface", "--metadata", hub / "config.json",
        ],
    ):  # fmt: skip
        result = CliRunner().invoke(cli, ["convert", *map(str, arguments)])
        assert result.exit_code == 0, result.output
    stored = remesh.Checkpoint(tmp_path / "dist").index
    name = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert stored[name].shape == (2, 4, 48, 16)
    found, expected = tensors_in(tmp_path / "hub"), tensors_in(hub)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert (tmp_path / "hub/config.json").exists()


@pytest.fixture
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron Core in one process without a GPU."""
    pytest.importorskip("megatron.core")
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    from megatron.core import parallel_state

    without_cuda(monkeypatch)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def gpt_model(kind: str, theta: float, *, tensor: int = 1, expert: int = 1) -> Any:
    """Megatron Core's model of a configuration, with its local layers, in a layout."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    settings = KINDS[kind][1]
    num_experts = settings.get("num_local_experts", settings.get("num_experts"))
    experts: dict[str, Any] = {
        "num_moe_experts": num_experts,
        "moe_ffn_hidden_size": settings.get("moe_intermediate_size", 24),
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
    }
    has_norms = kind.startswith("Qwen3")
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2,
        kv_channels=settings.get("head_dim", 4), ffn_hidden_size=24, use_cpu_initialization=True,
        gated_linear_unit=True, add_bias_linear=False, add_qkv_bias=kind == "Qwen2",
        normalization="RMSNorm", layernorm_epsilon=1e-5 if kind == "Mixtral" else 1e-6,
        activation_func=torch.nn.functional.silu, hidden_dropout=0.0, attention_dropout=0.0,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        apply_rope_fusion=False, gradient_accumulation_fusion=False, qk_layernorm=has_norms,
        tensor_model_parallel_size=tensor, expert_model_parallel_size=expert,
        **(experts if num_experts else {}),
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts, qk_layernorm=has_norms, normalization="RMSNorm"
    )
    return GPTModel(
        config, spec, vocab_size=32, max_sequence_length=32, position_embedding_type="rope",
        rotary_base=int(theta), parallel_output=False,
        share_embeddings_and_output_weights=kind == "tied Llama",
    ).eval()  # fmt: skip


def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Megatron's local layers look for where there is no GPU."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    monkeypatch.setattr(random.CudaRNGStatesTracker, "fork", lambda *_: nullcontext())


def logits_of_gpt(model: Any) -> torch.Tensor:
    """What `logits_of` gives of the same model of transformers."""
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(12)[None] % 30, torch.arange(12)[None], mask)
    return logits[..., :30]


@pytest.mark.parametrize(
    "kind",
    ["Mixtral", *(pytest.param(k, marks=pytest.mark.slow) for k in ("tied Llama", "Qwen3-MoE"))],
)
@pytest.mark.usefixtures("megatron")
def test_the_logits_are_those_of_megatron_core(kind: str, saved: Path, tmp_path: Path) -> None:
    """Loaded by Megatron's own library, into a model with a padded vocabulary."""
    from megatron.core import dist_checkpointing

    original, config = make(kind, 0), config_of(kind)
    recipe = huggingface_to_megatron(config, engine="local")
    convert(saved / kind, tmp_path / "dist", format="torch_dist", transform=recipe)
    model = gpt_model(kind, original.config.rope_parameters["rope_theta"])
    wanted = model.sharded_state_dict()
    loaded = dist_checkpointing.load(wanted, str(tmp_path / "dist"), strict="log_all")
    model.load_state_dict(loaded, strict=False)
    torch.testing.assert_close(logits_of_gpt(model), logits_of(original), rtol=0, atol=2e-7)
    back = megatron_to_huggingface(config, remesh.Checkpoint(tmp_path / "dist").index)
    convert(tmp_path / "dist", tmp_path / "hub", format="huggingface", transform=back)
    found, expected = tensors_in(tmp_path / "hub"), tensors_in(saved / kind)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def train_there_and_go_on_here(exchange: Exchange, root: Path) -> None:
    """Saved by Megatron's own package, cut over two ranks; loaded into modules under FSDP2."""
    package: Any = megatron_on_cpu()
    from megatron.core import parallel_state

    without_cuda(pytest.MonkeyPatch())  # this process ends with the test
    mesh = init_device_mesh("cpu", (exchange.world_size,))
    for kind, tensor, expert in (("tied Llama", 2, 1), ("Mixtral", 1, 2)):
        parallel_state.initialize_model_parallel(tensor, expert_model_parallel_size=expert)
        module, folder = make(kind, 1), root / kind
        theirs = gpt_model(
            kind, module.config.rope_parameters["rope_theta"], tensor=tensor, expert=expert
        )
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                # Norms begin as ones, and the experts of all ranks alike.
                if "norm" in name or ".experts." in name:
                    torch.manual_seed(exchange.rank if ".experts." in name else 0)
                    parameter.add_(torch.randn_like(parameter), alpha=0.03)
        folder.mkdir(exist_ok=True)
        dist.barrier()
        package.save(theirs.sharded_state_dict(), str(folder))
        shard(module, "fsdp", mesh)
        files = megatron_to_huggingface(config_of(kind), remesh.Checkpoint(folder).index)
        recipe = remesh.Transform([str(files), str(huggingface_to_module(module))])
        remesh.load(module, folder, transform=recipe)
        expected = logits_of_gpt(theirs)
        torch.testing.assert_close(logits_of(module), expected, rtol=0, atol=1e-6)
        parallel_state.destroy_model_parallel()


@pytest.mark.slow
def test_a_megatron_checkpoint_goes_on_under_fsdp2(tmp_path: Path) -> None:
    pytest.importorskip("megatron")
    run_processes(2, train_there_and_go_on_here, tmp_path)
