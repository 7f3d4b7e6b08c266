"""Small models of transformers with random weights, and ways to shard them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

COMMON = {
    "vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", COMMON),
    "biased Llama": ("llama", {**COMMON, "attention_bias": True, "mlp_bias": True}),
    "tied Llama": ("llama", {**COMMON, "tie_word_embeddings": True}),
    "Mixtral": ("mixtral", {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3-MoE": (
        "qwen3_moe",
        {**COMMON, **MOE, "num_experts": 4, "head_dim": 6, "norm_topk_prob": True},
    ),
    # Its configuration may say so, though its models have the same biases either way.
    "Qwen2": ("qwen2", {**COMMON, "attention_bias": True}),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            **COMMON, **MOE, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 12,
            "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6,
            "num_key_value_heads": 4, "n_shared_experts": 1,
        },
    ),
    "GPT-NeoX": ("gpt_neox", {**COMMON, "intermediate_size": 32}),
}  # fmt: skip
"""Name → type of the model, and its configuration."""

COLUMNS = (
    "q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj",
    "query_key_value", "dense_h_to_4h",
)  # fmt: skip
ROWS = ("o_proj", "down_proj", "attention.dense", "dense_4h_to_h")


def make(kind: str, seed: int) -> Any:
    """A model with random weights, those of its norms too."""
    import transformers

    name, settings = KINDS[kind]
    config = transformers.AutoConfig.for_model(name, **settings)
    torch.manual_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.03)
    return model


def read_by_transformers(folder: Path | str) -> Any:
    """The model in a folder, which computes as those of `make` do."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """What the safetensors library reads from all files of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(12)[None] % 30).logits
    return found


def has_experts(model: nn.Module) -> bool:
    return any(name.endswith("experts.gate_up_proj") for name, _ in model.named_parameters())


def shard(model: Any, layout: str, mesh: DeviceMesh) -> None:
    """Shard a model: `fsdp`, `tp` (attention and dense layers) or `ep` (experts)."""
    if layout == "fsdp":
        layers: Any = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "tp":
        plan: dict[str, Any] = {
            name: ColwiseParallel() if name.endswith(COLUMNS) else RowwiseParallel()
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name.endswith((*COLUMNS, *ROWS))
        }
        parallelize_module(model, mesh, plan)
    else:
        for module in list(model.modules()):
            if hasattr(module, "gate_up_proj"):
                _share_experts(module, mesh)


def _share_experts(experts: Any, mesh: DeviceMesh) -> None:
    """Give each rank its experts, and add up what they say."""
    for name in ("gate_up_proj", "down_proj"):
        whole = getattr(experts, name).detach()
        part = distribute_tensor(whole, mesh, [Shard(0)])
        setattr(experts, name, nn.Parameter(part, requires_grad=False))
    local = experts.num_experts // mesh.size()
    own_forward = type(experts).forward

    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        mine = index - local * mesh.get_local_rank()
        inside = (mine >= 0) & (mine < local)

        class Local:
            num_experts = local
            gate_up_proj = experts.gate_up_proj.to_local()
            down_proj = experts.down_proj.to_local()
            act_fn, config = experts.act_fn, experts.config

        result: torch.Tensor = own_forward(Local, hidden, torch.where(inside, mine, local), weights)
        dist.all_reduce(result)
        return result

    experts.forward = forward
