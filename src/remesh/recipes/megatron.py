"""Between the names of Hugging Face models and those of Megatron Core's `GPTModel`.

Megatron has one tensor for query, key and value, with a block for each key-value head, and one for
gate and up. How its checkpoints store layers depends on their metadata:

* `stacked`: one tensor for all layers, `decoder.layers.mlp.linear_fc2.weight` of shape
  `[layers, ...]`; those of experts have `[layers, experts, ...]`. Megatron's default.
* `numbered`: a tensor for each layer (`non_homogeneous_layers`), which Megatron writes where layers
  differ.
* `singleton`: a tensor for each layer and each expert, and one each for gate (`weight_w`) and up
  (`weight_v`): `singleton_local_shards`.

Norms before experts are called after the layer that follows in checkpoints of Megatron's local
layers, and `pre_mlp_layernorm` in those of Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from remesh.errors import StateError
from remesh.recipes.hub import listed, quoted
from remesh.transform import Transform
from remesh.transform.tensor_info import Described

Layers = Literal["stacked", "numbered", "singleton"]
Engine = Literal["transformer_engine", "local"]

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
MODELS = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""The models that there are recipes for, as `model_type` in their `config.json`."""


def huggingface_to_megatron(
    config: Mapping[str, Any],
    *,
    layers: Layers | None = None,
    engine: Engine = "transformer_engine",
    prefix: str = "",
) -> Transform:
    """From the names in Hugging Face files to those of Megatron Core's checkpoints.

    A vocabulary is not padded: Megatron takes a smaller one.

    Args:
        config: The model's `config.json`.
        layers: How layers are stored; None for `stacked`, or `numbered` if they differ.
        engine: Which of Megatron's layers load the checkpoint; models without experts have the
            same names in both.
        prefix: What Megatron's names begin with.

    Raises:
        StateError: If there is no recipe for the model, or layers that differ would be stacked.
    """
    return Transform(_statements(_Model(config), layers, engine, prefix))


def megatron_to_huggingface(
    config: Mapping[str, Any], stored: Mapping[str, Described]
) -> Transform:
    """From the names of Megatron Core's checkpoints to those in Hugging Face files.

    Args:
        config: The model's `config.json`.
        stored: The index of the checkpoint, `Checkpoint(path).index`: it says how layers are
            stored, and how many rows the vocabulary was padded to.

    Raises:
        StateError: If there is no recipe for the model, or the checkpoint is none of Megatron Core.
    """
    model = _Model(config)
    found = sorted((name for name in stored if name.endswith(EMBEDDING)), key=len)
    if not found:
        raise StateError(f"no {EMBEDDING} is stored: not a checkpoint of Megatron Core's GPTModel")
    prefix = found[0].removesuffix(EMBEDDING)
    layers: Layers = "stacked"
    if f"{prefix}decoder.layers.0.self_attention.linear_proj.weight" in stored:
        layers = "singleton" if any(name.endswith(".weight_w") for name in stored) else "numbered"
    is_te = any(name.endswith(".pre_mlp_layernorm.weight") for name in stored)
    engine: Engine = "transformer_engine" if is_te else "local"
    vocab_size = int(config["vocab_size"])
    statements = []
    for name in (EMBEDDING, *([] if model.is_tied else [OUTPUT])):
        num_rows = stored[prefix + name].shape[0] if prefix + name in stored else 0
        if num_rows > vocab_size:
            whole, rest = quoted(prefix + name), quoted(f"{prefix}{name}._padding")
            sizes = [vocab_size, num_rows - vocab_size]
            statements += [f"{whole} -> {whole}, {rest}, axis=0, sizes={sizes}", f"{rest} -> _"]
    back = Transform(_statements(model, layers, engine, prefix)).reversed()
    return Transform([*statements, str(back)])


@dataclass(frozen=True, slots=True)
class _Model:
    """The configuration of a model."""

    config: Mapping[str, Any]  # the configuration

    def __post_init__(self) -> None:
        kind = self.config.get("model_type")
        if kind not in MODELS:
            raise StateError(
                f"model_type {kind!r}: recipes are for {', '.join(MODELS)}; write statements as in "
                "docs/transform.md"
            )

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def is_tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", False))

    @property
    def num_experts(self) -> int:
        return int(self.config.get("num_local_experts") or self.config.get("num_experts") or 0)

    def experts_in(self, layer: int) -> bool:
        """True if a layer has experts."""
        dense = self.config.get("mlp_only_layers") or ()
        step = int(self.config.get("decoder_sparse_step") or 1)
        return self.num_experts > 0 and layer not in dense and (layer + 1) % step == 0

    @property
    def layers(self) -> Layers:
        """How Megatron stores the layers of such a model if nothing is said."""
        kinds = {self.experts_in(layer) for layer in range(self.num_layers)}
        return "stacked" if len(kinds) == 1 else "numbered"


