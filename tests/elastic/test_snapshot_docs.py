"""The page about recovery from memory, as a reader would use it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import remesh

PAGE = Path(__file__).parents[2] / "docs/how-to/recovery-from-memory.md"


def test_the_page_about_memory_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REMESH_SNAPSHOT_DIR", str(tmp_path / "memory"))
    first, second = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    last = 'manager.step(state["step"], state)\n'
    assert first.endswith(last)
    dies = f'{first}        assert state["step"] < 45, "died"\n'
    with pytest.raises(AssertionError, match="died"):
        exec(compile(dies, str(PAGE), "exec"), namespace)
    assert sorted(path.name for path in tmp_path.glob("memory/*/step_*")) == [
        "step_00000020",
        "step_00000040",
    ]
    exec(compile(first, str(PAGE), "exec"), namespace)
    assert capsys.readouterr().out == "lost nothing before step 40\n"
    exec(compile(second, str(PAGE), "exec"), namespace)
    manager = namespace["manager"]
    assert isinstance(manager, remesh.Manager)
    assert manager.latest is not None
    assert manager.latest.step == 50
    stored = sorted(path.name for path in tmp_path.glob("run/step_*"))
    assert stored == ["step_00000040", "step_00000050"]  # what was in memory only, and the end
    manager.close()
