"""A cluster whose pods are processes of this machine, with the operator, for tests.

`KUBECONFIG` names the cluster. `REMESH_TEST_START_KUBE_NODE` and `REMESH_TEST_KILL_KUBE_NODE` name
commands that start a node with so many GPUs (`NAME --gpus N`) and that take one away, and
`REMESH_TESTBED_K8S_DIR` the directory with the output of its pods. Pods reach their master at the
loopback address (`pod.py`), and so does the operator.
"""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from lightkube import ApiError, Client
from lightkube.types import PatchType

from remesh.kubernetes.manifests import manifests
from remesh.kubernetes.operator import EVENTS, JOBS, PODS, SECRETS, SERVICES
from remesh.kubernetes.resource import LABEL_JOB, ElasticJob, Pod, Role, parse_job, parse_pod
from tests.elastic.cluster import REMESH, TRAIN, reserve_port
from tests.elastic.training_log import TrainingLog
from tests.kubernetes.controllers import jobs_of
from tests.waiting import wait_until

NEEDED = ("KUBECONFIG", "REMESH_TEST_START_KUBE_NODE", "REMESH_TEST_KILL_KUBE_NODE")
MISSING = [name for name in (*NEEDED, "REMESH_TESTBED_K8S_DIR") if name not in os.environ]
SHIM = Path(__file__).with_name("pod.py")
GPUS = 8
HEAD = "head"
JOB = f"""
apiVersion: remesh.dev/v1alpha1
kind: ElasticJob
spec:
  replicas: 3
  minReplicas: 2
  nodeLostSeconds: 1
  drainSeconds: 20
  worker:
    args: [--beat-seconds, "0.5", --last-call, "2"]
    template:
      spec:
        containers:
        - name: train
          image: none
          resources: {{limits: {{nvidia.com/gpu: {GPUS}, memory: 1Gi}}}}
  master:
    args: [--heartbeat-timeout, "6", --save-grace, "20"]
    template:
      spec:
        nodeSelector: {{kubernetes.io/hostname: {HEAD}}}
        containers: [{{name: master, image: none}}]
"""
"""A job of three workers that trains until the file `stop` is there."""


