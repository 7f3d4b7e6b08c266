"""What Python's audit hooks say of a piece of code: whether it runs, starts or writes anything.

An audit hook cannot be removed, so there is one for the process, which looks only while it is
asked to and only at this thread and those of thread pools, which the readers use.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_FORBIDDEN = (
    "import",
    "exec",
    "compile",
    "marshal.",
    "pickle.",
    "ctypes.",
    "code.",
    "os.",
    "shutil.",
    "subprocess.",
    "pty.",
    "socket.",
    "sys.setprofile",
    "sys.settrace",
    "urllib.",
    "webbrowser.",
)
_HARMLESS = frozenset({"os.listdir", "os.scandir", "os.walk"})
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class _Watch:
    def __init__(self) -> None:
        self.found: list[str] | None = None
        self.thread = 0

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.found is None:
            return
        is_pool = threading.current_thread().name.startswith("ThreadPoolExecutor")
        if threading.get_ident() != self.thread and not is_pool:
            return
        if event == "open":
            _, mode, flags = args
            if set(mode or "") & set("wax+") or (isinstance(flags, int) and flags & _WRITES):
                self.found.append(f"open for writing: {args[0]!r}")
        elif event.startswith(_FORBIDDEN) and event not in _HARMLESS:
            self.found.append(f"{event} {args!r:.200}")


_watch = _Watch()
_installed: list[bool] = []


@contextmanager
def audited() -> Iterator[list[str]]:
    """What is imported, executed, started or written inside; empty if nothing is."""
    if not _installed:
        sys.addaudithook(_watch)
        _installed.append(True)
    found: list[str] = []
    _watch.found, _watch.thread = found, threading.get_ident()
    try:
        yield found
    finally:
        _watch.found = None
