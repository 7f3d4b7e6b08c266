"""Imports of Megatron's package give the drop-in, in Megatron and in scripts."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remesh.compat import megatron
from remesh.compat.megatron import CheckpointingException
from remesh.compat.megatron.__main__ import main
from remesh.compat.megatron.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from remesh.compat.megatron.strategies.native import RemeshLoadShardedStrategy
from remesh.errors import StateError

NAME = "megatron.core.dist_checkpointing"


@pytest.fixture
def own_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that stands for Megatron: importing the true one takes seconds."""
    before = {name: module for name, module in sys.modules.items() if name.startswith("megatron")}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "megatron" / "core" / "dist_checkpointing"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("own = True\n")
    (folder / "two_stage.py").write_text("")
    (folder / "utils.py").write_text(
        "from .mapping import ShardedTensor\n"
        "def extract_nonpersistent(_): ...\n"
        "def of_release(): return extract_nonpersistent, ShardedTensor\n"
    )
    (folder / "tensor_aware_state_dict.py").write_text("from .mapping import ShardedTensor\n")
    (folder.parent / "__init__.py").write_text("")
    (folder.parent / "layers.py").write_text(
        "from .dist_checkpointing.mapping import ShardedTensor\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    megatron.uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]


@pytest.mark.usefixtures("own_megatron")
def test_every_import_gives_the_drop_in_until_it_is_uninstalled() -> None:
    megatron.install()
    megatron.install()
    layers = importlib.import_module("megatron.core.layers")
    assert layers.ShardedTensor is megatron.ShardedTensor
    assert importlib.import_module(NAME) is megatron
    core = importlib.import_module("megatron.core")
    assert core.dist_checkpointing is megatron
    strategies = importlib.import_module(f"{NAME}.strategies.torch")
    assert strategies.__name__ == "remesh.compat.megatron.strategies.torch"
    assert megatron.__spec__ is not None
    assert megatron.__spec__.name == "remesh.compat.megatron"
    # What the drop-in lacks is Megatron's own, over the drop-in.
    own = importlib.import_module(f"{NAME}.tensor_aware_state_dict")
    assert own.ShardedTensor is megatron.ShardedTensor
    namespace: dict[str, object] = {}
    exec(f"from {NAME} import two_stage", namespace)
    assert namespace["two_stage"] is sys.modules[f"{NAME}.two_stage"]
    with pytest.raises(ModuleNotFoundError, match="resharding"):
        importlib.import_module(f"{NAME}.strategies.resharding")
    utils = importlib.import_module(f"{NAME}.utils")
    lent = utils.of_release
    assert lent() == (utils.extract_nonpersistent, megatron.ShardedTensor)
    for module in (utils, strategies, megatron):
        with pytest.raises(AttributeError, match="not_there"):
            _ = module.not_there
    megatron.uninstall()
    assert importlib.import_module(NAME).own
    with pytest.raises(AttributeError, match="of_release"):
        _ = utils.of_release


@pytest.mark.usefixtures("own_megatron")
def test_megatron_that_is_imported_already_is_an_error() -> None:
    importlib.import_module(NAME)
    with pytest.raises(StateError, match="before the first import of Megatron"):
        megatron.install()
    megatron.uninstall()
    assert importlib.import_module(NAME).own


@pytest.mark.usefixtures("own_megatron")
def test_digests_of_files_are_lent_for_local_paths(tmp_path: Path) -> None:
    (tmp_path / "megatron/core/dist_checkpointing/validation.py").write_text(
        "from pathlib import Path\n"
        "def save_integrity_manifest(path): Path(path, 'integrity.json').touch()\n"
        "def verify_integrity_manifest(path): Path(path, 'integrity.json').stat()\n"
    )
    megatron.install()
    place = tmp_path / "checkpoint"
    for given in (place, place.as_uri()):
        megatron.save({}, given, verify_integrity=True)
        megatron.load({}, given, verify_integrity=True)
        (place / "integrity.json").unlink()
    for use in (megatron.save, megatron.load):
        with pytest.raises(CheckpointingException, match="local directories"):
            use({}, "s3://digests/x", verify_integrity=True)


@pytest.mark.usefixtures("own_megatron")
@pytest.mark.parametrize("is_imported", [False, True])
def test_digests_of_files_without_megatron(tmp_path: Path, *, is_imported: bool) -> None:
    megatron.install()
    if is_imported:
        importlib.import_module(f"{NAME}.validation")
        del sys.modules["megatron.core"]
    (tmp_path / "megatron/core/__init__.py").write_text("raise ImportError")
    with pytest.raises(CheckpointingException, match=r"0\.19"):
        megatron.load({}, tmp_path, verify_integrity=True)


class _Derived(RemeshLoadShardedStrategy):
    """A strategy of the engine with a load of its own."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return super().load(sharded_state_dict, checkpoint_dir)


@pytest.mark.usefixtures("own_megatron")
def test_strategies_with_a_load_of_their_own_get_the_wrapper_of_megatron(tmp_path: Path) -> None:
    folder = tmp_path / "megatron/core/dist_checkpointing/strategies"
    folder.mkdir()
    (folder / "fully_parallel.py").write_text(
        "class FullyParallelLoadStrategyWrapper:\n"
        "    def __init__(self, strategy, group): self.wrapped = strategy, group\n"
    )
    wrap: Any = FullyParallelLoadStrategyWrapper
    assert isinstance(wrap(_Derived(), "group"), wrap)
    megatron.install()
    derived = _Derived()
    assert wrap(derived, "group").wrapped == (derived, "group")
    assert isinstance(wrap(RemeshLoadShardedStrategy(), None), wrap)


JOB = """
import sys
from megatron.core import dist_checkpointing
assert __name__ == "__main__"
print(dist_checkpointing.__name__, sys.argv[1:])
"""


@pytest.mark.usefixtures("own_megatron")
def test_a_script_runs_on_the_drop_in(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    done = subprocess.run(
        [sys.executable, "-m", "remesh.compat.megatron", "job.py", "--lr", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "remesh.compat.megatron ['--lr', '1']\n"


@pytest.mark.usefixtures("own_megatron")
def test_a_module_runs_on_the_drop_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    main(["-m", "job", "--lr", "1"])
    assert capsys.readouterr().out == "remesh.compat.megatron ['--lr', '1']\n"
    with pytest.raises(SystemExit, match="usage:"):
        main(["-m"])
