"""URLs as they may be shown: in messages, logs, reports and events.

People put secrets into URLs: a user name and password before the host, a signature in the query.
Where a URL is shown, both are `***`. A password may hold slashes, as secret keys often do. A
question mark begins a query only if an `=` follows; otherwise it is a part of an object's name. In
URLs of Azure's file systems, the text before the `@` is the container, which is no secret.
"""

from __future__ import annotations

import re

_HIDDEN = "***"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(.*)", re.DOTALL)
_CONTAINER_SCHEMES = frozenset({"abfs", "abfss", "wasb", "wasbs"})
_PORT = re.compile(r"[^@:/]*:\d*(/|$)|\[[^\]]*\](:\d*)?(/|$)")


def shown_url(url: str) -> str:
    """A URL without user information and query; other text, such as a local path, as it is."""
    found = _URL.fullmatch(url)
    if found is None:
        return url
    user, host, query = _split(found[1], found[2])
    return f"{found[1]}{_HIDDEN + '@' if user else ''}{host}{'?' + _HIDDEN if query else ''}"


def hide_secrets(text: str, url: str) -> str:
    """A text with what `shown_url` hides of a URL hidden wherever it stands in the text."""
    shown = text.replace(url, shown_url(url))
    found = _URL.fullmatch(url)
    if found is None:
        return shown
    user, _, query = _split(found[1], found[2])
    for secret in (query, user, user.partition(":")[2]):
        if secret:
            shown = shown.replace(secret, _HIDDEN)
    return shown


def _split(scheme: str, rest: str) -> tuple[str, str, str]:
    """User information, the part to be shown, and the query of what follows a scheme."""
    place, mark, query = rest.partition("?")
    if "=" not in query:
        place, query = f"{place}{mark}{query}", ""
    is_container = scheme.lower().removesuffix("://") in _CONTAINER_SCHEMES
    user, host = _split_user(place)
    if is_container and ":" not in user:
        user, host = "", place
    return user, host, query


def _split_user(rest: str) -> tuple[str, str]:
    """The text before and after the `@` that ends user information; "" if there is none."""
    authority, _, _ = rest.partition("/")
    if "@" in authority:
        user, _, host = authority.rpartition("@")
        return user, host + rest[len(authority) :]
    # A colon that begins no port begins a password, which may hold slashes.
    if ":" in authority and "@" in rest and _PORT.match(rest) is None:
        user, _, host = rest.rpartition("@")
        return user, host
    return "", rest
