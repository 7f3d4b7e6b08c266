"""Fuzz one parser, guided by what its inputs reach in the code of remesh.

`python -m tests.fuzz.guided WRITER FILE INPUTS [OPTIONS OF LIBFUZZER]...`

WRITER is one of `tests.fuzz.checkpoints.WRITERS`, FILE the end of the path of the file in its
checkpoint that is fuzzed. An input is the content of that file; the other files are sound.
libFuzzer keeps an input that reaches new code in the directory INPUTS, and makes others of it: half
of them as mere bytes, half by the mutations that know what kind of file it is. What must not happen
is what `tests.fuzz.trial` says. An input that lets it happen ends this process with an error, and
is written to a file whose path begins with `-artifact_prefix=`; in INPUTS, with `-runs=0`, it is
tried again.

Needs atheris, which is no requirement of the tests.
"""

from __future__ import annotations

import json
import random
import sys
import zlib
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["remesh"]):
    from remesh.formats.native import RECORD_NAME
    from tests.fuzz.checkpoints import make_checkpoint
    from tests.fuzz.files import Files
    from tests.fuzz.mutations import change_of, forge, record_file
    from tests.fuzz.trial import attempt, sound_state


def main(writer: str, file: str, inputs: str, options: list[str]) -> None:
    """Fuzz until an input fails or the options say that it is enough; never returns.

    Args:
        writer: What writes the checkpoint.
        file: The file in it.
        inputs: Where inputs are kept; the first is the sound file.
        options: Options of libFuzzer.
    """
    right = with_known_id(make_checkpoint(writer))
    [path] = [path for path in right if path.endswith(file)]
    with atheris.instrument_imports(include=["remesh"]):  # of modules that are imported late
        state = sound_state(right)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        dice = random.Random(seed)
        if dice.random() < 0.5:
            try:
                return change_of(path, data)(data, dice)[:max_size]
            except Exception:  # noqa: BLE001 - it is no longer of its kind
                pass
        return bytes(atheris.Mutate(data, max_size))

    def try_it(data: bytes) -> None:
        if data:
            attempt(with_content(right, path, data), state, by_command=False)

    Path(inputs, "sound").write_bytes(right[path])
    atheris.Setup(["guided", inputs, *options], try_it, custom_mutator=mutate)
    atheris.Fuzz()


def with_known_id(files: Files) -> Files:
    """A checkpoint of remesh whose save id is the same every time, so that inputs fit again."""
    if RECORD_NAME not in files:
        return files
    drawn = json.loads(files[RECORD_NAME])["record"]["save_id"]
    known = "0" * len(drawn)
    files = {
        path.replace(drawn, known): content.replace(drawn.encode(), known.encode())
        for path, content in files.items()
    }
    forge(files, random.Random(0))
    return files


def with_content(right: Files, path: str, data: bytes) -> Files:
    """The checkpoint with another file, and with the digests that it then would have."""
    if path == RECORD_NAME:
        body, found, _ = data.removeprefix(b'{"record":').rpartition(b',"digest":')
        return right | {path: record_file(body) if found else data}
    files = right | {path: data}
    forge(files, random.Random(zlib.crc32(data)))
    return files


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
