"""What the ranks of a save know that is not a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from remesh.core import values
from remesh.core.state import Description
from remesh.errors import CoverageError, NameCollisionError, StateError
from remesh.formats import native


def document_of(description: Description, aliases: Mapping[str, str]) -> native.ValuesDocument:
    """All that a rank knows that is not a tensor."""
    document = native.ValuesDocument(
        values={
            name: msgspec.Raw(values.encode(value, name))
            for name, value in description.values.items()
        },
        lists=dict(description.merged_lists),
        sequences=[(list(path), kind) for path, kind in description.sequences.items()],
        aliases=dict(aliases),
        unchecked=list(description.unchecked) or msgspec.UNSET,
    )
    for element in description.objects:
        if element.is_main_replica:
            name = element.unique_name
            value = values.encode_object(element.data, name)
            stored = native.ObjectElement(
                element.name, element.global_shape, element.global_offset, msgspec.Raw(value)
            )
            if bytes(document.objects.setdefault(name, stored).value) != value:
                raise NameCollisionError(
                    f"{name}: this element has two different main replicas\n"
                    "Rename one of them, or give it its own offset"
                )
    for name, path in description.paths.items():
        document.set_path(name, path)
    for name in (*(entry.name for entry in description.tensors), *document.objects):
        if name not in description.paths:
            document.set_path(name, (name,))
    return document


def document_of_all(
    documents: Sequence[bytes], replicas: Sequence[Sequence[str]], names: Sequence[str]
) -> native.ValuesDocument:
    """The values of all ranks, which go together with each other and with names of tensors.

    Of each rank, in rank order: its encoded document, empty if it is that of another rank; and the
    elements of sharded objects of which it has another replica than the main one.
    """
    document = native.merge_documents(
        [native.ValuesDocument.decode(encoded, "values") for encoded in documents if encoded]
    )
    _check_names(names, document)
    _check_replicas(document, replicas)
    return document


def _check_names(tensor_names: Iterable[str], document: native.ValuesDocument) -> None:
    """Check that a name is a tensor or a value or an alias, on whichever ranks."""
    tensors = set(tensor_names)
    for kind, names in (("value", document.values), ("tied tensor", document.aliases)):
        both = tensors.intersection(names)
        if both:
            name = min(both)
            raise StateError(
                f"{name}: a tensor of its own on one rank and a {kind} on another\nGive them "
                "different names, or make the ranks agree"
            )


def _check_replicas(document: native.ValuesDocument, replicas: Sequence[Sequence[str]]) -> None:
    """Check that every element of a sharded object has a main replica."""
    for rank, names in enumerate(replicas):
        for name in names:
            if name not in document.objects:
                raise CoverageError(
                    f"{name}: rank {rank} has a replica of this element, but no rank its main "
                    "replica\n"
                    "Exactly one rank must have replica_id 0"
                )


def check_metadata(metadata: Mapping[str, object]) -> None:
    """Check that what is recorded beside the state is a JSON object."""
    try:
        same = msgspec.json.decode(msgspec.json.encode(metadata)) == dict(metadata)
    except (TypeError, msgspec.MsgspecError) as error:
        raise StateError(f"metadata must be a JSON object: {error}") from error
    if not same:
        raise StateError(
            "metadata must be a JSON object\n"
            "Only strings as keys, and str, int, float, bool, None, lists and dicts as values"
        )
