"""The definition of the resource ElasticJob for the API server: schema, defaults, columns.

The fields are those of `remesh.kubernetes.resource.Spec` and `Status`; a test compares the two.
The rules in `x-kubernetes-validations` need Kubernetes 1.25; older servers ignore them, and the
operator checks the same.
"""

from __future__ import annotations

from typing import Any

from remesh.kubernetes.resource import GROUP, KIND, MAX_NAME_LENGTH, MAX_WORKERS, PLURAL, VERSION

Schema = dict[str, Any]


def _text(description: str, **rules: object) -> Schema:
    return {"type": "string", "description": description, **rules}


def _number(description: str, minimum: int | None = 0, **rules: object) -> Schema:
    schema: Schema = {"type": "integer", "description": description, **rules}
    return schema if minimum is None else {**schema, "minimum": minimum}


def _flag(description: str, *, default: bool) -> Schema:
    return {"type": "boolean", "description": description, "default": default}


def _list(description: str, item: Schema, **rules: object) -> Schema:
    return {"type": "array", "description": description, "items": item, **rules}


def _object(properties: Schema, *required: str, **rules: object) -> Schema:
    schema: Schema = {"type": "object", "properties": properties, **rules}
    return {**schema, "required": list(required)} if required else schema


def _seconds(description: str, default: int) -> Schema:
    return _number(f"{description}, in seconds.", default=default)


def _template(description: str) -> Schema:
    return {
        "type": "object",
        "description": description,
        "x-kubernetes-preserve-unknown-fields": True,
    }


_WORDS = {"type": "string"}
_TIME = {"type": "string", "format": "date-time"}
_FEW = {"maximum": MAX_WORKERS}
_SECRET_NAME = {"minLength": 1, "maxLength": 253}

_CHECKPOINT = _object(
    {
        "claim": _text("A PersistentVolumeClaim that is mounted in all workers.", minLength=1),
        "path": _text("Where it is mounted.", default="/checkpoints", pattern="^/"),
        "url": _text("Address of an object store, instead of a claim.", pattern="^[a-z0-9]+://"),
        "secret": _text("A Secret whose keys become variables of the workers.", **_SECRET_NAME),
    },
    description="Where the job keeps its checkpoints; scripts read REMESH_CHECKPOINT_ROOT.",
    oneOf=[{"required": ["claim"]}, {"required": ["url"]}],
)

_TLS = _object(
    {
        "secret": _text("A Secret with the keys tls.crt, tls.key and ca.crt.", **_SECRET_NAME),
        "caBundle": _text("The certificates that the operator trusts, as PEM."),
    },
    "secret",
    description="Certificates of the master, for the name <job>-master.<namespace>.svc.",
)

_MASTER = _object(
    {
        "port": _number("Port of the master and of its service.", 1, maximum=65535, default=29400),
        "stateClaim": _text("A PersistentVolumeClaim for the master's journal.", minLength=1),
        "args": _list("Further options of `remesh master`.", _WORDS),
        "template": _template("Pod template; by default the image of the workers."),
    },
    description="The pod that coordinates the workers; it needs no GPU.",
    default={},
)

_WORKER = _object(
    {
        "args": _list("Further options of `remesh run`.", _WORDS),
        "template": _template("Pod template; its first container runs the training."),
    },
    "template",
    description="The pods that train.",
)

