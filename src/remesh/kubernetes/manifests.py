"""The output of `remesh manifests`: definition, namespace, accounts, rights, the operator itself.

The schema of the definition is made from `Spec` and `JobStatus` of `remesh.kubernetes.resource`.
The rules in `x-kubernetes-validations` need Kubernetes 1.25; older servers ignore them, and the
operator checks the same.

The rights are the least with which the operator works, and a test on a real API server has no
others. It reads no secrets but its own key, and may create pods, services and secrets but neither
read those secrets nor change a pod. All of them may be restricted to one namespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import yaml

from remesh.kubernetes.pods import CONTAINER_SECURITY, USER, Manifest
from remesh.kubernetes.resource import (
    GROUP,
    KIND,
    MAX_NAME_LENGTH,
    PLURAL,
    VERSION,
    JobStatus,
    Spec,
)

Schema = dict[str, Any]


def _structural(schema: Schema, parts: dict[str, Schema], *, defaults: bool) -> Schema:
    """A JSON schema as the API server takes it: no references, no null, a type in every part."""
    (kind,) = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    if "$ref" in kind:
        kind = parts[kind["$ref"].rpartition("/")[2]]
    made = {**kind, **schema}
    default = made.pop("default", None)
    for name in ("anyOf", "$ref", "title", "additionalProperties"):
        made.pop(name, None)
    made.setdefault("type", "string")  # what has an `enum`
    if "items" in made:
        made["items"] = _structural(made["items"], parts, defaults=defaults)
    if "properties" in made:
        made["properties"] = {
            name: _structural(each, parts, defaults=defaults)
            for name, each in made["properties"].items()
        }
        if not made["required"]:
            del made["required"]
        default = None if default is None else {}  # those of its fields follow
    elif made["type"] == "object":
        made["x-kubernetes-preserve-unknown-fields"] = True
    # Empty lists and templates are what a missing one means.
    if defaults and (isinstance(default, str | int) or ("properties" in made and default == {})):
        made["default"] = default
    return made


def _schema_of(kind: type[msgspec.Struct], *, defaults: bool) -> Schema:
    (schema,), parts = msgspec.json.schema_components([kind])
    return _structural(schema, parts, defaults=defaults)


_RULES = [
    {
        "rule": "!has(self.minReplicas) || self.minReplicas <= self.replicas",
        "message": "minReplicas is more than replicas",
    },
    {
        "rule": "!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
        "message": "replicas is more than maxReplicas",
    },
]
SPEC = {**_schema_of(Spec, defaults=True), "x-kubernetes-validations": _RULES}
STATUS = _schema_of(JobStatus, defaults=False)


def _column(name: str, kind: str, path: str, *, wide: bool = False) -> Schema:
    column: Schema = {"name": name, "type": kind, "jsonPath": path}
    return {**column, "priority": 1} if wide else column


COLUMNS = [
    _column("Phase", "string", ".status.phase"),
    _column("Workers", "integer", ".status.replicas"),
    _column("Wanted", "integer", ".spec.replicas"),
    _column("Step", "integer", ".status.training.step"),
    _column("Saved", "integer", ".status.training.savedStep", wide=True),
    _column("Replaced", "integer", ".status.replacements", wide=True),
    _column("Reason", "string", ".status.reason", wide=True),
    _column("Age", "date", ".metadata.creationTimestamp"),
]

_NAME = {
    "type": "string",
    "maxLength": MAX_NAME_LENGTH,
    "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$",
}

DEFINITION: Schema = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"{PLURAL}.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {
            "kind": KIND,
            "listKind": f"{KIND}List",
            "plural": PLURAL,
            "singular": KIND.lower(),
            "shortNames": ["ej"],
            "categories": ["all"],
        },
        "versions": [
            {
                "name": VERSION,
                "served": True,
                "storage": True,
                "additionalPrinterColumns": COLUMNS,
                "subresources": {
                    "status": {},
                    "scale": {
                        "specReplicasPath": ".spec.replicas",
                        "statusReplicasPath": ".status.replicas",
                        "labelSelectorPath": ".status.selector",
                    },
                },
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "description": "A training job whose workers may come and go.",
                        "properties": {
                            "apiVersion": {"type": "string"},
                            "kind": {"type": "string"},
                            "metadata": {"type": "object", "properties": {"name": _NAME}},
                            "spec": SPEC,
                            "status": STATUS,
                        },
                        "required": ["spec"],
                    }
                },
            }
        ],
    },
}
"""The CustomResourceDefinition."""

NAME = "remesh-operator"
KEY_SECRET = "remesh-operator-key"  # noqa: S105 - its name
METRICS_PORT = 8080


def _rule(group: str, resources: list[str], *verbs: str, **rest: object) -> Manifest:
    return {"apiGroups": [group], "resources": resources, "verbs": list(verbs), **rest}


JOB_RULES = [
    _rule(GROUP, [PLURAL], "get", "list", "watch", "patch"),
    _rule(GROUP, [f"{PLURAL}/status"], "patch"),
    _rule(GROUP, [f"{PLURAL}/finalizers"], "update"),
    _rule("", ["pods"], "list", "watch", "create", "delete"),
    _rule("", ["services", "secrets"], "create", "delete"),
    _rule("", ["events"], "create"),
]
"""The operator's rights where the jobs are."""

