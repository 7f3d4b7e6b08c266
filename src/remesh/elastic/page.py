"""The page that shows a job, live."""

from __future__ import annotations

from importlib import resources

PAGE = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
"""One HTML page that asks `/v1/status` again and again; it loads nothing else."""