SPEC = _object(
    {
        "script": _list("The script and its arguments.", _WORDS, minItems=1),
        "replicas": _number("Workers that the job should have.", 1, **_FEW, default=1),
        "minReplicas": _number("Fewest workers that can train; replicas by default.", 1, **_FEW),
        "maxReplicas": _number("Most workers; replicas by default.", 1, **_FEW),
        "nodeUnit": _number("Worlds have a multiple of so many workers.", 1, default=1),
        "maxRestarts": _number("Restarts of a worker's processes that are charged.", default=3),
        "maxReplacements": _number("Workers that are replaced after failures.", default=10),
        "check": _flag("Test workers before they train.", default=False),
        "excludeFaultyHosts": _flag("Keep pods off hosts that proved faulty.", default=True),
        "maxMemory": _text(
            "A worker killed for memory is replaced by one with more, up to this.",
            pattern=r"^[0-9]+(\.[0-9]+)?(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$",
        ),
        "suspend": _flag("Give back all resources until this is false.", default=False),
        "cleanPolicy": _text(
            "Which pods are deleted when the job has finished.",
            enum=["Running", "All", "None"],
            default="Running",
        ),
        "pendingSeconds": _seconds("A worker that is not scheduled is given up after this", 300),
        "growSeconds": _seconds("After this the job tries to have all workers again", 300),
        "nodeLostSeconds": _seconds("Pods of a lost node are replaced after this", 30),
        "drainSeconds": _seconds("Time for a last checkpoint", 60),
        "joinSeconds": _seconds("Without enough workers for this long the job fails", 3600),
        "checkpoint": _CHECKPOINT,
        "tls": _TLS,
        "master": _MASTER,
        "worker": _WORKER,
    },
    "script",
    "worker",
    **{
        "x-kubernetes-validations": [
            {
                "rule": "!has(self.minReplicas) || self.minReplicas <= self.replicas",
                "message": "minReplicas is more than replicas",
            },
            {
                "rule": "!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
                "message": "replicas is more than maxReplicas",
            },
        ]
    },
)

_TRAINING = _object(
    {
        "time": _TIME,
        "phase": _WORDS,
        "reason": _WORDS,
        "round": {"type": "integer"},
        "step": {"type": "integer", "nullable": True},
        "savedStep": {"type": "integer", "nullable": True},
        "goodput": {"type": "number", "nullable": True},
    },
    nullable=True,
)

_CONDITION = _object(
    {
        "type": _WORDS,
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "reason": _WORDS,
        "message": _WORDS,
        "lastTransitionTime": _TIME,
    },
    "type",
    "status",
    "lastTransitionTime",
)

_LATER = {**_TIME, "nullable": True}

STATUS = _object(
    {
        "observedGeneration": {"type": "integer"},
        "phase": {
            "type": "string",
            "enum": ["Pending", "Running", "Suspended", "Succeeded", "Failed"],
        },
        "reason": _WORDS,
        "conditions": _list(
            "Training, Degraded, Suspended, Complete, Failed; Stalled if the operator is stuck.",
            _CONDITION,
            **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
        "replicas": {"type": "integer"},
        "selector": _WORDS,
        "target": {"type": "integer", "nullable": True},
        "shrunkAt": _LATER,
        "workers": _list(
            "The workers that the job should have.",
            _object({"id": {"type": "integer"}, "seen": {"type": "boolean"}}, "id"),
        ),
        "nextWorker": {"type": "integer"},
        "master": {"type": "integer"},
        "masterSeen": {"type": "boolean"},
        "masterFailures": {"type": "integer"},
        "masterFailedAt": _LATER,
        "epoch": {"type": "integer"},
        "excludedHosts": _list(
            "Hosts that are not used.",
            _object({"host": _WORDS, "reason": _WORDS, "time": _TIME}, "host"),
        ),
        "replacements": {"type": "integer"},
        "replacedAt": _LATER,
        "memory": {"type": "integer", "format": "int64", "nullable": True},
        "started": _LATER,
        "finished": _LATER,
        "training": _TRAINING,
        "failures": _list(
            "The newest failures, newest first.",
            _object({"time": _TIME, "where": _WORDS, "what": _WORDS, "message": _WORDS}),
        ),
    }
)


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
                    "openAPIV3Schema": _object(
                        {
                            "apiVersion": _WORDS,
                            "kind": _WORDS,
                            "metadata": _object({"name": _NAME}),
                            "spec": SPEC,
                            "status": STATUS,
                        },
                        "spec",
                        description="A training job whose workers may come and go.",
                    )
                },
            }
        ],
    },
}
"""The CustomResourceDefinition."""
