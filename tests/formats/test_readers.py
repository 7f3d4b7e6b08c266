"""Every format that remesh reads passes one suite, on files that its own library wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

import remesh
from remesh.core.index import Index
from remesh.formats.table import FORMATS, place_of, read_contents
from remesh.storage import Storage
from tests.support.format_conformance import Arrays, FormatConformance

ELSEWHERE = {
    "torch_dcp": "tests/formats/test_torch_dcp.py",
    "zarr": "tests/formats/test_zarr.py",
    "paddle": "recorded files: tests/compat/test_flex_paddle.py",
    "deepspeed": "recorded files: tests/formats/test_deepspeed.py",
    "megatron_legacy": "tests/formats/test_megatron_legacy.py",
    "flat_param": "the files of its program: tests/compat/test_atorch_files.py",
}
"""Where the formats are tested that are not here."""


class Opening(FormatConformance):
    """Opens a place as a user does; the format must be recognised."""

    format = ""
    file = ""

    def open(self, folder: Path) -> tuple[Storage, Index]:
        place = place_of(folder / self.file)
        contents = read_contents(place)
        assert contents.format == self.format
        return place.storage, contents.index


class TestNative(Opening):
    format = "remesh"

    def write(self, arrays: Arrays, folder: Path) -> None:
        remesh.save(dict(arrays), folder)


class TestTorchSave(Opening):
    format, file = "torch_file", "state.pt"

    def write(self, arrays: Arrays, folder: Path) -> None:
        torch.save({name: torch.tensor(a) for name, a in arrays.items()}, folder / self.file)


class TestSafetensorsFile(Opening):
    format, file = "safetensors", "weights.safetensors"

    def write(self, arrays: Arrays, folder: Path) -> None:
        save_file(dict(arrays), folder / self.file)


class TestSafetensorsFolder(Opening):
    format = "safetensors"

    def write(self, arrays: Arrays, folder: Path) -> None:
        for number, (name, array) in enumerate(arrays.items()):
            save_file({name: array}, folder / f"{number}.safetensors")


class TestSafetensorsParts(Opening):
    """As DCP's Hugging Face writer leaves them: each file has a part of each tensor."""

    format = "safetensors"

    def write(self, arrays: Arrays, folder: Path) -> None:
        for part in range(2):
            cut = {name: np.array_split(array, 2)[part] for name, array in arrays.items()}
            offsets = {
                name: {"saved_offsets": [(len(array) + 1) // 2 * part, *[0] * (array.ndim - 1)]}
                for name, array in arrays.items()
            }
            path = folder / f"shard-{part}.safetensors"
            save_file(cut, path, {"DCP_SHARDING_INFO": json.dumps(offsets)})


class TestHuggingFace(Opening):
    format = "huggingface"

    def write(self, arrays: Arrays, folder: Path) -> None:
        save_file(dict(arrays), folder / "model.safetensors")


class TestHuggingFaceInSeveralFiles(Opening):
    format = "huggingface"

    def write(self, arrays: Arrays, folder: Path) -> None:
        places = {name: f"model-{n:05d}-of-9.safetensors" for n, name in enumerate(arrays)}
        for name, file in places.items():
            save_file({name: arrays[name]}, folder / file)
        index = json.dumps({"metadata": {}, "weight_map": places})
        (folder / "model.safetensors.index.json").write_text(index)


def test_every_format_is_tested() -> None:
    here = {suite.format for suite in Opening.__subclasses__()}
    assert here | ELSEWHERE.keys() == {row.name for row in FORMATS}
    assert here.isdisjoint(ELSEWHERE)
