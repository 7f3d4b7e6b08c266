"""Mappings that are never changed."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from remesh.elastic.rendezvous import listed
from remesh.elastic.tables import Table, decode_hook, encode_hook

KEYS = st.integers(0, 600)


class Both(msgspec.Struct, frozen=True):
    table: Table[int, str] = Table()
    members: Table[int, None] = Table()


@given(st.dictionaries(KEYS, st.text(max_size=2)), st.lists(st.tuples(st.booleans(), KEYS)))
def test_changed_copies_are_what_dicts_would_be(
    begin: dict[int, str], changes: list[tuple[bool, int]]
) -> None:
    now = Both(Table(begin), Table(dict.fromkeys(begin)))
    kept = [(dict(begin), now)]
    for adds, key in changes:
        begin = {**begin, key: "x"} if adds else {k: v for k, v in begin.items() if k != key}
        if adds:
            now = Both(now.table.plus(key, "x"), now.members.plus(key, None))
        else:
            now = Both(now.table.minus(key), now.members.minus(key))
        kept.append((begin, now))
    for wanted, found in kept:  # none has changed since
        assert (dict(found.table), set(found.members)) == (wanted, set(wanted))
        assert (len(found.table), sorted(found.members)) == (len(wanted), sorted(wanted))
        text = msgspec.json.encode(found, enc_hook=encode_hook)
        assert msgspec.json.decode(text, type=Both, dec_hook=decode_hook) == found


def test_many_numbers_are_listed_as_ranges() -> None:
    assert listed([3, 1, 2]) == "1, 2, 3"
    assert listed(range(10_000)) == "0 to 9999"
    assert listed([*range(50), 60, *range(70, 80)]) == "0 to 49, 60, 70 to 79"
    text = listed(range(0, 1000, 2))
    assert text.startswith("0, 2, 4, ")
    assert text.endswith(", 38 and 480 more")
