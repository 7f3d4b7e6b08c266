"""What a pod of the test bed runs: `remesh`, with what its kubelet lacks.

The hollow kubelets of the test bed mount no volumes, know no services and expand no variables in
arguments. `pod.py DIRECTORY` followed by the arguments of `remesh` does these three: the token is
in DIRECTORY, where the test has written it from the secret, each service is on the loopback
address, and the master's journal is in DIRECTORY too.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path


def main() -> None:
    directory = Path(sys.argv[1])
    token = directory / "token"
    while not token.exists():  # a kubelet waits for the secret, too
        time.sleep(0.05)
    mounted = {"/var/run/remesh/token": sys.argv[1], "/var/lib/remesh": sys.argv[1]}
    known = mounted | {"$(POD_IP)": "127.0.0.1"}
    known |= {f"$({name})": value for name, value in os.environ.items() if name.endswith("_INDEX")}
    text = "\0".join(sys.argv[2:])
    for name, value in known.items():
        text = text.replace(name, value)
    text = re.sub(r"http://[a-z0-9-]+(\.[a-z0-9-]+\.svc)?:", "http://127.0.0.1:", text)
    text = text.replace("--node-id\0\0", "")  # Kubernetes 1.20 gives the pods of a Job no index
    sys.argv = ["remesh", *text.split("\0")]
    from remesh.cli import main as remesh

    remesh()


if __name__ == "__main__":
    main()
