# SPDX-License-Identifier: Apache-2.0
"""Hand a job's object in to a cluster; what goes wrong is one sentence, and what is there already is left alone."""

from pathlib import Path
from typing import Any

from megascale_ops.engines.actuator import EngineError, RightsError
from megascale_ops.engines.kubernetes.client import ApiCalls
from megascale_ops.engines.kubernetes.job import QUEUE
from megascale_ops.engines.kubernetes.objects import MANAGER, Json, refusal

# Kind -> resource, and what brings a kind that Kubernetes itself has not.
_RESOURCES = {"Job": ("jobs", ""), "JobSet": ("jobsets", "JobSet's controller"), "TrainJob": ("trainjobs", "Trainer")}
_OF_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ClusterJobs(ApiCalls):
    """Jobs of the cluster that the pod's account or the user's kubeconfig leads to."""

    def create(self, made: Json) -> str:
        """Hand an object in; one of its kind and name that is there stays as it is, suspended or not.

        Args:
            made: Job, JobSet or TrainJob.

        Returns:
            What was done and how to see it, in one sentence.

        Raises:
            RightsError: it may not be done; the sentence names the rule that lacks.
            EngineError: it was not done.
        """
        kind, name, labels = made["kind"], made["metadata"]["name"], made["metadata"].get("labels", {})
        group, _, version = made["apiVersion"].partition("/")
        resource, brought_by = _RESOURCES[kind]
        namespace = made["metadata"].get("namespace") or current_namespace()
        place = f"{name} in namespace {namespace}"

        def refused(status: int, said: str) -> EngineError:
            if status == 409:
                return EngineError(
                    f"there is a {kind} {place} already, which is left as it is: give another --name, or remove it by "
                    f"`kubectl -n {namespace} delete {kind.lower()} {name}`"
                )
            if status == 404 and brought_by and "namespaces" not in said:
                return EngineError(
                    f"the cluster knows no {kind}: {brought_by} is not installed there; --kind Job is known"
                )
            error = RightsError if status in (401, 403) else EngineError
            return error(refusal(status, said, "create", resource, group, "Role"))

        call: Any = "create_namespaced_custom_object"
        names = (group, version, namespace, resource, made)
        self._call("CustomObjectsApi", call, self._until_s(), refused, *names, field_manager=MANAGER)
        waits = f"; Kueue starts it when its queue {labels[QUEUE]} has room" if QUEUE in labels else ""
        return f"{kind} {place} is created{waits}: `kubectl -n {namespace} get {kind.lower()} {name}`"


def current_namespace() -> str:
    """Return the namespace of this pod, or of the kubeconfig's context; "default" where neither says one."""
    try:
        return _OF_POD.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        pass
    try:
        from kubernetes import config

        _, context = config.list_kube_config_contexts()
    except (ImportError, OSError, ValueError, TypeError):  # no client and no file are told by the call that follows
        return "default"
    except config.ConfigException:
        return "default"
    return str(context["context"].get("namespace") or "default")
