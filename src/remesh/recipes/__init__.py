"""Transformations that are ready made: between the names of systems that train the same models.

Each function gives a `remesh.Transform` for the argument `transform=` of `remesh.load` and
`remesh.checkpoint.convert`.
"""

from __future__ import annotations

from remesh.recipes.hub import huggingface_to_module, module_to_huggingface
from remesh.recipes.megatron import huggingface_to_megatron, megatron_to_huggingface

__all__ = [
    "huggingface_to_megatron",
    "huggingface_to_module",
    "megatron_to_huggingface",
    "module_to_huggingface",
]
