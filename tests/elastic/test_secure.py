"""Masters that want a token, one over HTTPS, and the commands that have it."""

from __future__ import annotations

import contextlib
import re
import shutil
import stat
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from remesh.cli import cli
from remesh.elastic import launch
from remesh.elastic.client import Client
from remesh.elastic.protocol import PROTOCOL_VERSION, Beat, Message
from remesh.errors import MasterError
from tests.elastic.agents import Served, join_of
from tests.elastic.cluster import REMESH, MasterProcess, run_job
from tests.elastic.zygote import Command
from tests.waiting import wait_until


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate for the loopback address, and its key."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("no openssl")
    certificate, key = directory / "cert.pem", directory / "key.pem"
    command = [openssl, "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-newkey", "ec"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key


def test_a_certificate_without_its_key(tmp_path: Path) -> None:
    certificate, _key = make_certificate(tmp_path)
    done = CliRunner().invoke(cli, ["master", "--tls-cert", str(certificate)])
    assert done.exit_code == 2
    assert f"--tls-cert {certificate} cannot be used: " in done.stderr
    assert "in another file, name that with --tls-key" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_over_https_with_a_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    certificate, key = make_certificate(tmp_path)
    options = ["--port", "0", "--token-file", str(token)]
    options += ["--tls-cert", str(certificate), "--tls-key", str(key)]
    master = MasterProcess(tmp_path, *options)
    try:
        url = master.url
        assert url.startswith("https://127.0.0.1:")
        client = Client(url, token="secret", tls_ca=str(certificate))
        assert client.status().phase == "waiting"
        with pytest.raises(MasterError, match="token is missing or wrong"):
            Client(url, token="wrong", tls_ca=str(certificate)).status()
        with pytest.raises(MasterError, match="certificate"):
            Client(url, token="secret").status()
        words = ["--master", url, "--token-file", str(token), "--tls-ca", str(certificate)]
        code, output = run_job(tmp_path, *words, "--no-python", "true")
        assert code == 0, output
        assert client.status().phase == "succeeded"
    finally:
        master.kill()


STAYS = """
import os, sys, time
from pathlib import Path

Path(sys.argv[1], "environment").write_text(repr(dict(os.environ)))
while not Path(sys.argv[1], "stop").exists():
    time.sleep(0.01)
"""


def words_of_all_processes() -> str:
    """What `ps` shows to every user."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found.append(file.read_text(errors="replace"))
    return "\n".join(found)


@pytest.mark.timeout(600)
def test_the_master_of_a_job_of_one_machine_is_for_its_user_alone(tmp_path: Path) -> None:
    script, output = tmp_path / "stays.py", tmp_path / "output"
    script.write_text(STAYS)
    job = Command([*REMESH, "run", str(script), str(tmp_path)], output)
    try:
        wait_until((tmp_path / "environment").exists, "the script has begun")
        said = re.search(r"page is at (http://[\d.:]+); .* token in (\S+)", output.read_text())
        assert said is not None
        url, file = said[1], Path(said[2])
        for name in ("status", "status?page", "session", "node"):
            body = b"{}" if name == "node" else None
            with pytest.raises(urllib.error.HTTPError, match="401") as refused:
                urllib.request.urlopen(f"{url}/v{PROTOCOL_VERSION}/{name}", body, timeout=60)
            refused.value.close()
        with pytest.raises(MasterError, match="token is missing or wrong: --token-file"):
            Client(url, token="wrong").status()

        token = file.read_text()
        for path in (file, file.parent):
            assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path
        assert token not in words_of_all_processes()
        assert token not in (tmp_path / "environment").read_text()
        assert token not in output.read_text()

        for host in ("127.0.0.1", "localhost"):
            assert Client(url.replace("127.0.0.1", host)).status().phase == "running"
        shown = subprocess.run([*REMESH, "status", url], capture_output=True, text=True, check=True)
        assert shown.stdout.startswith("running")
    finally:
        (tmp_path / "stop").touch()
        code = job.wait(300)
    assert code == 0, output.read_text()
    assert not file.parent.exists()


@pytest.mark.parametrize("number", [-1, -(1 << 40)])
def test_node_ids_begin_at_0(
    number: int, capsys: pytest.CaptureFixture[str], served: Served
) -> None:
    refused: tuple[Message, ...] = (
        join_of(0, node_id=number),
        join_of(0, num_processes=number),
        Beat(node_id=number, incarnation="i", round=1),
    )
    for place, message in enumerate(refused):
        session = served.agent(place).session
        session.say(message)
        with pytest.raises(MasterError, match=r"`int` >= [01] - at `\$.(node_id|num_processes)`"):
            session.wait(lambda newest: newest, 60.0)
    assert served.get("status")[1]["phase"] == "waiting"
    with pytest.raises(SystemExit):
        launch.main(["--node-id", str(number), "train.py"])
    assert "is no node id; they begin at 0" in capsys.readouterr().err
