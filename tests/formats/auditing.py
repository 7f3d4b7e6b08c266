"""What Python's audit hooks say of a piece of code: whether it runs, starts or writes anything.

An audit hook cannot be removed, so there is one for the process, which looks only while it is
asked to and only at this thread and those of thread pools, which the readers use, or at all.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
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


MayOpen = Callable[[Any, int], bool]
"""Given a path or descriptor and flags: whether it may be opened."""


def _only_to_read(_path: object, flags: int) -> bool:
    return not flags & _WRITES


class _Watch:
    def __init__(self) -> None:
        self.found: list[str] | None = None
        self.forbidden: tuple[str, ...] = ()
        self.may_open: MayOpen = _only_to_read
        self.thread: int | None = None
        self.harmless: set[str] = set()  # events that were seen, and say nothing

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.found is None or event in self.harmless:  # most events are calls of `id`
            return
        is_pool = threading.current_thread().name.startswith("ThreadPoolExecutor")
        if self.thread not in {None, threading.get_ident()} and not is_pool:
            return
        if event == "open":
            path, mode, flags = args
            opens = _WRITES if set(mode or "") & set("wax+") else 0
            if not self.may_open(path, flags | opens if isinstance(flags, int) else opens):
                self.found.append(f"open {args!r:.200}")
        elif event.startswith(self.forbidden) and event not in _HARMLESS:
            self.found.append(f"{event} {args!r:.200}")
        else:
            self.harmless.add(event)


_watch = _Watch()
_installed: list[bool] = []


@contextmanager
def audited(
    forbidden: tuple[str, ...] = _FORBIDDEN,
    may_open: MayOpen = _only_to_read,
    *,
    all_threads: bool = False,
) -> Iterator[list[str]]:
    """What is imported, executed, started or written inside; empty if nothing is."""
    if not _installed:
        sys.addaudithook(_watch)
        _installed.append(True)
    found: list[str] = []
    if _watch.forbidden is not forbidden:
        _watch.harmless.clear()
    _watch.found, _watch.forbidden, _watch.may_open = found, forbidden, may_open
    _watch.thread = None if all_threads else threading.get_ident()
    try:
        yield found
    finally:
        _watch.found = None