OWN_RULES = [
    _rule("", ["secrets"], "create"),
    _rule("", ["secrets"], "get", resourceNames=[KEY_SECRET]),
]
"""Its rights in its own namespace: its key."""


def manifests(*, image: str, namespace: str, watched: str | None = None) -> list[Manifest]:
    """All objects that a cluster needs."""
    return [
        DEFINITION,
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": dict(_RESTRICTED)},
        },
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _named(namespace)},
        *_rights("Role", namespace, OWN_RULES, namespace, "remesh-operator-self"),
        *_rights("ClusterRole" if watched is None else "Role", watched, JOB_RULES, namespace, NAME),
        _deployment(image, namespace, watched),
    ]


_RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def _named(namespace: str | None, name: str = NAME) -> Manifest:
    meta: Manifest = {"name": name, "labels": {"app.kubernetes.io/name": NAME}}
    return meta if namespace is None else {**meta, "namespace": namespace}


def _rights(
    kind: str, where: str | None, rules: Sequence[Manifest], account: str, name: str
) -> list[Manifest]:
    """A role, and its binding to the operator's account in the namespace `account`."""
    api = "rbac.authorization.k8s.io"
    return [
        {
            "apiVersion": f"{api}/v1",
            "kind": kind,
            "metadata": _named(where, name),
            "rules": list(rules),
        },
        {
            "apiVersion": f"{api}/v1",
            "kind": f"{kind}Binding",
            "metadata": _named(where, name),
            "roleRef": {"apiGroup": api, "kind": kind, "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": account}],
        },
    ]


def _deployment(image: str, namespace: str, watched: str | None) -> Manifest:
    args = ["operator", "--metrics-port", str(METRICS_PORT)]
    if watched is not None:
        args += ["--namespace", watched]
    probe = {"httpGet": {"path": "/healthz", "port": "metrics"}, "periodSeconds": 10}
    container = {
        "name": "operator",
        "image": image,
        "command": ["remesh"],
        "args": args,
        "env": [
            {
                "name": "POD_NAMESPACE",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}},
            },
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
        "livenessProbe": probe,
        "resources": {
            "requests": {"cpu": "100m", "memory": "128Mi"},
            "limits": {"memory": "512Mi"},
        },
        "securityContext": CONTAINER_SECURITY,
    }
    labels = {"app.kubernetes.io/name": NAME}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _named(namespace),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # never two at a time
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "serviceAccountName": NAME,
                    "securityContext": {
                        "runAsNonRoot": True,
                        "runAsUser": USER,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": [container],
                },
            },
        },
    }


def kustomization(files: Sequence[str], namespace: str) -> Manifest:
    """The base of a kustomization that holds files with manifests."""
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": list(files),
    }


def to_yaml(documents: Sequence[Manifest]) -> str:
    """Manifests as YAML documents."""
    return "---\n".join(
        yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=100) for each in documents
    )


class _Dumper(yaml.SafeDumper):
    """Writes equal lists and mappings each in full, not as references to the first."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - yaml's signature
        return True
