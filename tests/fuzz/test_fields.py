"""Each value in the JSON of each format, replaced in turn by one of each type of JSON.

Drawn damage finds a field that is used before its type is known only by luck; this walks over all
of them. Files whose content is covered by a digest are left to `test_fuzz.py`, which forges it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from remesh.formats import native
from tests.fuzz.checkpoints import make_checkpoint
from tests.fuzz.files import Files
from tests.fuzz.trees import slots_of
from tests.fuzz.trial import attempt, import_late_modules, sound_state

INSTEAD: tuple[Any, ...] = (None, True, 0.5, "x", [], {"x": 1})

_WITH_JSON = (
    "megatron torch_dist", "megatron flattened", "megatron zarr", "zarr by zarr",
    "huggingface", "diffusers", "atorch by remesh",
)  # fmt: skip


def _documents(files: Files) -> Iterator[tuple[str, Any]]:
    """The JSON files of a checkpoint."""
    for path, content in sorted(files.items()):
        if content[:1] in {b"{", b"["} and native.RECORD_NAME not in files:
            yield path, json.loads(content)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", _WITH_JSON)
def test_each_field_may_be_of_any_type(name: str) -> None:
    import_late_modules()
    files = make_checkpoint(name)
    state = sound_state(files)
    documents = list(_documents(files))
    assert documents
    for path, document in documents:
        for number in range(len(slots_of(document))):
            for value in INSTEAD:
                changed = copy.deepcopy(document)
                node, key = slots_of(changed)[number]
                node[key] = value
                try:
                    attempt(files | {path: json.dumps(changed).encode()}, state, by_command=False)
                except BaseException as error:
                    error.add_note(f"{name}, {path}: {value!r} instead of {key!r}, slot {number}")
                    raise
