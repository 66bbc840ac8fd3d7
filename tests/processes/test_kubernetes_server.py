# SPDX-License-Identifier: Apache-2.0
"""Manifests and actuator against the real API server (Debian's 1.20.2) with RBAC enforced: accepted, enough, minimal.

What that version has under other names is asked under those (a PodDisruptionBudget is policy/v1beta1 there). Kinds that
it lacks (JobSet, ServiceMonitor, PrometheusRule) no server checks here. Newer versions: `test_deploy.py`.
"""

import copy
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from megascale_ops.controller.actuating import Actuating
from megascale_ops.controller.policy.decision import Eviction
from megascale_ops.engines.actuator import EngineError, RightsError
from megascale_ops.engines.kubernetes.client import ClusterApi
from megascale_ops.engines.kubernetes.job import QUEUE, KubernetesJob, manifest
from megascale_ops.engines.kubernetes.jobs import ClusterJobs
from megascale_ops.engines.kubernetes.nodes import KubernetesNodes
from megascale_ops.engines.kubernetes.objects import CONDITION, TAINT
from tests.fakes.controlled_job import World
from tests.fakes.helm import LOADER, rendered
from tests.fakes.kubernetes import ACCOUNT, ADMIN, ApiServer, node
from tests.fakes.servers import until

pytestmark = pytest.mark.processes

Json = dict[str, Any]
MANIFESTS = Path(__file__).parents[2] / "agents" / "deploy" / "kubernetes"
ROLES = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
# Kind, or file's own: where it is asked for. The server's resources say whether a namespace is part of the path.
PLACES = {
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "ClusterRole": ROLES,
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "DaemonSet": "/apis/apps/v1/namespaces/{}/daemonsets",
    "Service": "/api/v1/namespaces/{}/services",
    "PersistentVolumeClaim": "/api/v1/namespaces/{}/persistentvolumeclaims",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "PodDisruptionBudget": "/apis/policy/v1beta1/namespaces/{}/poddisruptionbudgets",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
}


def documents(*files: Path) -> list[Json]:
    """Return the objects of manifests."""
    return [one for path in files for one in yaml.load_all(path.read_bytes(), Loader=LOADER) if one]


def objects() -> list[Json]:
    """Return every object that we ship, but kustomize's own and those of operators."""
    chart = ("Chart.yaml", "values.yaml")
    files = [path for path in sorted(MANIFESTS.rglob("*.yaml")) if path.parent.name not in ("patches", "templates")]
    files = [path for path in files if path.name not in chart]
    return [one for one in documents(*files) if one["kind"] in PLACES]


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    """A server with our namespace, and the class of containers and the nodes that are asked for."""
    with ApiServer() as one:
        one.ask("POST", "/api/v1/namespaces", {"metadata": {"name": "megascale-ops"}})
        runtime = {"metadata": {"name": "nvidia"}, "handler": "nvidia"}
        one.ask("POST", "/apis/node.k8s.io/v1/runtimeclasses", runtime)
        yield one


