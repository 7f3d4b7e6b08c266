"""What the controllers of JobSet and Kubeflow Trainer make of the examples: Jobs of Kubernetes.

The controllers themselves do not run in tests. `schemas.json` has the schemas of their definitions,
without descriptions and pod templates; each says where it comes from.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema

Manifest = dict[str, Any]

SCHEMAS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("schemas.json").read_text()
)
JOB_INDEX = "jobset.sigs.k8s.io/job-index"
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"


def validate(manifest: Manifest) -> None:
    schema = SCHEMAS[manifest["kind"]]
    assert manifest["apiVersion"] == schema["apiVersion"]
    jsonschema.validate(manifest["spec"], schema["spec"], jsonschema.Draft202012Validator)


def jobs_of(manifests: list[Manifest]) -> list[Manifest]:
    """The Jobs, and whatever needs no controller of another project."""
    runtimes = {each["metadata"]["name"]: each for each in manifests if "Runtime" in each["kind"]}
    found = []
    for manifest in manifests:
        match manifest["kind"]:
            case "JobSet":
                validate(manifest)
                found += _of_job_set(manifest)
            case "TrainingRuntime":
                validate(manifest)
            case "TrainJob":
                validate(manifest)
                runtime = runtimes[manifest["spec"]["runtimeRef"]["name"]]
                found += _of_job_set(_of_train_job(manifest, runtime))
            case _:
                found.append(manifest)
    return found


def _of_job_set(manifest: Manifest) -> list[Manifest]:
    """A Job for each replica of each replicated job, with its number in an annotation."""
    name, jobs = manifest["metadata"]["name"], []
    for replicated in manifest["spec"]["replicatedJobs"]:
        for replica in range(replicated.get("replicas", 1)):
            spec = copy.deepcopy(replicated["template"]["spec"])
            meta = spec["template"].setdefault("metadata", {})
            meta.setdefault("annotations", {})[JOB_INDEX] = str(replica)
            full = f"{name}-{replicated['name']}-{replica}"
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": full}}
            jobs.append(job | {"spec": spec})
    return jobs


def _of_train_job(manifest: Manifest, runtime: Manifest) -> Manifest:
    """The JobSet of a TrainJob: that of its runtime, with its numbers and resources."""
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    trainer = manifest["spec"]["trainer"]
    for replicated in spec["replicatedJobs"]:
        labels = replicated["template"].get("metadata", {}).get("labels", {})
        if labels.get(STEP) == "trainer":
            job = replicated["template"]["spec"]
            job["parallelism"] = job["completions"] = trainer["numNodes"]
            job["completionMode"] = "Indexed"
            (container,) = [
                each for each in job["template"]["spec"]["containers"] if each["name"] == "node"
            ]
            container["resources"] = trainer["resourcesPerNode"]
    return {"kind": "JobSet", "metadata": manifest["metadata"], "spec": spec}
