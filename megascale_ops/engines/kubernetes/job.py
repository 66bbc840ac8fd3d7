# SPDX-License-Identifier: Apache-2.0
"""A job as a file describes it, and the object that Kubernetes gets for it: Job, JobSet or Kubeflow's TrainJob. Pure.

One pod a node, each with ``megascale-ops run``; the controller tells them who is rank 0 and where. Kueue finds its
queue by a label of the object, and suspends and resumes it; ``managedBy`` names another controller for it
(MultiKueue). Both are passed on, and an object that is there is never changed.

Fields: batch/v1 (Kubernetes 1.37), jobset.x-k8s.io/v1alpha2 (0.11), trainer.kubeflow.org/v1alpha1 (2.3), by their
published schemas; `tests/unit/engines/test_kubernetes_job.py` compares.
"""

import re
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from megascale_ops.errors import UsageError

Json = dict[str, Any]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]

CONTROLLER = "http://megascale-ops-controller.megascale-ops.svc:7070"
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
_TOKEN = "/run/secrets/megascale-ops"  # noqa: S105  a folder
# 52: a JobSet's pods are called NAME-node-0-INDEX-abcde, and a host name has 63 characters at most.
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
_LABEL = re.compile(r"(?:[a-z0-9.-]+/)?[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?)?")
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUANTITY = re.compile(r"\d+(?:\.\d+)?(?:m|[EPTGMk]|[EPTGMK]i)?")
# What Trainer's torch plug-in sets for torchrun: rank 0 would be bound to one pod, which may be evicted.
_OF_TORCHRUN = ("PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NODE_RANK")
# Seconds from SIGTERM to SIGKILL below which no checkpoint is waited for: `run` needs 15 for the end.
_LEAST_GRACE_S = 20


class KubernetesJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What ``megascale-ops submit kubernetes`` takes from a file, or as options of the same names."""

    HELP: ClassVar[dict[str, str]] = {
        "command": "Script and its arguments.",
        "name": "Name of the job and of the object.  [the script's]",
        "kind": "Job, JobSet or TrainJob.  [JobSet]",
        "image": "The training image, with megascale-ops[train] in it.",
        "namespace": "Where the object goes.  [that of the kubeconfig's context]",
        "nodes": "Nodes that train, a pod each.",
        "min_nodes": "How few of them may go on; 0: all.",
        "spares": "Further pods, which wait for the place of one that is lost.",
        "gpus_per_node": "GPUs of each pod; as many ranks.",
        "cpus": "Cores of each pod, as Kubernetes writes them.",
        "memory": "Memory of each pod, as in 512Gi.",
        "shared_memory": "Most of /dev/shm.  [64Gi]",
        "queue": "Kueue's LocalQueue, in the same namespace.",
        "priority": "Kueue's WorkloadPriorityClass.",
        "priority_class": "Kubernetes' PriorityClass of the pods.",
        "managed_by": "Another controller of the object, such as kueue.x-k8s.io/multikueue.",
        "runtime": "TrainJob: the ClusterTrainingRuntime.  [torch-distributed]",
        "grace_s": "Seconds from SIGTERM to SIGKILL, for a checkpoint when a pod is evicted.",
        "backoff_limit": "How many pods may be gone, evicted ones not counted.",
        "max_restarts": "JobSet: restarts of the whole set.",
        "runs_claim": "PersistentVolumeClaim for logs and checkpoints, which all pods can mount.  [runs]",
        "token_secret": "Secret with the key token, in the same namespace.  [megascale-ops]",
        "controller": f"The controller.  [{CONTROLLER}]",
        "label": "KEY=VALUE on the object.",
        "node_selector": "KEY=VALUE: only nodes with this label.",
        "env": "NAME=VALUE in the pods.",
        "options": "Further options of `megascale-ops run`.",
    }

    command: tuple[str, ...] = ()
    name: str = ""
    kind: Literal["", "Job", "JobSet", "TrainJob"] = ""
    image: str = ""
    namespace: str = ""
    nodes: Annotated[int, Meta(ge=1, le=100_000)] = 1
    min_nodes: Count = 0
    spares: Count = 0
    gpus_per_node: Count = 0
    cpus: str = ""
    memory: str = ""
    shared_memory: str = ""
    queue: str = ""
    priority: str = ""
    priority_class: str = ""
    managed_by: str = ""
    runtime: str = ""
    grace_s: Annotated[int, Meta(ge=_LEAST_GRACE_S, le=86_400)] = 120
    backoff_limit: Count = 4
    max_restarts: Count = 3
    runs_claim: str = ""
    token_secret: str = ""
    controller: str = ""
    label: tuple[str, ...] = ()
    node_selector: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def manifest(job: KubernetesJob) -> Json:
    """Return the object.

    Raises:
        UsageError: there is nothing to run, or a part of it can't be.
    """
    _check(job)
    metadata: Json = {"name": _name_of(job)}
    if job.namespace:
        metadata["namespace"] = job.namespace
    labels = _pairs("label", job.label)
    labels |= {key: value for key, value in ((QUEUE, job.queue), (PRIORITY, job.priority)) if value}
    if labels:
        metadata["labels"] = labels
    if job.kind == "TrainJob":
        return _train_job(job, metadata)
    managed = {"managedBy": job.managed_by} if job.managed_by else {}
    if job.kind == "Job":
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": managed | _job_spec(job)}
    replicated: Json = {"name": "node", "replicas": 1, "template": {"spec": _job_spec(job)}}
    spec: Json = managed | {"failurePolicy": {"maxRestarts": job.max_restarts}, "replicatedJobs": [replicated]}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def _job_spec(job: KubernetesJob) -> Json:
    pods = job.nodes + job.spares
    pod: Json = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "automountServiceAccountToken": False,
    }
    if job.priority_class:
        pod["priorityClassName"] = job.priority_class
    if job.node_selector:
        pod["nodeSelector"] = _pairs("node_selector", job.node_selector)
    container: Json = {"name": "train", "image": job.image, "command": _run(job), "env": _environment(job)}
    if limits := _limits(job):
        container["resources"] = {"limits": limits}
    pod["containers"] = [container | {"volumeMounts": _mounts()}]
    pod["volumes"] = _volumes(job)
    # Evicted pods are replaced and do not count as failures.
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": job.backoff_limit,
        "podFailurePolicy": {"rules": [evicted]},
        "template": {"spec": pod},
    }


def _train_job(job: KubernetesJob, metadata: Json) -> Json:
    """Return a TrainJob: image, command and resources are its own, all else a patch of its runtime's pods."""
    trainer: Json = {
        "image": job.image,
        "command": ["env", *(word for name in _OF_TORCHRUN for word in ("-u", name)), *_run(job)],
        "numNodes": job.nodes + job.spares,
        "env": _environment(job),
    }
    if limits := _limits(job):
        trainer["resourcesPerNode"] = {"limits": limits}
    pod: Json = {
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [{"name": "node", "volumeMounts": _mounts()}],
        "volumes": _volumes(job),
    }
    if job.node_selector:
        pod["nodeSelector"] = _pairs("node_selector", job.node_selector)
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {
        "manager": "megascale-ops.io/submit",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }
    spec: Json = {"managedBy": job.managed_by} if job.managed_by else {}
    spec |= {"runtimeRef": {"name": job.runtime or "torch-distributed"}, "trainer": trainer, "runtimePatches": [patch]}
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}


def _run(job: KubernetesJob) -> list[str]:
    least = job.min_nodes or job.nodes
    return [
        "megascale-ops",
        "run",
        f"--job={_name_of(job)}",
        f"--nnodes={job.nodes}" if least == job.nodes else f"--nnodes={least}:{job.nodes}",
        f"--nproc-per-node={job.gpus_per_node or 1}",
        "--node=$(NODE_NAME)",
        f"--eviction-grace={job.grace_s}",
        *job.options,
        "--",
        *job.command,
    ]


