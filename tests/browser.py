"""Pages in a real browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")


def browse(url: str, tmp_path: Path, *options: str) -> str:
    """What the browser prints of a page."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'browser'}",
            "--virtual-time-budget=2500",
            *options,
            url,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout
