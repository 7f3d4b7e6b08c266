"""The transformation language: statements that turn the tensors of one state into another's.

A transformation is parsed once (`Transform`) and meets tensors later. From then on it can
say, for any box of any target, which boxes of which sources make it up (`Resolved.regions`), so
whoever moves the bytes reads only those. Nothing here reads or moves bytes itself, apart from
`Transform.apply`, which does so for dictionaries of arrays.

The path of a transformation: `lexer` and `parser` make `syntax` of text, with one of the
`operators` for each statement; `expand` writes out wildcards; `execute` binds each name to one of
the `expressions` over sources; `resolve` matches that with the targets; `resolved` answers.
`inverse` turns statements around, `optimizer` knows which tensors follow a parameter, `rearrange`
traces boxes through permutations and reshapes. docs/transform.md specifies the language.
"""

from __future__ import annotations

from remesh.transform.evaluate import arranged as arranged
from remesh.transform.info import TensorInfo
from remesh.transform.info import num_pieces_of as num_pieces_of
from remesh.transform.language import Transform as Transform
from remesh.transform.language import as_transform as as_transform
from remesh.transform.parser import Program
from remesh.transform.resolved import Region, Resolved

__all__ = ["Program", "Region", "Resolved", "TensorInfo"]
