"""`Transform`: a parsed program, and what can be done with it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from remesh._repr import short_repr
from remesh.core.collector import gc_paused
from remesh.errors import TransformError
from remesh.transform import arrays
from remesh.transform.renames import (
    Program,
    Renames,
    Rule,
    read_program,
    rename_statements,
    renames_among,
)
from remesh.transform.resolve import Resolved, Resolver
from remesh.transform.statements import Statements
from remesh.transform.tensor_info import Described, infos_of


@dataclass(frozen=True, slots=True, init=False)
class Transform:
    """Statements that make the tensors of one state from those of another.

    It holds no tensors and may be used any number of times.

    Args:
        program: A text of any number of statements, or several texts; docs/transform.md specifies
            the language. Or a dict of renames, old name to new name, which happen all at once; a
            name that ends with a dot is a prefix, and None stands for what is not wanted. Or a
            function from old name to new name or None.
        owners: Only needed where the state of one optimizer may belong to either of two sets of
            parameters: the prefix of the parameters, by the prefix of the states' names, such as
            `{"optimizer.state.": "model."}`.

    Raises:
        TransformError: If a statement is malformed; the message shows where.

    Example:
        >>> import numpy as np
        >>> transform = Transform("q, k, v -> qkv, axis=0")
        >>> state = {name: np.full((2, 3), name == "k") for name in "qkv"}
        >>> transform.apply(state)["qkv"].sum(axis=1).tolist()
        [0, 0, 3, 3, 0, 0]
    """

    owners: Mapping[str, str]
    """See above."""
    rename: Rule | None
    """A rule that says what to rename once the names of the sources are known (`bind`)."""
    program: Statements | Renames | None
    """Statements, or what is renamed, all at once; None for a rule that is not bound yet."""

    __repr__ = short_repr

    def __init__(self, program: Program, *, owners: Mapping[str, str] | None = None) -> None:
        given = read_program(program)
        rule, bound = (given, None) if callable(given) else (None, given)
        _filled(self, dict(owners or {}), rule, bound)

    @property
    def statements(self) -> Statements:
        """The statements, in order; none of a rule that is not bound yet."""
        if self.program is None or isinstance(self.program, tuple):
            return self.program or ()
        return rename_statements(self.program)

    def bind(self, names: Iterable[str], *, called: Container[str] = ()) -> Transform:
        """The transformation as statements, once the names of its sources are known.

        Args:
            names: Names of tensors and plain values.
            called: What the optimizers of the targets call their parameters, as far as that is
                known. Of a parameter with a new prefix it says whether they repeat the prefix.

        Returns:
            This one, unless it renames by prefix or function.

        Raises:
            TransformError: If two names become one.
        """
        if self.rename is None or self.program is not None:
            return self
        renames = renames_among(self.rename, names, self.owners, called)
        return _filled(object.__new__(Transform), self.owners, self.rename, renames)

    def reversed(self) -> Transform:
        """The statements turned around: last first, arrows from right to left.

        The result need not undo this transformation.

        Raises:
            TransformError: If a statement has no opposite (`dtype=`).
        """
        if self.program is None:
            raise TransformError(
                "the names of the sources are not known yet\n"
                "They say what a prefix or a function renames; call bind(names) first"
            )
        turned = tuple(statement.turned() for statement in self.statements[::-1])
        return _filled(object.__new__(Transform), self.owners, None, turned)

    def resolve(
        self,
        sources: Mapping[str, Described | None],
        targets: Mapping[str, Described | None] | None = None,
        *,
        aliases: Mapping[str, str] | None = None,
        cast: bool = False,
        with_outputs: bool = False,
        called: Container[str] = (),
    ) -> Resolved:
        """Find out where every target comes from, without reading anything.

        Args:
            sources: The sources by name: an `Index`, or anything with `dtype` and `shape`. None
                stands for a plain value (a step count that is a number).
            targets: The targets, likewise: those of all ranks, since a `*` on the right and the
                layouts of tensor parallelism depend on all of them. If not given, the targets are
                what statements make and leave over, and sources that they do not read.
            aliases: Further names of sources (tied weights): alias to name. An alias finds the
                optimizer state that is stored under another name of its tensor. An `Index` says
                so itself.
            cast: Convert whatever has another dtype than its target, optimizer state included,
                where otherwise a statement would have to say so.
            with_outputs: Include all outputs: what statements make and do not read again, and the
                optimizer states of it and of the targets.
            called: As for `bind`.

        Returns:
            The answers. Targets that are missing, and untouched ones that do not fit, are listed
            there; `Resolved.check` refuses them.

        Raises:
            TransformError: If a statement does not fit the tensors.
        """
        if aliases is None:
            aliases = getattr(sources, "aliases", {})
        with gc_paused():
            infos = infos_of(sources)
            program = self.bind(infos, called=called).program
            assert program is not None
            return Resolver(
                program,
                infos,
                None if targets is None else infos_of(targets),
                self.owners,
                aliases,
                cast=cast,
                with_outputs=with_outputs,
                called=called,
            ).run()

    def apply(
        self, tensors: Mapping[str, Any], targets: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Transform arrays in memory.

        Args:
            tensors: Sources by name: numpy arrays or torch tensors; other values are plain values.
            targets: Arrays to fill in place, by name. If not given, new ones are made of all that
                statements make and leave over, and of sources that they do not read.

        Returns:
            The targets by name. Arrays that were given are the same objects.

        Raises:
            TransformError: If a statement does not fit the tensors, or tensors that must agree do
                not. Nothing has been written then.
            MismatchError: If targets have no source, or one of another shape or dtype. Nothing has
                been written then.
        """
        described = None if targets is None else arrays.describe(targets)
        resolved = self.resolve(arrays.describe(tensors), described, aliases={})
        resolved.check()
        return arrays.apply(resolved, tensors, targets)

    def __str__(self) -> str:
        return "\n".join(map(str, self.statements))


def _filled(transform: Transform, *values: object) -> Transform:
    for name, value in zip(("owners", "rename", "program"), values, strict=True):
        object.__setattr__(transform, name, value)
    return transform


def as_transform(value: Transform | Program | None) -> Transform | None:
    """The transformation that an argument `transform=` stands for; None for none."""
    return value if value is None or isinstance(value, Transform) else Transform(value)
