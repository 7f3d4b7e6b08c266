"""The output of `remesh manifests`: definition, namespace, accounts, rights, the operator itself.

All of it is in `manifests.yaml`, but for the schema of the definition, which is made from `Spec`
and `JobStatus` of `remesh.kubernetes.resource`. The rules in `x-kubernetes-validations` need
Kubernetes 1.25; older servers ignore them, and the operator checks the same.

The rights are the least with which the operator works, and a test on a real API server has no
others. It reads no secrets but its own key, and may create pods, services and secrets but neither
read those secrets nor change a pod. All of them may be restricted to one namespace.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any

import msgspec
import yaml

from remesh.kubernetes.pods import Manifest
from remesh.kubernetes.resource import JobStatus, Spec

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


SPEC = _schema_of(Spec, defaults=True)
STATUS = _schema_of(JobStatus, defaults=False)
_TEMPLATE = Template(resources.files(__package__).joinpath("manifests.yaml").read_text("utf-8"))


def manifests(*, image: str, namespace: str, watched: str | None = None) -> list[Manifest]:
    """All objects that a cluster needs; the definition is the first of them."""
    args = ["operator", "--metrics-port", "8080"]
    values = {
        "image": image,
        "namespace": namespace,
        "args": args if watched is None else [*args, "--namespace", watched],
        "watched": watched,
    }
    text = _TEMPLATE.substitute(
        {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()},
        kind="ClusterRole" if watched is None else "Role",
    )
    made: list[Manifest] = list(yaml.safe_load_all(text))
    for each in made:
        if each["kind"].startswith("ClusterRole"):
            del each["metadata"]["namespace"]
    schema = made[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"].update(SPEC)
    schema["properties"]["status"] = STATUS
    return made


def to_yaml(documents: Sequence[Manifest]) -> str:
    """Manifests as YAML documents."""
    return "---\n".join(
        yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=100) for each in documents
    )


class _Dumper(yaml.SafeDumper):
    """Writes equal lists and mappings each in full, not as references to the first."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - yaml's signature
        return True
