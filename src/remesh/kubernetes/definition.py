"""The definition of the resource ElasticJob for the API server: schema, rules, columns.

The schema is made from `remesh.kubernetes.resource.Spec` and `Status`. The rules in
`x-kubernetes-validations` need Kubernetes 1.25; older servers ignore them, and the operator checks
the same.
"""

from __future__ import annotations

from typing import Any

import msgspec

from remesh.kubernetes.resource import (
    GROUP,
    KIND,
    MAX_NAME_LENGTH,
    PLURAL,
    VERSION,
    Spec,
    Status,
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
    if (
        defaults
        and default is not None
        and ("properties" in made or isinstance(default, str | int))
    ):
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
STATUS = _schema_of(Status, defaults=False)


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
