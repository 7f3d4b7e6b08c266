"""What may be shown of a remote storage: its URL, and what went wrong there, in words of our own.

URLs stand in messages, logs, reports and events. People put secrets into URLs: a user name and
password before the host, a signature in the query. Where a URL is shown, both are `***`. A password
may hold slashes, as secret keys often do. A question mark begins a query only if an `=` follows;
otherwise it is a part of an object's name. In URLs of Azure's file systems, the text before the `@`
is the container, which is no secret.

Libraries report failures of a request in many lines, among them addresses with signed queries and
bodies of answers that may hold tokens. Kept are the first line without queries and user names, and
the code and message of the store's answer; chaining the original exception would print the rest
again, so callers raise `from None`.
"""

from __future__ import annotations

import re

from remesh.errors import CheckpointNotFoundError, RemeshError, StorageError

_HIDDEN = "***"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(.*)", re.DOTALL)
_CONTAINER_SCHEMES = frozenset({"abfs", "abfss", "wasb", "wasbs"})
_PORT = re.compile(r"[^@:/]*:\d*(/|$)|\[[^\]]*\](:\d*)?(/|$)")

_LONGEST = 400

# Pattern in the library's text → what to do. The first that matches is used.
_NO_BUCKET = "there is no such bucket: create it, or check its name, the endpoint and the region"
RANGES_ADVICE = (
    "the store gives whole objects where a part is requested (no HTTP status 206), so checkpoints "
    "cannot be read from it: use another store, or copy them to a directory to read them"
)
_REMEDIES = {
    r"NoSuchBucket|ContainerNotFound|bucket does not exist": _NO_BUCKET,
    r"169\.254\.|metadata\.google|Credentials(Error)? |Account must be specified": (
        "no credentials were found: set those of the store in the environment (AWS_ACCESS_KEY_ID "
        "and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, or AZURE_STORAGE_ACCOUNT_NAME "
        "and AZURE_STORAGE_ACCOUNT_KEY)"
    ),
    r"Permission|Unauthenticated|Unauthorized|AccessDenied|Forbidden|status code: 40[13]": (
        "the store refused: check the credentials in the environment and the rights that they "
        "give to read, write, list and delete here"
    ),
    r"kind: Timeout|TimedOut|timed out|TimeoutError": (
        "the store did not answer in time: see whether it and the network to it are well, and "
        "try again"
    ),
    r"kind: Connect|error sending request|Connection|dns error|ClientConnector": (
        "the store cannot be reached: check the endpoint (AWS_ENDPOINT_URL for S3), the network "
        "and the proxy"
    ),
    r"non-partial response": RANGES_ADVICE,
    r"SlowDown|status code: (429|503)": (
        "the store asks for fewer requests: try again later, or save from fewer ranks"
    ),
    r"status code: 5\d\d": "the store failed: see its status, and try again",
}


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


def explain(action: str, name: str, error: Exception) -> RemeshError:
    """The exception to raise for a failed request; the action is a verb ("write").

    Secrets in the URL are not shown.
    """
    kind, text = type(error).__name__, hide_secrets(str(error), name)
    name = shown_url(name)
    known = f"{kind} {text}"
    remedy = next((words for pattern, words in _REMEDIES.items() if re.search(pattern, known)), "")
    no_bucket = remedy == _NO_BUCKET
    is_absent = isinstance(error, FileNotFoundError)
    is_absent |= isinstance(error, NotADirectoryError) and action == "read"
    if is_absent and not (no_bucket and action != "read"):
        what = _NO_BUCKET if no_bucket else "check the path"
        return CheckpointNotFoundError(f"there is no file {name}; {what}")
    reason = _reason(text) or kind
    hint = f"; {remedy}" if remedy else ""
    return StorageError(f"cannot {action} {name}: {reason}{hint}")


def _reason(text: str) -> str:
    """The part of a library's message that may be shown."""
    head = re.split(r"<\?xml|<Error>|\n", text, maxsplit=1)[0].strip().rstrip(":")
    answer = [
        found[1] for tag in ("Code", "Message") if (found := re.search(f"<{tag}>([^<]*)</", text))
    ]
    shown = ": ".join([head, *answer])
    shown = re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", shown)
    shown = re.sub(r"://[^/\s@]*@", "://", shown)
    return shown if len(shown) <= _LONGEST else shown[:_LONGEST] + "..."