class Bed(TrainingLog):
    """Nodes, an account for the operator, operators and one job at a time."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.namespace = f"test-{uuid.uuid4().hex[:8]}"
        self.client = Client(namespace=self.namespace)
        self.nodes: set[str] = set()
        self.operators: list[subprocess.Popen[bytes]] = []
        self.port, self._reserved = reserve_port()
        self._shim = [sys.executable, str(SHIM), str(directory)]
        self._config: Path
        self._created: set[str] = set()

    # The cluster ---------------------------------------------------------------------------

    def start_node(self, name: str, gpus: int = GPUS) -> None:
        """Start a node.

        The command looks for the new process by its command line, which is empty for a moment while
        the process replaces itself by `exec`. If it looks just then, it kills the node and fails.
        """
        self._created.add(f"api/v1/nodes/{name}")
        words = (name, "--gpus", str(gpus))
        started = self._command("REMESH_TEST_START_KUBE_NODE", *words)
        if "did not become ready" in started.stderr:
            started = self._command("REMESH_TEST_START_KUBE_NODE", *words)
        assert started.returncode == 0, started.stderr
        self.nodes.add(name)

    def kill_node(self, name: str) -> None:
        self.nodes.discard(name)
        killed = self._command("REMESH_TEST_KILL_KUBE_NODE", name)
        assert killed.returncode == 0, killed.stderr

    def _command(self, variable: str, *words: str) -> subprocess.CompletedProcess[str]:
        root = str(Path(__file__).parents[2])
        tools = {
            "PYTHONPATH": os.pathsep.join([str(Path(root, "src")), root]),
            "REMESH_TESTBED_PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run(
            [os.environ[variable], *words],
            env=os.environ | tools,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def apply(self, manifest: dict[str, Any]) -> None:
        """Create an object; no error if it is there."""
        group, _, version = manifest["apiVersion"].rpartition("/")
        plural = manifest["kind"].lower() + "s"
        base = f"apis/{group}/{version}" if group else f"api/{version}"
        place = manifest["metadata"].get("namespace")
        path = f"{base}/namespaces/{place}/{plural}" if place else f"{base}/{plural}"
        reply = self._http("POST", path, manifest)
        assert reply.status_code in (200, 201, 409), reply.text
        if manifest["kind"] != "CustomResourceDefinition":
            self._created.add(f"{path}/{manifest['metadata']['name']}")

    def _http(self, method: str, path: str, body: object = None) -> Any:
        http = self.client._client._client
        return http.request(method, path, json=body)

    def install(self) -> None:
        """What `remesh manifests` prints, but for the deployment: the operator is a process."""
        rest = {"Deployment", "ClusterRole", "ClusterRoleBinding"}
        for each in manifests(image="none", namespace=self.namespace, watched=self.namespace):
            if each["kind"] not in rest:
                self.apply(each)
        self._config = self.config_of("remesh-operator")

    def config_of(self, account: str) -> Path:
        """A KUBECONFIG with the rights of an account."""
        wait_until(lambda: bool(self._account_token(account)), f"account {account} has a token")
        admin = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
        admin["users"] = [{"name": "admin", "user": {"token": self._account_token(account)}}]
        admin["contexts"][0]["context"]["namespace"] = self.namespace
        config = self.directory / f"{account}.kubeconfig"
        config.write_text(yaml.safe_dump(admin))
        return config

    def _account_token(self, account: str) -> str:
        for secret in self.client.list(SECRETS):
            notes = secret["metadata"].get("annotations") or {}
            if notes.get("kubernetes.io/service-account.name") == account and "data" in secret:
                return base64.b64decode(secret["data"].get("token", "")).decode()
        return ""

    # Operators -----------------------------------------------------------------------------

    def start_operator(self) -> subprocess.Popen[bytes]:
        command = [*REMESH, "operator", "--namespace", self.namespace]
        command += ["--own-namespace", self.namespace, "--master-host", "127.0.0.1"]
        log = (self.directory / "operator.log").open("ab")
        environment = os.environ | {"KUBECONFIG": str(self._config)}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        log.close()
        self.operators.append(process)
        return process

    def kill_operator(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.operators.remove(process)

    # Jobs ----------------------------------------------------------------------------------

    def submit(self, name: str, *, failure_patterns: Path | None = None, **spec: Any) -> None:
        """Submit a job, and mount its token as its kubelets would."""
        manifest = yaml.safe_load(JOB)
        manifest["metadata"] = {"name": name}
        for part in ("worker", "master"):
            (container,) = manifest["spec"][part]["template"]["spec"]["containers"]
            container["command"] = self._shim
        script = [str(TRAIN), str(self.directory), "numpy", "0.05"]
        manifest["spec"] |= {"script": script, **spec}
        manifest["spec"]["master"]["port"] = self.port
        if failure_patterns is not None:
            manifest["spec"]["master"]["args"] += ["--failure-patterns", str(failure_patterns)]
        self.client.create(JOBS.from_dict(manifest))
        wait_until(lambda: self._secret(f"{name}-token") is not None, "the token's secret")
        secret = self._secret(f"{name}-token")
        assert secret is not None
        new = self.directory / "token.new"
        new.write_bytes(base64.b64decode(secret["data"]["token"]))
        new.rename(self.directory / "token")

    def _secret(self, name: str) -> Mapping[str, Any] | None:
        try:
            return dict(self.client.get(SECRETS, name))
        except ApiError:
            return None

    def apply_example(self, name: str) -> None:
        """Apply manifests of a file of examples/kubernetes, with what this test bed has."""
        file = Path(__file__).parents[2] / "examples" / "kubernetes" / name
        for manifest in jobs_of(list(yaml.safe_load_all(file.read_text()))):
            manifest["metadata"]["namespace"] = self.namespace
            match manifest["kind"]:
                case "Deployment":
                    self._apply_master(manifest)
                case "Job":
                    self._apply_workers(manifest)

    def _apply_master(self, manifest: dict[str, Any]) -> None:
        spec = self._adapted(manifest["spec"]["template"]["spec"])
        spec["nodeSelector"] = {"kubernetes.io/hostname": HEAD}
        spec["containers"][0]["args"] += ["--port", str(self.port)]
        self.apply(manifest)

    def _apply_workers(self, manifest: dict[str, Any]) -> None:
        container = self._adapted(manifest["spec"]["template"]["spec"])["containers"][0]
        args = container["args"]
        args[args.index("--master") + 1] = f"http://127.0.0.1:{self.port}"
        args[args.index("8")] = "1"
        args[-1:] = ["--last-call", "2", str(TRAIN), str(self.directory), "numpy", "0.05"]
        self.apply(manifest)

    def _adapted(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The spec of a pod that the hollow kubelets can run."""
        spec["containers"][0]["command"] = self._shim
        for volume in spec["volumes"]:
            if volume.pop("persistentVolumeClaim", None):
                volume["emptyDir"] = {}  # the scheduler looks for claims, and there are none
        return spec

    def job(self, name: str) -> ElasticJob:
        return parse_job(self.client.get(JOBS, name))

    def pods(self, name: str) -> list[Pod]:
        """The pods of a job: masters first, then workers, by number."""
        labels: Any = {LABEL_JOB: name}
        found = [parse_pod(each) for each in self.client.list(PODS, labels=labels)]
        return sorted(
            (pod for pod in found if pod is not None), key=lambda pod: (pod.role, pod.index)
        )

    def workers(self, name: str) -> dict[int, str]:
        """The workers that run, and their nodes."""
        return {
            pod.index: pod.host
            for pod in self.pods(name)
            if pod.role is Role.WORKER and pod.is_running
        }

    def num_ended(self, how: str) -> int:
        """Pods of Jobs of Kubernetes that have `succeeded` or `failed`."""
        reply = self._http("GET", f"apis/batch/v1/namespaces/{self.namespace}/jobs")
        return sum(each.get("status", {}).get(how) or 0 for each in reply.json()["items"])

    def delete_pod(self, pod: str) -> None:
        self.client.delete(PODS, pod)

    def end_pod(self, word: str, *, out_of_memory: bool = False) -> None:
        """Kill one pod whose command has a word, such as its name; or as if memory ran out."""
        if out_of_memory:
            self.pod_file(word, "oom").touch()
        mine = str(self.directory).encode()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                status = (entry / "status").read_text()
            except OSError:
                continue  # it has just ended
            is_first = re.search(r"^NSpid:.*\t1$", status, re.MULTILINE) is not None
            is_pod = is_first and words[1:2] == [str(SHIM).encode()] and mine in words
            if is_pod and word.encode() in words:
                os.kill(int(entry.name), signal.SIGKILL)
                return

    def events(self) -> list[str]:
        return [each["message"] for each in self.client.list(EVENTS) if "message" in each]

    def until(self, name: str, what: str, holds: Callable[[], bool], seconds: float = 240) -> None:
        """Wait for a condition; fail with what is known of the job."""

        def lives() -> bool:
            for process in self.operators:
                assert process.poll() is None, self.log()
            return holds()

        try:
            wait_until(lives, what, seconds)
        except AssertionError:
            raise AssertionError(f"{what}: {self.job(name).status}\n{self.log()}") from None

    def until_trained(self, name: str, *ids: int) -> None:
        """Wait until these workers, and no others, train together and make steps."""

        def trains() -> bool:
            return self.size() == len(ids)

        self.until(name, f"workers {ids} run", lambda: sorted(self.workers(name)) == sorted(ids))
        self.until(name, f"{len(ids)} ranks train", trains)
        step = self.step
        self.until(name, f"steps with {ids}", lambda: self.step > step + 3 and trains())

    def shared(self, name: str) -> list[str]:
        """What is left of a job besides its pods."""
        secrets = {each["metadata"]["name"] for each in self.client.list(SECRETS)}
        services = {each["metadata"]["name"] for each in self.client.list(SERVICES)}
        return sorted(secrets & {f"{name}-token"} | services & {f"{name}-master"})

    def pod_file(self, pod: str, suffix: str) -> Path:
        name = f"{self.namespace}_{pod}.{suffix}"
        return Path(os.environ["REMESH_TESTBED_K8S_DIR"], "podlogs", name)

    def log(self) -> str:
        file = self.directory / "operator.log"
        text = file.read_text(errors="replace")[-4000:] if file.exists() else ""
        logs = Path(os.environ["REMESH_TESTBED_K8S_DIR"], "podlogs")
        for each in sorted(logs.glob(f"{self.namespace}_*.log")):
            text += f"\n--- {each.name}\n{each.read_text(errors='replace')[-1500:]}"
        return text

    def close(self) -> None:
        for process in list(self.operators):
            self.kill_operator(process)
        for node in sorted(self.nodes):
            self.kill_node(node)
        for path in sorted(self._created, reverse=True):
            self._http("DELETE", path)
        for job in self.client.list(JOBS):
            self.client.patch(
                JOBS,
                job["metadata"]["name"],
                {"metadata": {"finalizers": None}},
                patch_type=PatchType.MERGE,
            )
        self.client.close()
        self._reserved.close()


@contextmanager
def bed_in(directory: Path) -> Iterator[Bed]:
    bed = Bed(directory)
    try:
        bed.install()
        yield bed
    finally:
        bed.close()