@pytest.fixture
def nodes(server: ApiServer) -> Iterator[list[str]]:
    """Two nodes that are Ready."""
    names = ["n1", "n2"]
    for name in names:
        made = node(name)
        del made["metadata"]["resourceVersion"]
        server.ask("POST", "/api/v1/nodes", made)
        patch = {"status": made["status"]}
        server.ask("PATCH", f"/api/v1/nodes/{name}/status", patch, "application/strategic-merge-patch+json")
        # A server without a node controller puts this on, and nobody takes it off.
        server.ask("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, "application/merge-patch+json")
    yield names
    for name in names:
        server.ask("DELETE", f"/api/v1/nodes/{name}")


@pytest.fixture
def role(server: ApiServer) -> Iterator[list[Json]]:
    """The role of rbac.yaml, bound to its account; the rules may be changed by `allow`."""
    mine = [one for one in documents(MANIFESTS / "rbac.yaml") if one["kind"] != "ServiceAccount"]
    for one in mine:
        server.ask("POST", PLACES[one["kind"]], one)
    yield next(one["rules"] for one in mine if one["kind"] == "ClusterRole")
    for one in mine:
        server.ask("DELETE", f"{PLACES[one['kind']]}/{one['metadata']['name']}")


def allow(server: ApiServer, rules: list[Json]) -> None:
    """Give the controller these rules and no others."""
    patch = {"rules": rules}
    server.ask("PATCH", f"{ROLES}/megascale-ops-controller", patch, "application/merge-patch+json")


def without(rules: list[Json], resource: str, verb: str) -> list[Json]:
    """Return the rules without one verb of one resource."""
    less = copy.deepcopy(rules)
    for rule in less:
        if rule["resources"] == [resource]:
            rule["verbs"].remove(verb)
    return [rule for rule in less if rule["verbs"]]


Engine = Callable[..., KubernetesNodes]


@pytest.fixture
def ours(server: ApiServer) -> Iterator[Engine]:
    """The actuator as the controller's account, with a deadline in seconds; its connections are closed at the end."""
    clients: list[Any] = []

    def make(deadline_s: float = 30.0) -> KubernetesNodes:
        clients.append(server.client("controller"))
        return KubernetesNodes(ClusterApi(clients[-1], deadline_s))

    yield make
    for client in clients:
        client.rest_client.pool_manager.clear()


def as_known(made: Json) -> Json:
    """Return an object as 1.20 knows it."""
    sent = copy.deepcopy(made)
    if sent["kind"] == "PodDisruptionBudget":
        sent["apiVersion"] = "policy/v1beta1"
    if sent["kind"] == "Job":  # 1.20 has no indexed ones
        del sent["spec"]["completionMode"]
    return sent


@pytest.mark.parametrize("made", objects(), ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_the_server_takes_every_object(server: ApiServer, made: Json) -> None:
    """Asked to take it without keeping it: schema, defaults, and what a server checks besides."""
    sent = as_known(made)
    namespace = sent["metadata"].get("namespace", "default")

    taken = server.ask("POST", PLACES[sent["kind"]].format(namespace) + "?dryRun=All", sent)

    assert taken["metadata"]["name"] == made["metadata"]["name"]


def test_the_server_takes_what_the_chart_renders(server: ApiServer) -> None:
    """All that can be switched on, but what operators bring; a release of another name in its own namespace."""
    server.ask("POST", "/api/v1/namespaces", {"metadata": {"name": "ops"}})
    job = {"kind": "Job", "image": "x", "command": ["train.py"], "nodes": 2, "queue": "gpus"}
    values = {"monitoring": {"dashboards": {"enabled": True}}, "jobs": {"gpt": job}}

    made = [as_known(one) for one in rendered(values, name="ops")]
    taken = [
        server.ask("POST", PLACES[one["kind"]].format("ops") + "?dryRun=All", one)["metadata"]["name"] for one in made
    ]

    assert sorted(taken) == sorted(one["metadata"]["name"] for one in made)
    assert {one["kind"] for one in made} == {*PLACES}


def test_a_mistake_is_not_taken(server: ApiServer) -> None:
    """The check above can fail: a port that no container can have."""
    (service,) = [one for one in documents(MANIFESTS / "controller.yaml") if one["kind"] == "Service"]
    service["spec"]["ports"][0]["port"] = 99999

    with pytest.raises(OSError, match="422"):
        server.ask("POST", PLACES["Service"].format("megascale-ops") + "?dryRun=All", service)


def test_a_node_goes_out_and_comes_back(server: ApiServer, nodes: list[str], role: list[Json], ours: Engine) -> None:
    """By the controller's account with the role of rbac.yaml: cordon, taint and condition, and all of it back."""
    assert role
    engine = ours()

    said = engine.drain("n1.example", "gpt: killed twice")

    found = server.ask("GET", "/api/v1/nodes/n1")
    assert said == "node n1 is cordoned and tainted in Kubernetes: megascale-ops: gpt: killed twice"
    assert found["spec"]["unschedulable"] is True
    assert TAINT in [one["key"] for one in found["spec"]["taints"]]
    conditions = {one["type"]: one for one in found["status"]["conditions"]}
    assert conditions[CONDITION]["message"] == "megascale-ops: gpt: killed twice"
    assert conditions["Ready"]["status"] == "True"
    states = engine.states()
    assert [(name, one.is_usable, one.is_ours) for name, one in states.items()] == [
        ("n1", False, True),
        ("n2", True, False),
    ]

    assert engine.resume("n1") == "node n1 is back in service"
    found = server.ask("GET", "/api/v1/nodes/n1")
    assert "unschedulable" not in found["spec"]
    assert TAINT not in [one["key"] for one in found["spec"].get("taints", [])]
    assert [*engine.states()] == nodes


def test_what_an_administrator_cordoned_stays(
    server: ApiServer, nodes: list[str], role: list[Json], ours: Engine
) -> None:
    """Known by what the server itself notes, also where our taint stands on the node from before."""
    assert nodes
    assert role
    engine = ours()
    engine.drain("n1", "killed")
    for name, is_out in (("n1", None), ("n1", True), ("n2", True)):  # taken back by hand, and cordoned anew
        path = f"/api/v1/nodes/{name}?fieldManager=kubectl-cordon"
        server.ask("PATCH", path, {"spec": {"unschedulable": is_out}}, "application/strategic-merge-patch+json")

    for name in nodes:
        with pytest.raises(EngineError, match=f"cordoned by kubectl-cordon and stays so: `kubectl uncordon {name}`"):
            engine.resume(name)
    assert "already by kubectl-cordon" in engine.drain("n2", "killed")
    assert [one.is_usable for one in engine.states().values()] == [False, False]


@pytest.mark.parametrize("verb", ["get", "list", "patch"])
def test_each_rule_is_needed_and_named_where_it_lacks(
    server: ApiServer, nodes: list[str], role: list[Json], ours: Engine, verb: str
) -> None:
    """One verb less, and one sentence says which; who may change nothing is told so."""
    assert nodes
    allow(server, without(role, "nodes", verb))
    engine = ours()

    call = engine.states if verb == "list" else lambda: engine.drain("n1", "killed")
    with pytest.raises(RightsError) as raised:
        call()

    assert str(raised.value) == (
        f"the API server does not let {ACCOUNT} {verb} nodes: its ClusterRole lacks the rule "
        f'{{apiGroups: [""], resources: [nodes], verbs: [{verb}]}}'
    )


def test_without_the_right_to_say_why_a_node_is_out_all_the_same(
    server: ApiServer, nodes: list[str], role: list[Json], ours: Engine
) -> None:
    """The last rule of the role."""
    assert nodes
    allow(server, without(role, "nodes/status", "patch"))

    said = ours().drain("n1", "killed")

    assert said.endswith('lacks the rule {apiGroups: [""], resources: [nodes/status], verbs: [patch]}')
    assert not ours().states()["n1"].is_usable


def test_the_role_allows_nothing_else(server: ApiServer, role: list[Json]) -> None:
    """By the server's own review: no secret, no pod, no deletion of a node."""
    assert role
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}

    def may(verb: str, resource: str, subresource: str = "") -> bool:
        asked = {"verb": verb, "resource": resource, "subresource": subresource, "namespace": "megascale-ops"}
        sent = review | {"spec": {"user": ACCOUNT, "resourceAttributes": asked}}
        done = server.ask("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", sent)
        return bool(done["status"].get("allowed", False))

    verbs = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
    assert [one for one in verbs if may(one, "nodes")] == ["get", "list", "patch"]
    assert [one for one in verbs if may(one, "nodes", "status")] == ["patch"]
    for resource in ("secrets", "pods", "configmaps", "serviceaccounts", "persistentvolumes", "namespaces"):
        assert not any(may(one, resource) for one in verbs)
    assert not may("create", "pods", "exec")


async def test_a_server_that_is_away_costs_the_job_one_sentence(
    server: ApiServer, nodes: list[str], role: list[Json], ours: Engine
) -> None:
    """What was read before holds, an eviction goes on without a drain; once it is back, the next one is told."""
    assert role
    world = World(min_nodes=1, max_nodes=2)
    await world.up(*nodes)
    actuating = Actuating(world.loop, ours(), 60.0)
    server.ask("PATCH", "/api/v1/nodes/n2", {"spec": {"unschedulable": True}}, "application/merge-patch+json")
    await actuating.poll()
    assert [*world.loop.registry.withheld] == ["n2"]

    def evict() -> None:
        job, wall_s = world.loop.jobs["job"], world.loop.wall()
        job.change(evictions=(*job.record.evictions, Eviction("n1", wall_s, wall_s + 60.0, "killed twice")))

    server.stop_server()
    begun_s = time.monotonic()
    try:
        evict()
        await actuating.poll()
        assert time.monotonic() - begun_s < 60
    finally:
        server.start_server()
    kinds = [event.kind for event in world.memory.events if event.kind.startswith("node_")]
    assert kinds == ["node_withheld", "node_moved", "node_not_drained"]
    assert [*world.loop.registry.withheld] == ["n2"]

    def has_read_its_roles() -> bool:  # a while after it calls itself ready; till then it refuses what they grant
        try:
            return bool(ours().states())
        except EngineError:
            return False

    until(has_read_its_roles, "the server knows the roles again")
    world.now_s += 1000.0
    evict()
    await actuating.poll()
    assert [event.kind for event in world.memory.events if event.kind.startswith("node_")][-1] != "node_not_drained"
    assert server.ask("GET", "/api/v1/nodes/n1")["spec"]["unschedulable"] is True


JOB = KubernetesJob(command=("train.py",), name="gpt", image="x", namespace="megascale-ops", queue="gpus", nodes=2)


@pytest.fixture
def hands(server: ApiServer) -> Iterator[Callable[[str], ClusterJobs]]:
    """What hands jobs in, by who has a token."""
    clients: list[Any] = []

    def make(token: str) -> ClusterJobs:
        clients.append(server.client(token))
        return ClusterJobs(clients[-1], 30.0)

    yield make
    for client in clients:
        client.rest_client.pool_manager.clear()


@pytest.fixture
def job_sets(server: ApiServer) -> Iterator[str]:
    """The kind JobSet, with any fields: its own definition is held against our objects in `test_kubernetes_job.py`."""
    whole = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1alpha2", "served": True, "storage": True, "schema": {"openAPIV3Schema": whole}}
    names = {"kind": "JobSet", "plural": "jobsets", "singular": "jobset"}
    spec = {"group": "jobset.x-k8s.io", "scope": "Namespaced", "names": names, "versions": [version]}
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    server.ask("POST", path, {"metadata": {"name": "jobsets.jobset.x-k8s.io"}, "spec": spec})

    def is_served() -> bool:
        found = server.ask("GET", f"{path}/jobsets.jobset.x-k8s.io").get("status", {}).get("conditions", [])
        return any(one["type"] == "Established" and one["status"] == "True" for one in found)

    until(is_served, "the kind to be served", 90.0)
    yield "/apis/jobset.x-k8s.io/v1alpha2/namespaces/megascale-ops/jobsets"
    server.ask("DELETE", f"{path}/jobsets.jobset.x-k8s.io")


Hands = Callable[[str], ClusterJobs]


def test_a_job_is_handed_in_once(server: ApiServer, hands: Hands, job_sets: str) -> None:
    """With its queue's label; one that is there, suspended by Kueue, is neither changed nor resumed."""
    ours = hands(ADMIN)
    for kind, path in (("Job", PLACES["Job"].format("megascale-ops")), ("JobSet", job_sets)):
        job = msgspec.structs.replace(JOB, kind=kind)

        said = ours.create(manifest(job))
        server.ask("PATCH", f"{path}/gpt", {"spec": {"suspend": True}}, "application/merge-patch+json")
        before = server.ask("GET", f"{path}/gpt")
        with pytest.raises(
            EngineError, match=f"there is a {kind} gpt in namespace megascale-ops already, which is left"
        ):
            ours.create(manifest(job))

        assert said == (
            f"{kind} gpt in namespace megascale-ops is created; Kueue starts it when its queue gpus has room: "
            f"`kubectl -n megascale-ops get {kind.lower()} gpt`"
        )
        assert server.ask("GET", f"{path}/gpt") == before
        assert before["metadata"]["labels"] == {QUEUE: "gpus"}
        assert "megascale-ops" in [one["manager"] for one in before["metadata"]["managedFields"]]


@pytest.mark.parametrize("way", ["eviction", "deletion"])
def test_a_pod_that_goes_has_the_grace_that_run_was_told(server: ApiServer, nodes: list[str], way: str) -> None:
    """Evicted by the API, or deleted as for a taint, a priority and Kueue's suspension: nothing of ours is in the way.

    What the kubelet then does is `test_engine_eviction.py`: SIGTERM, and SIGKILL when the grace is over.
    """
    made = manifest(msgspec.structs.replace(JOB, kind="Job", grace_s=300))
    spec = made["spec"]["template"]["spec"] | {"nodeName": nodes[0]}
    pods = "/api/v1/namespaces/megascale-ops/pods"
    server.ask("POST", pods, {"metadata": {"name": "gpt-0"}, "spec": spec})
    try:
        if way == "eviction":
            evicted = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": "gpt-0"}}
            server.ask("POST", f"{pods}/gpt-0/eviction", evicted)
        else:
            server.ask("DELETE", f"{pods}/gpt-0")
        found = server.ask("GET", f"{pods}/gpt-0")["metadata"]
    finally:
        server.ask("DELETE", f"{pods}/gpt-0?gracePeriodSeconds=0")

    assert found["deletionTimestamp"]
    assert found["deletionGracePeriodSeconds"] == 300
    assert "--eviction-grace=300" in spec["containers"][0]["command"]


@pytest.mark.parametrize(
    ("token", "changes", "words"),
    [
        (
            "controller",
            {"kind": "Job"},
            "its Role lacks the rule {apiGroups: [batch], resources: [jobs], verbs: [create]}",
        ),
        ("controller", {}, "{apiGroups: [jobset.x-k8s.io], resources: [jobsets], verbs: [create]}"),
        (ADMIN, {}, "the cluster knows no JobSet: JobSet's controller is not installed there"),
        (ADMIN, {"kind": "TrainJob"}, "the cluster knows no TrainJob: Trainer is not installed there"),
        (ADMIN, {"kind": "Job", "namespace": "none"}, 'namespaces "none" not found'),
        (ADMIN, {"kind": "Job", "name": "other", "priority_class": "A b"}, "spec.template.spec.priorityClassName"),
    ],
)
def test_what_is_not_taken_is_one_sentence(hands: Hands, token: str, changes: Json, words: str) -> None:
    """Which rule lacks, which kind or namespace is not there, which field is wrong."""
    with pytest.raises(EngineError) as raised:
        hands(token).create(manifest(msgspec.structs.replace(JOB, **changes)))

    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_commands_of_the_guide(server: ApiServer, nodes: list[str], role: list[Json], ours: Engine) -> None:
    """Those about nodes and the token, as they stand there; objects as if applied, the budget as 1.20 knows it."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl on this machine: apt-get install kubernetes-client")
    assert nodes
    assert role
    page = (MANIFESTS.parents[2] / "docs" / "how-to" / "kubernetes.md").read_text(encoding="utf-8")
    env = {**os.environ, "KUBECONFIG": str(server.kubeconfig())}

    def typed(begin: str) -> str:
        (command,) = [line for line in page.splitlines() if line.startswith(begin)]
        return shell(re.sub(r" NODE\b", " n1", command))

    def shell(command: str, said: str | None = None) -> str:
        done = subprocess.run(
            ["bash", "-c", command], env=env, input=said, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    ours().drain("n1", "killed twice")
    assert re.search(r"n1 +true +megascale-ops: killed twice", typed("kubectl get nodes"))
    typed("kubectl uncordon")
    assert not ours().states()["n1"].is_usable  # the taint is still there
    typed("kubectl taint")
    assert ours().states()["n1"].is_usable
    assert "secret/megascale-ops created" in typed("kubectl -n megascale-ops create secret")
    built = shell(f"kubectl kustomize {MANIFESTS}").replace("apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n")
    applied = shell("kubectl apply --dry-run=server -f -", built)
    assert len(re.findall(r" (created|unchanged|configured) \(server dry run\)$", applied, re.MULTILINE)) == 9


def test_rules_and_dashboards_are_what_operators_read() -> None:
    """One object for each file, whole: what stands in them is what the files say."""
    dashboards = MANIFESTS.parents[2] / "dashboards"
    made = documents(*sorted((MANIFESTS / "monitoring").glob("*-*.yaml")))

    rules = {one["metadata"]["name"]: one["spec"] for one in made if one["kind"] == "PrometheusRule"}
    pages = {name: text for one in made if one["kind"] == "ConfigMap" for name, text in one["data"].items()}

    for name in ("alerts", "recording"):
        assert rules[f"megascale-ops-{name}"] == yaml.safe_load((dashboards / "rules" / f"{name}.yml").read_text())
    assert pages == {path.name: path.read_text() for path in dashboards.glob("megascale-*.json")}
    assert all(len(json.dumps(one)) < 262_144 for one in made)  # `kubectl apply` keeps a copy in an annotation