def _environment(job: KubernetesJob) -> list[Json]:
    return [
        {"name": "MEGASCALE_CONTROLLER", "value": job.controller or CONTROLLER},
        {"name": "MEGASCALE_TOKEN_FILE", "value": f"{_TOKEN}/token"},
        {"name": "XDG_STATE_HOME", "value": "/runs"},
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        *({"name": name, "value": value} for name, value in _pairs("env", job.env).items()),
    ]


def _limits(job: KubernetesJob) -> Json:
    gpus = {"nvidia.com/gpu": str(job.gpus_per_node)} if job.gpus_per_node else {}
    return gpus | {name: value for name, value in (("cpu", job.cpus), ("memory", job.memory)) if value}


def _mounts() -> list[Json]:
    return [
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  a mount
        {"name": "runs", "mountPath": "/runs"},
        {"name": "token", "mountPath": _TOKEN, "readOnly": True},
    ]


def _volumes(job: KubernetesJob) -> list[Json]:
    return [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shared_memory or "64Gi"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": job.runs_claim or "runs"}},
        {"name": "token", "secret": {"secretName": job.token_secret or "megascale-ops", "defaultMode": 0o400}},
    ]


def _name_of(job: KubernetesJob) -> str:
    """Return the job's name: its own, or the script's as Kubernetes takes it."""
    return job.name or re.sub(r"[^a-z0-9]+", "-", PurePath(job.command[0]).stem.lower()).strip("-")[:40] or "job"


def _check(job: KubernetesJob) -> None:
    """Refuse what the API server or `run` would refuse later.

    Raises:
        UsageError: with what is wrong.
    """
    if not job.command:
        raise UsageError('nothing to run: give `command = ["train.py"]` in the file, or the script after `--`')
    if not job.image:
        raise UsageError("no image: give the training image, with megascale-ops[train] in it, as `image` or --image")
    if not _NAME.fullmatch(_name_of(job)):
        raise UsageError(f"the name {_name_of(job)!r} can't be: lower case letters, digits and -, 42 at most")
    if job.min_nodes > job.nodes:
        raise UsageError(f"min_nodes = {job.min_nodes} is more than nodes = {job.nodes}")
    _check_words(job)
    if job.runtime and job.kind != "TrainJob":
        raise UsageError("runtime is TrainJob's: give kind = TrainJob with it")
    if job.kind == "TrainJob" and job.priority_class:
        raise UsageError("priority_class can't be set on a TrainJob: its runtime has the pods' PriorityClass")


def _check_words(job: KubernetesJob) -> None:
    """Refuse quantities and labels that Kubernetes would not take.

    Raises:
        UsageError: with the one.
    """
    for name in ("cpus", "memory", "shared_memory"):
        value = getattr(job, name)
        if value and not _QUANTITY.fullmatch(value):
            raise UsageError(f"{name} = {value!r} is no quantity of Kubernetes: 512Gi, 16, 500m")
    for name, value in ((QUEUE, job.queue), (PRIORITY, job.priority)):
        if not _VALUE.fullmatch(value):
            raise UsageError(f"{value!r} can't be the label {name}: 63 letters, digits, -, _ and . at most")


def _pairs(setting: str, given: tuple[str, ...]) -> dict[str, str]:
    """Return ``KEY=VALUE`` words by key.

    Raises:
        UsageError: one is none.
    """
    found = {}
    for one in given:
        key, sign, value = one.partition("=")
        is_env = setting == "env"
        if not sign or not (_ENV if is_env else _LABEL).fullmatch(key) or not (is_env or _VALUE.fullmatch(value)):
            raise UsageError(f"{setting} {one!r} can't be: {'NAME' if is_env else 'KEY'}=VALUE is wanted")
        found[key] = value
    return found
