"""The files of a checkpoint as a dict, and the dict as a storage or a directory."""

from __future__ import annotations

from pathlib import Path

from remesh.storage import MemoryStorage

Files = dict[str, bytes]
"""Relative path → content."""


def files_in(folder: Path) -> Files:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_files(files: Files, folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def in_memory(files: Files) -> MemoryStorage:
    storage = MemoryStorage()
    for path, content in files.items():
        storage.put(path, content, overwrite=False)
    return storage
