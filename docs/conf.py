# ruff: noqa: INP001 - the settings of a program, not a package
"""How Sphinx makes the site of the documentation: `make docs`.

The pages are the Markdown files beside this one, so they read the same on the site and in the
repository. The reference of the public names is written here before each build: one page for each
module of `update_api.MODULES`, from its docstrings.

Sphinx with MyST rather than mkdocs: it checks references between pages and docstrings, autodoc
imports the real signatures, and it and its theme (furo) are maintained by groups.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

import update_api  # noqa: E402 - a script beside this one
from sphinx.ext.autodoc.mock import mock  # noqa: E402

import remesh  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "remesh"
author = "the remesh authors"
release = version = remesh.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# No intersphinx: the site is built without a network, where the inventories of others are missing.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
autodoc_default_options = {"members": True}
napoleon_use_ivar = True
default_role = "code"  # docstrings mark code as Markdown does
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"remesh {version}"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"  # the one of furo underlines names of modules
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

REFERENCE = DOCS / "reference"


def write_reference(_app: Sphinx) -> None:
    """Write a page for each public module: what `__all__` names, with signatures and docstrings."""
    REFERENCE.mkdir(exist_ok=True)
    # transformers imports peft where it is installed, and that torchao, which warns of what it
    # cannot load.
    with mock(["peft"]):
        pages = {f"{module}.md": _page_of(module) for module in update_api.MODULES}
    for old in REFERENCE.iterdir():
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        page = REFERENCE / name
        if not page.exists() or page.read_text() != text:  # else Sphinx would read it again
            page.write_text(text)


def _page_of(module: str) -> str:
    found = importlib.import_module(module)
    parts = [f"# {module}\n"]
    for name in update_api.names_of(module):
        value = getattr(found, name)
        kind = (
            "class"
            if isinstance(value, type)
            else "function"
            if inspect.isroutine(value)
            else "data"
        )
        parts.append(f"```{{eval-rst}}\n.. auto{kind}:: {module}.{name}\n```\n")
    return "\n".join(parts)


def restore_first_line(
    _app: Sphinx, what: str, _name: str, _value: object, _options: object, lines: list[str]
) -> None:
    """Restore the first line of a field or property: Napoleon takes "text: ..." for a type."""
    kind = next((line for line in lines if line.startswith(":type:")), None)
    if what in {"attribute", "property"} and kind is not None:
        lines.remove(kind)
        lines[0] = f"{kind.removeprefix(':type: ')}: {lines[0]}"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", write_reference)
    app.connect("autodoc-process-docstring", restore_first_line, priority=600)  # after Napoleon
