"""An operator at night: a broken checkpoint, on a machine without torch."""

from __future__ import annotations

from tests.first_hour.hour import Hour

SAVE = """
import numpy as np
import remesh

for step in (100, 200, 300, 400):
    state = {"model": {"w": np.arange(1000.0) + step, "b": np.ones(10)}, "step": step}
    remesh.save(state, f"run/step_{step:08}")
"""


def damage(hour: Hour) -> None:
    """One checkpoint loses a data file, one has a wrong byte, of one only the files are left."""
    run = hour.directory / "run"
    (run / "step_00000400" / "remesh.json").unlink()
    (flipped,) = (run / "step_00000300").glob("data-*/00000.safetensors")
    data = bytearray(flipped.read_bytes())
    data[-9] ^= 1
    flipped.write_bytes(data)
    (lost,) = (run / "step_00000200").glob("data-*/00000.safetensors")
    lost.unlink()


def play(hour: Hour) -> None:
    hour.run(
        "remesh doctor .",
        ends=int(hour.is_in_memory),
        shows=["not installed", "training jobs and remesh run", "good"],
    )
    hour.write("save.py", SAVE)
    hour.run("python save.py")
    damage(hour)
    hour.run("remesh ls run", shows=["damaged", "step_00000400", "remesh repair"])
    hour.run("remesh verify run", ends=1, shows=["step_00000100: sound", "wrong bytes", "missing"])
    hour.run("remesh show run/step_00000300", ends=2, says=["remesh ls run/step_00000300"])
    hour.run("remesh ls run/step_00000300", shows=["model.w"])
    tried = hour.run("remesh repair run/step_00000400 --dry-run", ends=1, shows=["To save it: "])
    command = tried.split("To save it: ")[-1].strip()
    hour.run(command, ends=1, shows=["written to"])
    hour.run("remesh verify run/step_00000400-repaired", shows=["sound"])
    hour.run("remesh diff run/step_00000100 run/step_00000400-repaired", ends=1, shows=["model.w"])
    hour.run("remesh latest run")
    hour.run("remesh prune run --keep-last 1 --dry-run", shows=["step_00000100"])
    # What needs packages that are missing says so, and how to get them.
    hour.run(
        "remesh run --standalone train.py", ends=2, says=["pip install 'remesh[elastic,torch]'"]
    )
    hour.run("remesh master", ends=2, says=["pip install 'remesh[elastic]'"])
    hour.run("remesh ls s3://bucket/run", ends=2, says=["pip install 'remesh[s3]'"])
    hour.run("remesh ls nowhere", ends=2, says=["nowhere"])
