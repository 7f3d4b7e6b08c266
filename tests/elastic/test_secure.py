"""A master that wants a token and speaks HTTPS, and a node that trusts it, as commands."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from remesh.elastic.client import Client
from remesh.errors import MasterError
from tests.elastic.cluster import REMESH
from tests.elastic.zygote import Command

OPENSSL = shutil.which("openssl")
SUBJECT = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(OPENSSL is None, reason="no openssl")
def test_a_job_over_https_with_a_token(tmp_path: Path) -> None:
    certificate, key, token = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "token"
    token.write_text("secret\n")
    assert OPENSSL is not None
    subprocess.run(
        [
            *(OPENSSL, "req", "-x509", "-nodes", "-days", "2", *SUBJECT),
            *("-newkey", "rsa:2048", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    options = ["--port", "0", "--token-file", str(token)]
    options += ["--tls-cert", str(certificate), "--tls-key", str(key)]
    master = subprocess.Popen([*REMESH, "master", *options], stdout=subprocess.PIPE, text=True)
    try:
        assert master.stdout is not None
        url = master.stdout.readline().strip()
        assert url.startswith("https://127.0.0.1:")
        client = Client(url, token="secret", tls_ca=str(certificate))
        assert client.status().phase == "waiting"
        with pytest.raises(MasterError, match="token is missing or wrong"):
            Client(url, token="wrong", tls_ca=str(certificate)).status()
        with pytest.raises(MasterError, match="certificate"):
            Client(url, token="secret").status()
        command = [*REMESH, "run", "--master", url, "--token-file", str(token)]
        command += ["--tls-ca", str(certificate), "--no-python", "true"]
        output = tmp_path / "output"
        assert Command(command, output).wait(400) == 0, output.read_text()
        assert client.status().phase == "succeeded"
    finally:
        master.terminate()
        master.communicate()
