"""The transformation language: statements that turn the tensors of one state into another's.

A transformation is parsed once (`Transform`), and resolved against sources and targets, which gives
for any box of any target the boxes of sources that make it up (`Resolved.regions`). So a load reads
only those. Nothing here reads or moves bytes, apart from `Transform.apply`, which does so for
dictionaries of arrays.

The modules in reading order; each imports only those before it:

1. `syntax`: names in a text, and errors that point at them;
2. `tensor_info`, `rearrange`, `expressions`: tensors as expressions over sources, and the walk from
   a box of a target back to boxes of sources;
3. `operators`: what a statement can do, one class each, whose fields are its attributes;
4. `statements`: text to statements;
5. `optimizer_state`: which tensors follow a parameter;
6. `wildcards`: a statement with wildcards to steps with plain names;
7. `renames`: all that may be given as a program, and the statements that it becomes;
8. `execute`: what ends up where, and each name bound to an expression;
9. `resolve`: the answers, and how they are found for given tensors;
10. `arrays`, `transform`: arrays in memory, and the public class.

The language is specified in docs/transform.md.
"""

from __future__ import annotations

from remesh.transform.arrays import arranged as arranged
from remesh.transform.optimizer_state import find_states as find_states
from remesh.transform.optimizer_state import short_name as short_name
from remesh.transform.renames import Program
from remesh.transform.resolve import Region, Resolved
from remesh.transform.tensor_info import TensorInfo
from remesh.transform.tensor_info import infos_of as infos_of
from remesh.transform.tensor_info import infos_of_boxes as infos_of_boxes
from remesh.transform.transform import Transform as Transform
from remesh.transform.transform import as_transform as as_transform

__all__ = ["Program", "Region", "Resolved", "TensorInfo"]
