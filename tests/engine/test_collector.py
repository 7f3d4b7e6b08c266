"""Python's garbage collector while states are described."""

from __future__ import annotations

import gc

import pytest

from remesh.core.collector import gc_paused


def test_it_rests_and_works_again() -> None:
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_works_again_if_one_rest_ends_while_another_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_enabled = gc.isenabled
    first = gc_paused()
    first.__enter__()

    def first_ends_now() -> bool:
        found = is_enabled()
        first.__exit__(None, None, None)
        return found

    monkeypatch.setattr(gc, "isenabled", first_ends_now)
    try:
        with gc_paused():
            pass
        assert is_enabled()
    finally:
        gc.enable()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
