"""Secrets in URLs do not appear in what remesh says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from click.testing import CliRunner

from remesh.cli import cli
from remesh.errors import RemeshError
from remesh.storage import open_storage, shown_url
from remesh.storage.messages import explain

SECRETS = ("hidden-user", "hidden/word", "hidden-signature")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/path", "s3://bucket/path"),
        ("/local/a@b?c=d", "/local/a@b?c=d"),
        ("s3://hidden-user:hidden/word@bucket/path", "s3://***@bucket/path"),
        ("s3://hidden-user:hidden@bucket/path@2", "s3://***@bucket/path@2"),
        ("sftp://hidden-user@host:22/a@b", "sftp://***@host:22/a@b"),
        ("sftp://host:22/a@b", "sftp://host:22/a@b"),
        ("sftp://[::1]:22/a@b", "sftp://[::1]:22/a@b"),
        ("https://host/path?X-Signature=hidden&b=c#d", "https://host/path?***"),
        ("s3://bucket/what?", "s3://bucket/what?"),
        ("s3://bucket/what?now", "s3://bucket/what?now"),
        ("abfss://container@account.dfs.core.windows.net/x", None),
        ("abfss://c:hidden@account.dfs.core.windows.net/x?sig=hidden", "abfss://***@account.dfs.core.windows.net/x?***"),
        ("://", "://"),
    ],
)  # fmt: skip
def test_shown_urls(url: str, shown: str | None) -> None:
    assert shown_url(url) == (url if shown is None else shown)
    assert shown_url(shown_url(url)) == shown_url(url)


URLS = [
    "s3://hidden-user:hidden/word@bucket/path?sig=hidden-signature",
    "s3://hidden-user:hidden%2Fword@/path",
    "gs://hidden-user:hidden/word@bucket/path",
    "az://hidden-user:hidden/word@container/path?sig=hidden-signature",
    "file://hidden-user:hidden/word@host/path?sig=hidden-signature",
    "nonsense://hidden-user:hidden/word@host/path?sig=hidden-signature",
    "hdfs://hidden-user:hidden/word@host/path?sig=hidden-signature",
    "sftp://hidden-user:hidden/word@host/path?sig=hidden-signature",
    "http://hidden-user:hidden/word@localhost:1/path?sig=hidden-signature",
]


@pytest.mark.parametrize("url", URLS)
def test_no_secret_is_shown(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is done with a place: messages, reprs, what they were raised from, logs, output."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    texts = []

    def note(error: BaseException | None) -> None:
        while error is not None:
            texts.extend([str(error), repr(error)])
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)

    with caplog.at_level(logging.DEBUG, "remesh"):
        try:
            texts.append(repr(open_storage(url)))
        except RemeshError as error:
            note(error)
        if not url.startswith("az"):
            for command in (["ls"], ["verify"], ["ls", "--json"], ["show", "nothing"]):
                arguments = [command[0], url, *command[1:]]
                texts.append(CliRunner().invoke(cli, arguments).output)
    texts.append(caplog.text)
    assert any(texts)
    shown = "\n".join(texts)
    assert not [secret for secret in SECRETS if secret in shown], shown


def test_secrets_of_a_url_in_a_library_s_words() -> None:
    url = URLS[0]
    for words in (
        f"no such {url}",
        "bad user hidden-user:hidden/word",
        "query sig=hidden-signature",
    ):
        message = str(explain("open", url, ValueError(words)))
        assert not [secret for secret in SECRETS if secret in message], message
        assert "s3://***@bucket/path?***" in message
