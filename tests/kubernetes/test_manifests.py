"""The objects that are applied and created: their schema, their rights, their security."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from click.testing import CliRunner

from remesh.cli import cli
from remesh.elastic.launch import make_parser
from remesh.errors import ClusterError
from remesh.kubernetes import resource
from remesh.kubernetes.manifests import SPEC, STATUS, manifests
from remesh.kubernetes.operator import KEY_SECRET
from remesh.kubernetes.pods import make_pod, make_secret, make_service, token_of
from remesh.kubernetes.resource import (
    ExcludedHost,
    JobStatus,
    MasterSpec,
    Role,
    Tls,
    WorkerSpec,
)
from tests.kubernetes.controllers import jobs_of
from tests.kubernetes.simulated import START, make_job, make_spec, roundtrip

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "kubernetes"
PAGE = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_examples_fit_the_definitions_of_other_projects(name: str) -> None:
    manifests = list(yaml.safe_load_all((EXAMPLES / name).read_text()))
    jobs = jobs_of(manifests)
    assert sum(job["spec"]["parallelism"] for job in jobs) == 3
    manifests[-1]["spec"]["numWorkers"] = 3
    with pytest.raises(jsonschema.ValidationError, match="numWorkers"):
        jobs_of(manifests)


VALID: dict[str, Any] = {"script": ["train.py"], "worker": {"template": {"spec": {}}}}


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"replicas": 3, "minReplicas": 2, "maxReplicas": 4},
        {"cleanPolicy": "All", "tls": {"secret": "certificates"}},
        {"master": {"stateClaim": "journal", "args": ["--check"], "template": {"spec": {}}}},
    ],
)
def test_the_schema_accepts_what_is_valid(spec: dict[str, Any]) -> None:
    jsonschema.validate(VALID | spec, SPEC, jsonschema.Draft202012Validator)
    msgspec.convert(VALID | spec, resource.Spec)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"script": []}, "should be non-empty"),
        ({"replicas": 0}, "0 is less than the minimum of 1"),
        ({"maxReplicas": 10_001}, "10001 is greater than the maximum of 10000"),
        ({"cleanPolicy": "Some"}, "is not one of"),
        ({"tls": {}}, "'secret' is a required property"),
        ({"master": {"port": 65_536}}, "greater than the maximum of 65535"),
        ({"worker": {}}, "'template' is a required property"),
        ({"minReplicas": None}, "None is not of type 'integer'"),
    ],
)
def test_the_schema_refuses_what_is_not_valid(spec: dict[str, Any], problem: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=problem):
        jsonschema.validate(VALID | spec, SPEC, jsonschema.Draft202012Validator)


def test_a_field_that_does_not_exist_is_named() -> None:
    meta = {"name": "train", "namespace": "ml"}
    with pytest.raises(ClusterError, match="unknown field `growSeconds`"):
        resource.parse_job({"metadata": meta, "spec": VALID | {"growSeconds": 300}})


def structural(schema: dict[str, Any]) -> None:
    """What the API server requires of a schema: every part has a type, none is open by default."""
    assert "type" in schema
    assert not {"$ref", "anyOf", "additionalProperties", "title"} & set(schema)
    assert "default" not in schema or schema["default"] is not None
    for part in schema.get("properties", {}).values():
        structural(part)
    if schema["type"] == "array":
        structural(schema["items"])
    if schema["type"] == "object" and "x-kubernetes-preserve-unknown-fields" not in schema:
        assert "properties" in schema


def test_the_schema_is_structural() -> None:
    structural(SPEC)
    structural(STATUS)
    definition = manifests(image="i", namespace="n")[0]
    assert definition["metadata"]["name"] == f"{resource.PLURAL}.{resource.GROUP}"
    (version,) = definition["spec"]["versions"]
    assert version["name"] == resource.VERSION
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    assert properties["spec"].items() >= SPEC.items()
    assert properties["status"] == STATUS


def test_manifests_are_printed_and_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["manifests", "--image", "registry.example/remesh:1"])
    assert done.exit_code == 0, done.output
    printed = list(yaml.safe_load_all(done.stdout))
    assert [each["kind"] for each in printed] == [
        "CustomResourceDefinition",
        "Namespace",
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "ClusterRole",
        "ClusterRoleBinding",
        "Deployment",
    ]
    assert "registry.example/remesh:1" in done.stdout
    deployment = printed[-1]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    done = CliRunner().invoke(cli, ["manifests", "--watch", "ml"])
    assert done.exit_code == 0, done.output
    written = list(yaml.safe_load_all(done.stdout))
    assert "ClusterRole" not in {each["kind"] for each in written}
    places = {each["metadata"].get("namespace") for each in written if each["kind"] == "Role"}
    assert places == {"remesh", "ml"}


def test_the_operator_reads_no_secrets_and_changes_no_pods() -> None:
    made = manifests(image="i", namespace="n")
    own, of_jobs = (each["rules"] for each in made if each["kind"] in ("Role", "ClusterRole"))
    verbs = {name: set(rule["verbs"]) for rule in of_jobs for name in rule["resources"]}
    assert verbs["secrets"] == {"create", "delete"}
    assert verbs["pods"] == {"list", "watch", "create", "delete"}
    assert not any("*" in rule["verbs"] + rule["resources"] for rule in (*own, *of_jobs))
    (reads,) = [rule for rule in own if "get" in rule["verbs"]]
    assert reads["resourceNames"] == [KEY_SECRET]


def test_pods_follow_the_restricted_profile() -> None:
    worker = WorkerSpec(template=yaml.safe_load(TEMPLATE))
    spec = msgspec.structs.replace(make_spec(), worker=worker)
    job = msgspec.structs.replace(make_job(), spec=spec)
    for role in Role:
        spec = make_pod(job, role, 0)["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["restartPolicy"] == "Never"
        for container in [*spec["containers"], *spec["initContainers"]]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}


TEMPLATE = """
metadata: {labels: {team: ml}, annotations: {a: b}}
spec:
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms:
        - matchExpressions: [{key: gpu, operator: In, values: [h100]}]
        - matchFields: []
  tolerations:
  - {key: node.kubernetes.io/unreachable, operator: Exists, tolerationSeconds: 7}
  securityContext: {runAsUser: 42}
  containers:
  - name: train
    image: train:1
    command: [env, remesh]
    env: [{name: A, value: "1"}]
    resources: {limits: {memory: 1Gi, cpu: 2}}
    volumeMounts: [{name: shm, mountPath: /dev/shm/}]
  - {name: beside, image: other:1}
  initContainers: [{name: first, image: other:1}]
  volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]
