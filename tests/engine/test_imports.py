"""What may be imported without torch.

Imports are looked at in processes of their own: this one has torch.
"""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import remesh

NEEDS_TORCH = (
    "remesh.adapters",
    "remesh.compat",
    "remesh.demo",
    "remesh.elastic.agent",
    "remesh.elastic.handler",
    "remesh.elastic.launch",
    "remesh.elastic.processes",
    "remesh.exchange.torch_group",
    "tests.support",
    "remesh.training.export",
    "remesh.training.fingerprints",
    "remesh.training.integrations",
    "remesh.training.survivors",
    "remesh.training.sampling",
)
"""Packages and modules that may import torch, with what lies below them."""


GUARD = """
import sys

class NoTorch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        assert name.partition(".")[0] != "torch", "torch is imported"

sys.meta_path.insert(0, NoTorch)
"""


def run_python(code: str, *arguments: str) -> str:
    """Run code in a fresh interpreter in which an import of torch fails; what it prints."""
    command = [sys.executable, "-W", "error", "-c", GUARD + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def torch_free_modules() -> list[str]:
    """Every module of remesh but those that may import torch."""
    found = [module.name for module in pkgutil.walk_packages(remesh.__path__, "remesh.")]
    return [
        name
        for name in ("remesh", *found)
        if not any(f"{name}.".startswith(f"{other}.") for other in NEEDS_TORCH)
    ]


def test_nothing_below_the_adapters_imports_torch() -> None:
    modules = torch_free_modules()
    assert {"remesh.checkpoint", "remesh.cli", "remesh.transform"} <= set(modules)
    code = """
import importlib
for module in sys.argv[1:]:
    importlib.import_module(module)
print(len(sys.argv) - 1)
"""
    assert run_python(code, *modules) == f"{len(modules)}\n"


def test_importing_the_package_imports_next_to_nothing() -> None:
    code = "import remesh\nprint(sorted(name for name in sys.modules if name.startswith('remesh')))"
    assert run_python(code) == "['remesh', 'remesh._lazy']\n"


def test_arrays_are_saved_loaded_and_read_without_torch(tmp_path: Path) -> None:
    whole = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    state = {"w": whole, "half": whole.bfloat16(), "e": {"a": np.arange(3), "n": 1}, "step": 3}
    remesh.save(state, tmp_path / "with")
    code = """
import numpy as np, remesh
placeholder = {"e": None}
remesh.load(placeholder, sys.argv[1])
assert placeholder["e"]["a"].tolist() == [0, 1, 2] and placeholder["e"]["n"] == 1
part, place = np.arange(6, dtype="int32").reshape(2, 3), sys.argv[2]
state = {"w": part, "half": remesh.ShardedTensor.whole("h", part.astype("float16")), "step": 3}
remesh.save(state, place)
target = {"w": part * 0, "half": remesh.ShardedTensor.whole("h", np.zeros((2, 3), "float16"))}
remesh.load(target, place)
assert (target["w"] == part).all() and (target["half"].parts[0].data == part).all()
assert remesh.Checkpoint(place).verify().ok

def show(action):
    try:
        action()
    except remesh.errors.UnsupportedValueError as error:
        print(error)

show(lambda: remesh.load({"half": None}, sys.argv[1]))
sys.meta_path.pop(0)
sys.modules["torch"] = None  # as where it is not installed
found = remesh.Checkpoint(sys.argv[1])
assert isinstance(found["w"], np.ndarray) and found["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
assert found.read("w", remesh.sharding.Box((1, 0), (1, 2))).tolist() == [[3, 4]]
show(lambda: found["half"])
assert found.read_array("half").dtype == np.uint16
cast = {"format": "remesh", "transform": "h -> h, dtype='float32'", "only": "h"}
show(lambda: remesh.checkpoint.convert(place, place + "_", **cast))
assert remesh.Checkpoint(place).state()["w"].dtype == np.int32
print(remesh.Checkpoint(place).values)
"""
    printed = run_python(code, str(tmp_path / "with"), str(tmp_path / "without"))
    assert "half: numpy has no bfloat16\nRead it as a torch tensor" in printed
    assert "bfloat16; import torch" in printed
    assert "converted to float32 by torch, which is not installed\nInstall it with: " in printed
    assert printed.endswith("{'step': 3}\n")
    assert remesh.Checkpoint(tmp_path / "without").read_array("h").dtype == np.float16


def test_objects_with_a_state_dict_are_saved_and_loaded_in_a_process_without_torch(
    tmp_path: Path,
) -> None:
    code = """
import sys, remesh
class Counter:
    def __init__(self, step):
        self.step = step
    def state_dict(self):
        import torch
        return {"step": self.step, "rows": torch.full((2,), self.step)}
    def load_state_dict(self, state):
        self.step = state["step"]
        assert state["rows"].tolist() == [self.step] * 2
assert "torch" not in sys.modules
remesh.save({"counter": Counter(5)}, sys.argv[1])
counter = Counter(0)
remesh.load({"counter": counter}, sys.argv[1])
assert counter.step == 5
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], check=True, timeout=120)