def _statements(model: _Model, layers: Layers | None, engine: Engine, prefix: str) -> list[str]:
    """Statements from the names of files to those of Megatron."""
    layers = layers or model.layers
    if layers == "stacked" and model.layers != "stacked":
        raise StateError("layers that differ cannot be stacked; choose layers='numbered'")
    head = [] if model.is_tied else [("lm_head.weight", OUTPUT)]
    pairs = [
        ("model.embed_tokens.weight", EMBEDDING),
        ("model.norm.weight", "decoder.final_layernorm.weight"),
        *head,
    ]
    statements = [f"{quoted(one)} -> {quoted(prefix + other)}" for one, other in pairs]
    made: dict[str, list[str]] = {}
    for layer in range(model.num_layers):
        base = f"{prefix}decoder.layers.{layer}."
        for sources, name, attributes in _layer(model, layer, layers, engine):
            full = [
                base + source if source.startswith(_BETWEEN) else f"model.layers.{layer}.{source}"
                for source in sources
            ]
            is_stacked = layers == "stacked" and not name.startswith(_BETWEEN)
            if is_stacked and not attributes:
                made.setdefault(name, []).append(full[0])
                continue
            if is_stacked:
                made.setdefault(name, []).append(base + name)
            statements.append(f"{listed(full)} -> {quoted(base + name)}{attributes}")
    if layers == "stacked":
        for name, parts in made.items():
            target = quoted(f"{prefix}decoder.layers.{name}")
            statements.append(f"{listed(parts)} -> {target}, stack=0")
    return statements


_Part = tuple[list[str], str, str]
"""Names in a layer of the files, the name in a layer of Megatron, and attributes."""

_BETWEEN = "_expert."
"""What names begin with that stand for tensors of neither system."""


def _layer(model: _Model, layer: int, layers: Layers, engine: Engine) -> list[_Part]:
    config = model.config
    kind = config["model_type"]
    heads = int(config["num_attention_heads"])
    groups = int(config.get("num_key_value_heads") or heads)
    fused = f", fused_qkv, num_heads={heads}, num_key_value_groups={groups}, axis=0"
    qkv = "self_attention.linear_qkv"
    parts: list[_Part] = [
        (["input_layernorm.weight"], f"{qkv}.layer_norm_weight", ""),
        ([f"self_attn.{x}_proj.weight" for x in "qkv"], f"{qkv}.weight", fused),
        (["self_attn.o_proj.weight"], "self_attention.linear_proj.weight", ""),
    ]
    if kind == "qwen2" or config.get("attention_bias"):
        parts.append(([f"self_attn.{x}_proj.bias" for x in "qkv"], f"{qkv}.bias", fused))
    if config.get("attention_bias") and kind != "qwen2":
        parts.append((["self_attn.o_proj.bias"], "self_attention.linear_proj.bias", ""))
    if kind.startswith("qwen3"):
        parts += [
            ([f"self_attn.{x}_norm.weight"], f"self_attention.{x}_layernorm.weight", "")
            for x in "qk"
        ]
    has_experts = model.experts_in(layer)
    is_own = has_experts and engine == "transformer_engine"
    norm = "pre_mlp_layernorm.weight" if is_own else "mlp.linear_fc1.layer_norm_weight"
    parts.append((["post_attention_layernorm.weight"], norm, ""))
    base, names = "mlp.", ("gate_proj", "up_proj", "down_proj")
    if not has_experts:
        for ending in ("weight", "bias") if config.get("mlp_bias") else ("weight",):
            parts += _feed_forward(base, names, "mlp.", layers, ending)
        return parts
    if kind == "mixtral":
        base, names = "block_sparse_moe.", ("w1", "w3", "w2")
    parts.append(([f"{base}gate.weight"], "mlp.router.weight", ""))
    if layers == "singleton":
        for number in range(model.num_experts):
            target = f"mlp.experts.experts.{number}."
            parts += _feed_forward(f"{base}experts.{number}.", names, target, layers)
        return parts
    gate, up, down = (
        [f"{base}experts.{number}.{name}.weight" for number in range(model.num_experts)]
        for name in names
    )
    between = [f"{_BETWEEN}{number}" for number in range(model.num_experts)]
    target = "mlp.experts.experts.linear_fc"
    return [
        *parts,
        *(([*both], name, ", axis=0") for *both, name in zip(gate, up, between, strict=True)),
        (between, f"{target}1.weight", ", stack=0"),
        (down, f"{target}2.weight", ", stack=0"),
    ]


def _feed_forward(
    base: str, names: tuple[str, str, str], target: str, layers: Layers, ending: str = "weight"
) -> list[_Part]:
    """Gate, up and down of a layer, or of one expert: their weights or their biases."""
    gate, up, down = (f"{base}{name}.{ending}" for name in names)
    last: _Part = ([down], f"{target}linear_fc2.{ending}", "")
    first = f"{target}linear_fc1.{ending}"
    if layers == "singleton":
        return [([gate], f"{first}_w", ""), ([up], f"{first}_v", ""), last]
    return [([gate, up], first, ", axis=0"), last]