"""


def test_a_template_is_completed_not_overruled() -> None:
    template = yaml.safe_load(TEMPLATE)
    spec = msgspec.structs.replace(
        make_spec(),
        worker=WorkerSpec(template=template, args=("--nproc-per-node", "8")),
        tls=Tls(secret="certificates"),
        master=MasterSpec(state_claim="journal"),
        check=True,
        max_restarts=7,
    )
    excluded = (ExcludedHost(host="host-1", reason="", time=START),)
    status = JobStatus(excluded_hosts=excluded, epoch=3)
    job = msgspec.structs.replace(make_job(), spec=spec, status=status)
    made = make_pod(job, Role.WORKER, 5)
    assert made["metadata"]["labels"]["team"] == "ml"
    pod, container = made["spec"], made["spec"]["containers"][0]
    assert pod["securityContext"]["runAsUser"] == 42
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert {each["key"]: each["tolerationSeconds"] for each in pod["tolerations"]} == {
        "node.kubernetes.io/unreachable": 7,
        "node.kubernetes.io/not-ready": 30,
    }
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    away = {"key": "metadata.name", "operator": "NotIn", "values": ["host-1"]}
    assert terms["nodeSelectorTerms"] == [
        {
            "matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}],
            "matchFields": [away],
        },
        {"matchFields": [away]},
    ]
    assert container["command"] == ["env", "remesh"]
    assert container["resources"] == {"limits": {"memory": "1Gi", "cpu": 2}}
    assert container["args"][-3:] == ["--nproc-per-node", "8", "train.py"]
    assert "--max-restarts 7" in " ".join(container["args"])
    assert "https://train-master.ml.svc:29400" in container["args"]
    assert {"name": "A", "value": "1"} in container["env"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert [each["path"] for each in volumes["remesh-tls"]["secret"]["items"]] == ["ca.crt"]
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounted.keys() == volumes.keys()
    assert [name for name, path in mounted.items() if "shm" in path] == ["shm"]

    master = make_pod(job, Role.MASTER, 2)["spec"]
    assert master["containers"][0]["image"] == "train:1"
    assert {"/var/lib/remesh/u1-3.json", "--check"} <= {*master["containers"][0]["args"]}
    volumes = {each["name"]: each for each in master["volumes"]}
    assert volumes["remesh-state"]["persistentVolumeClaim"] == {"claimName": "journal"}


def test_tokens_differ_and_are_made_anew_alike() -> None:
    job = make_job()
    assert token_of(b"key", job) == token_of(b"key", job)
    assert token_of(b"key", job) != token_of(b"yek", job)
    assert token_of(b"key", job) != token_of(b"key", msgspec.structs.replace(job, uid="u2"))
    assert make_secret(job, "t")["metadata"]["ownerReferences"][0]["uid"] == job.uid
    assert make_service(job)["spec"]["ports"][0]["port"] == 29400


def test_jobs_come_back_from_the_api_server_as_they_were() -> None:
    job = make_job()
    again = roundtrip(job)
    assert (again.spec, again.status) == (job.spec, job.status)
    with pytest.raises(ClusterError, match="ElasticJob ml/train is not valid"):
        resource.parse_job({"metadata": {"name": "train", "namespace": "ml"}, "spec": {}})


def containers_in(value: Any) -> Iterator[dict[str, Any]]:
    """The containers in a manifest, however deep."""
    if isinstance(value, dict):
        yield from value.get("containers", [])
        value = list(value.values())
    for each in value if isinstance(value, list) else []:
        yield from containers_in(each)


def test_the_example_is_the_one_of_the_page_and_is_valid() -> None:
    text = (EXAMPLES / "job.yaml").read_text()
    assert f"```yaml\n{text}```" in PAGE
    spec = yaml.safe_load(text)["spec"]
    jsonschema.validate(spec, SPEC, jsonschema.Draft202012Validator)
    parsed = msgspec.convert(spec, resource.Spec)
    assert (parsed.fewest, resource.problem_of(parsed)) == (2, "")


@pytest.mark.parametrize("name", ["master", "indexed-job", "jobset", "trainjob"])
def test_manifests_without_the_operator_have_options_that_exist(name: str) -> None:
    documents = list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))
    (container,) = containers_in(documents)
    assert container["command"] == ["remesh"]
    command, *options = container["args"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert all(f"name: {each}" in yaml.safe_dump(documents) for each in mounted)
    if command == "run":
        indices = [re.sub(r"\$\([A-Z_]+_INDEX\)", "1", each) for each in options]
        parsed = make_parser().parse_args(indices)
        assert (parsed.node_id, parsed.nnodes, parsed.training_script) == (1, "2:3", "train.py")
        assert parsed.local_addr == "$(POD_IP)"
    else:
        done = CliRunner().invoke(cli, ["master", *options])
        assert "the token cannot be read" in done.output, "all options are known"


def test_every_field_is_on_the_page() -> None:
    table = PAGE.partition("## Fields")[2].partition("\n## ")[0]
    assert [name for name in SPEC["properties"] if f"`{name}`" not in table] == []
