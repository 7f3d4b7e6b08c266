"""The transformation language: statements that turn the tensors of one state into another's.

A transformation is parsed once (`Transform`), and resolved against sources and targets, which gives
for any box of any target the boxes of sources that make it up (`Resolved.regions`). So a load reads
only those. Nothing here reads or moves bytes, apart from `Transform.apply`, which does so for
dictionaries of arrays.

The path of a transformation: `parser` makes `syntax` of text, with one of the
`operators` for each statement; `expand` writes out wildcards; `execute` binds each name to one of
the `expressions` over sources; `resolve` matches that with the targets; `resolved` answers.
`inverse` turns statements around, `optimizer_state` knows which tensors follow a parameter,
`rearrange` traces boxes through permutations and reshapes. The language is specified in
docs/transform.md.
"""

from __future__ import annotations

from remesh.transform.arrays import arranged as arranged
from remesh.transform.optimizer_state import find_states as find_states
from remesh.transform.optimizer_state import short_name as short_name
from remesh.transform.parser import Program
from remesh.transform.resolved import Region, Resolved
from remesh.transform.tensor_info import TensorInfo
from remesh.transform.tensor_info import infos_of as infos_of
from remesh.transform.tensor_info import infos_of_boxes as infos_of_boxes
from remesh.transform.transform import Transform as Transform
from remesh.transform.transform import as_transform as as_transform

__all__ = ["Program", "Region", "Resolved", "TensorInfo"]
