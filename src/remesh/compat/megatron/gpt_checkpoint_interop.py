"""A GPT checkpoint for a hybrid model: where each of its layers finds its weights.

A hybrid model is a row of layers of one kind each, written as a pattern: `*` attention, `-` an MLP,
`E` a mixture of experts, `M` Mamba. A layer of a GPT model is an attention and an MLP, so the n-th
attention and the n-th MLP of the pattern take their weights from GPT layer n. GPT checkpoints keep
all layers in one tensor (`decoder.layers.mlp...`) with the layer as first axis. What has no
counterpart keeps the values that it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from remesh.compat.megatron.core import CheckpointingException
from remesh.compat.megatron.dict_utils import dict_list_map_inplace
from remesh.compat.megatron.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

_ATTENTION, _FRESH, _DENSE, _EXPERTS = "*", "M", "-", "E"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_NOT_STORED = "output_layer._extra_state"
_FINAL_NORM = ("decoder.final_norm.", "decoder.final_layernorm.")


@dataclass(frozen=True)
class GPTCompatLayerMaps:
    """Which GPT layer the layers of a hybrid model belong to."""

    attention_to_gpt: Mapping[int, int]  # number of an attention layer → GPT layer
    mlp_to_gpt: Mapping[int, int]  # number of an MLP or a mixture of experts → GPT layer
    fresh_init: frozenset[int]  # numbers of the layers without counterpart
    num_gpt_layers: int  # layers of the GPT model

    def gpt_layer(self, key: str) -> tuple[re.Match[str] | None, int | None]:
        """The layer number in a key and the GPT layer that it belongs to.

        Returns:
            (None, None) if the key is of no layer, and (the number, None) for a fresh layer.

        Raises:
            ValueError: If the model has no such layer.
        """
        found = _LAYER.search(key)
        if found is None:
            return None, None
        layer = int(found[1])
        if layer in self.fresh_init:
            return found, None
        for layers in (self.attention_to_gpt, self.mlp_to_gpt):
            if layer in layers:
                return found, layers[layer]
        raise ValueError(
            f"{key!r}: the pattern has no hybrid layer {layer}\nGive the pattern that the model was"
            " built with"
        )


def gpt_compatible_layer_maps(hybrid_layer_pattern: str) -> GPTCompatLayerMaps:
    """Which GPT layer each layer of a hybrid model belongs to.

    Args:
        hybrid_layer_pattern: Such as `M*-M*-`; `|` between pipeline stages is ignored.

    Raises:
        ValueError: If the pattern cannot be the layers of a GPT model.
    """
    kinds, _, predicted = hybrid_layer_pattern.replace("|", "").partition("/")
    where = f"hybrid layer pattern {hybrid_layer_pattern!r}"
    if predicted:
        raise ValueError(
            f"{where}: the MTP layers '/{predicted}' have no weights in a GPT checkpoint; leave "
            "them out"
        )
    unknown = sorted(set(kinds) - {_ATTENTION, _FRESH, _DENSE, _EXPERTS})
    if unknown:
        raise ValueError(
            f"{where}: layers {unknown} cannot be translated from a GPT checkpoint\nOnly * - E can,"
            " and M keeps its values"
        )
    if _DENSE in kinds and _EXPERTS in kinds:
        raise ValueError(f"{where} mixes dense (-) and MoE (E) layers, which no GPT checkpoint has")
    attention = [number for number, kind in enumerate(kinds) if kind == _ATTENTION]
    mlp = [number for number, kind in enumerate(kinds) if kind in {_DENSE, _EXPERTS}]
    if len(attention) != len(mlp) or not attention:
        raise ValueError(
            f"{where} has {len(attention)} attention (*) and {len(mlp)} MLP (- or E) layers\nA GPT "
            "checkpoint has an equal, nonzero number of both"
        )
    return GPTCompatLayerMaps(
        {layer: number for number, layer in enumerate(attention)},
        {layer: number for number, layer in enumerate(mlp)},
        frozenset(number for number, kind in enumerate(kinds) if kind == _FRESH),
        len(attention),
    )


def _among_layers(leaf: Any, layer: int, num_layers: int) -> Any:
    """The description with the layer as a first axis, changed in place."""
    if isinstance(leaf, ShardedTensorFactory):
        build_fn = leaf.build_fn

        def build(*args: Any) -> Any:
            built = build_fn(*args)
            return dict_list_map_inplace(lambda one: _among_layers(one, layer, num_layers), built)

        leaf.build_fn = build
        return leaf
    assert isinstance(leaf, ShardedTensor | ShardedObject)
    # An object without a grid of its own has one place in it, which the layer takes.
    shape, offset = tuple(leaf.global_shape), tuple(leaf.global_offset)
    if isinstance(leaf, ShardedObject) and shape == (1,):
        shape, offset = (), ()
    leaf.global_shape, leaf.global_offset = (num_layers, *shape), (layer, *offset)
    if isinstance(leaf, ShardedTensor):
        if leaf.axis_fragmentations is None:
            raise CheckpointingException(
                f"{leaf.key}: an irregular tensor has no layer axis; describe its grid"
            )
        leaf.axis_fragmentations = (num_layers, *leaf.axis_fragmentations)
        leaf.prepend_axis_num += 1
    return leaf


def retarget_sharded_state_dict_to_gpt_checkpoint(
    sharded_state_dict: Any, layer_maps: GPTCompatLayerMaps
) -> None:
    """Make a hybrid model's sharded state dict ask for what a GPT checkpoint holds, in place.

    Its structure stays, so the model loads the result. State of the optimizer, whose keys contain
    those of the parameters, is treated alike. What has no counterpart becomes a local object.

    Raises:
        ValueError: If it has a layer that is not in the pattern.
    """

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, ShardedBase):
            return leaf
        found, layer = layer_maps.gpt_layer(leaf.key)
        if leaf.key.endswith(_NOT_STORED) or (found is not None and layer is None):
            return LocalNonpersistentObject(leaf.data)
        if found is None or layer is None:
            leaf.key = leaf.key.replace(*_FINAL_NORM, 1)
            return leaf
        leaf.key = f"{leaf.key[: found.start()]}decoder.layers.{leaf.key[found.end() :]}"
        return _among_layers(leaf, layer, layer_maps.num_gpt_layers)

    dict_list_map_inplace(change, sharded_state_dict)


def retarget_fsdp_state_dict_to_gpt_checkpoint(
    state_dict: Mapping[Any, Any],
    layer_maps: GPTCompatLayerMaps,
    checkpoint_keys: Iterable[str] | None = None,
    checkpoint_prefix: str = "",
) -> dict[Any, Any]:
    """The same for a state dict of DTensors, whose keys are the names of parameters.

    Args:
        state_dict: The model's or the optimizer's, nested in any way; stays as it is.
        layer_maps: From `gpt_compatible_layer_maps`.
        checkpoint_keys: What is stored, as dotted paths. Names take the `module.` prefixes that
            they have there, and what is not stored is left out.
        checkpoint_prefix: Path of the state dict in the checkpoint.

    Returns:
        A state dict with the names of the GPT checkpoint, without what has no counterpart there.

    Raises:
        ValueError: If it has a layer that is not in the pattern.
    """
    stored = None if checkpoint_keys is None else set(checkpoint_keys)

    def renamed(key: Any) -> Any:
        if not isinstance(key, str):
            return key
        found, layer = layer_maps.gpt_layer(key)
        if key.endswith(_NOT_STORED) or (found is not None and layer is None):
            return None
        if found is not None:
            key = f"{key[: found.start()]}decoder.layers.{layer}.{key[found.end() :]}"
        key = key.replace(*_FINAL_NORM, 1)
        return key if stored is None else _as_stored(key, stored)

    def change(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            items = ((renamed(key), inner) for key, inner in value.items())
            return {
                key: change(inner, _joined(path, key))
                for key, inner in items
                if key is not None
                and (
                    stored is None
                    or isinstance(inner, Mapping | list | tuple)
                    or _joined(path, key) in stored
                )
            }
        if isinstance(value, list | tuple):
            return type(value)(change(one, _joined(path, n)) for n, one in enumerate(value))
        return value

    result: dict[Any, Any] = change(state_dict, checkpoint_prefix)
    return result


def _joined(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _as_stored(key: str, stored: Iterable[str]) -> str:
    """The name with as many `module.` before it as the one stored name has that ends alike."""
    bare = re.sub(r"^(?:module\.)+", "", key)
    pattern = re.compile(rf"(?<![A-Za-z0-9_])((?:module\.)*{re.escape(bare)})(?:\.|$)")
    names = {found[1] for one in stored if (found := pattern.search(one)) is not None}
    return names.pop() if len(names) == 1 else key
