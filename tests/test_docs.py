"""README and pages: their programs run as a reader would run them, and what they name exists."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import remesh.compat.atorch
import remesh.sharding
from remesh import errors
from tests.elastic.cluster import PRELOAD, run_job, run_torchrun

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

PAGES = [
    "data-position.md",
    "explanation/architecture.md",
    "explanation/sizing.md",
    "export.md",
    "guide.md",
    "how-to/foreign-formats.md",
    "how-to/from-atorch.md",
    "how-to/from-dcp.md",
    "how-to/from-dlrover.md",
    "how-to/from-flex-checkpoint.md",
    "how-to/from-lightning-accelerate.md",
    "how-to/from-torch-save.md",
    "how-to/load-a-part.md",
    "how-to/lora.md",
    "how-to/recipes.md",
    "manager.md",
    "parallelism.md",
    "tutorial.md",
]
FRAMEWORKS = [
    f"how-to/{name}.md" for name in ("accelerate", "huggingface", "lightning", "torchtitan")
]
"""Pages whose programs need a training of the reader's."""


PRINTED = {
    "guide.md": [
        "steps (did you mean step?)",
        "shape (16, 8) is stored, (32, 8) is wanted",
    ],
}
"""What programs of a page print, besides."""


def programs_of(page: Path) -> list[str]:
    """The programs of a page, without whole scripts."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    return [block for block in blocks if "# train.py" not in block]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_the_programs_of_a_page_run(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    namespace: dict[str, object] = {"__name__": "page"}
    for block in programs_of(DOCS / page):
        exec(compile(block, page, "exec"), namespace)
    printed = capsys.readouterr().out
    assert [text for text in PRINTED.get(page, ()) if text not in printed] == []


@pytest.mark.parametrize("page", FRAMEWORKS)
def test_the_programs_of_a_page_on_a_framework_are_python(page: str) -> None:
    for block in programs_of(DOCS / page):
        compile(block, page, "exec")


@pytest.mark.timeout(600)
def test_the_first_minute_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, script = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    namespace = {"model": model, "optimizer": optimizer, "step": 3}
    monkeypatch.chdir(tmp_path)
    exec(compile(calls, "README.md", "exec"), namespace)
    (tmp_path / "train.py").write_text(script)
    printed = []
    # As torchrun starts them, each rank imports torch for seconds: two show that it can.
    quick = ("--nproc-per-node=4", "--preload", PRELOAD, "train.py")
    for launch, words in ((run_torchrun, ("--nproc-per-node=2", "train.py")), (run_job, quick)):
        code, output = launch(tmp_path, *words)
        assert code == 0, output
        printed += re.findall(r"\d+ ranks saved .*$", output, re.MULTILINE)
    assert printed == ["2 ranks saved step 20", "4 ranks saved step 40"]
    readme = (ROOT / "README.md").read_text()
    assert all(line in readme for line in printed)


def headings_of(page: Path) -> set[str]:
    """The names by which links find the headings of a page."""
    return {
        re.sub(r"[^a-z0-9_ -]", "", line.lower()).strip().replace(" ", "-")
        for line in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    }


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))],
    ids=lambda page: page.stem,
)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists() or "reference" in page.parts, target
        if anchor and linked.suffix == ".md" and linked.exists():
            assert anchor in headings_of(linked), (target, anchor)


def test_pages_name_every_declaration_and_what_comes_from_atorch() -> None:
    text = (DOCS / "parallelism.md").read_text() + (DOCS / "guide.md").read_text()
    assert [name for name in remesh.sharding.__all__ if name not in text] == []
    text = (DOCS / "how-to/from-atorch.md").read_text()
    assert [name for name in remesh.compat.atorch.__all__ if name not in text] == []


def test_the_comparison_names_tests_that_there_are() -> None:
    page = (DOCS / "explanation" / "comparison.md").read_text()
    named = re.findall(r"`((?:tests|benchmarks)/[^`]+)`", page)
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []


def warnings_in(tree: ast.Module) -> Iterator[str]:
    """The texts of calls to `warning`, as far as they are literal."""
    named = {
        node.targets[0].id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".warning"):
            text = node.args[0]
            value = text.value if isinstance(text, ast.Constant) else named.get(ast.unparse(text))
            if isinstance(value, str):
                yield value


def test_every_exception_and_warning_is_explained() -> None:
    page = (DOCS / "errors.md").read_text()
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    assert [each.__name__ for each in classes if f"| `{each.__name__}` |" not in page] == []
    for file in sorted((ROOT / "src").rglob("*.py")):
        for text in warnings_in(ast.parse(file.read_text())):
            parts = [part.strip(" :;,.") for part in re.split(r"%[.\d]*[sdfg]|[.,:;] |\n", text)]
            long = [part for part in parts if len(part) > 8]
            assert not long or any(part in page for part in long), f"{file.name}: {text!r}"


def test_the_environment_of_the_demo_has_what_its_last_run_needs() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rule = re.search(r"ready-demo:.*\n\t.*'\.\[(.*)\]'", (ROOT / "Makefile").read_text())
    assert rule is not None
    extras = rule[1].split(",")
    installed = [
        word for name in extras for word in package["project"]["optional-dependencies"][name]
    ]
    assert {word.split(">")[0] for word in installed} >= {"torch", "aiohttp", "prometheus-client"}
