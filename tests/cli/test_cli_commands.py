"""Commands and what they print: a line of the table for each."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from .conftest import Run

SHOWN = [
    ("show {one} betas", "(0.9, 0.95)\n"),
    ("show {one} model.half", "  elements\n  [[0.5 0.5 0.5]\n   [0.5 0.5 0.5]]\n"),
    ("show {one} model.embed", "first 10 of 48 elements\n  [0. 1. 2. 3. 4. 5. 6. 7. 8. 9.]\n"),
    ("show {one} model.tied", "tied to  model.head\n"),
    ("ls {one}", "layers.9\nint32    [4]          1   16 B  layers.10\nfloat32  [8, 6]       2"),
    ("ls {one}", "  elements  68: model 60, layers 8\n"),
    ("ls {one} step", "type  value  content\nint   step   1\n"),
    ("ls {one} --values", "tuple  betas  (0.9, 0.95)\nint    step   1\nfloat  worst  nan\n"),
    ("ls {one} --values", "dict  rng/shard_0_2  {{'seed': 0, 'raw': b'\\x01\\xff'}}\n"),
    ("verify {one}", "{one}: sound, 2 files with tensors, "),
    ("prune {empty} --incomplete", "nothing is left of dead saves\n"),
    ("diff {one} {one}", "equal: 6 tensors; nothing differs\n"),
]
"""Commands, and a part of what each shows."""

REFUSED = [
    ("lss {one}", "Usage: remesh"),
    ("ls {one} model.[xyz]*", "error: no name in {one} matches model.[xyz]*\n"),
    ("ls {runs} epoch_*", "error: no checkpoint in {runs} matches epoch_*\n"),
    ("ls {nowhere}", "error: {nowhere}: no such directory"),
    ("ls {empty}", "error: {empty}: no checkpoint there, the directory is empty"),
    ("ls {foreign}", "not a checkpoint (no remesh.json); it holds model.gguf. Looked for: "),
    ("ls {file}", "a file that is no checkpoint by itself; give the directory of one, or a file"),
    ("ls {runs}/step_200", "but files of a save that was interrupted"),
    ("ls {runs}/step_200", "remesh repair {runs}/step_200 --dry-run"),
    ("show {one}", "name a tensor or value; remesh ls {one} --values lists them"),
    ("show {one} model.embedd", "nothing is stored under this name; near are model.embed"),
    ("show {one} qqq", "under this name; remesh ls {one} --values lists the names\n"),
    ("show {runs} w", "{runs}: not a checkpoint itself; it holds 3 checkpoints; name one of them"),
    ("show {runs} w", "the newest is {runs}/step_100\n"),
    ("verify {nowhere}", "error: {nowhere}: no such directory\n"),
    ("latest {nowhere}", "no such directory"),
    ("pin {runs}", "not a checkpoint itself"),
    ("prune {runs}", "say what to prune: --incomplete, or --keep-last"),
    ("prune {runs} --incomplete --keep-last 1", "say what to prune"),
    ("prune {nowhere} --keep-last 1", "no such directory"),
    ("prune {nowhere} --incomplete", "no such directory"),
    ("repair {one}", "give --to TARGET for the new checkpoint, or --dry-run"),
    ("repair {one} --to {runs}", "is not empty"),
    ("repair {nowhere} --dry-run", "nothing to repair"),
    ("diff {one} {one} --transform {nowhere}.txt", "There is no file with them"),
    ("diff {one} {one} --transform 'a -> b, axis=?'", "^\n"),
    ("convert {plain} {nowhere} --format torch_dcp --compress zstd", "are never compressed"),
]
"""Commands that end with the exit code 2, and a part of the error."""


def words_of(command: str, places: dict[str, Path]) -> list[str]:
    return shlex.split(command.format(**places))


@pytest.mark.parametrize(("command", "text"), SHOWN)
def test_what_commands_show(command: str, text: str, places: dict[str, Path], run: Run) -> None:
    result = run(*words_of(command, places))
    assert (result.exit_code, result.stderr) == (0, "")
    assert text.format(**places) in result.stdout


@pytest.mark.parametrize(("command", "text"), REFUSED, ids=lambda text: text[:60])
def test_what_commands_refuse(command: str, text: str, places: dict[str, Path], run: Run) -> None:
    result = run(*words_of(command, places))
    assert (result.exit_code, result.stdout) == (2, "")
    assert text.format(**places) in result.stderr
    assert not places["nowhere"].exists()
