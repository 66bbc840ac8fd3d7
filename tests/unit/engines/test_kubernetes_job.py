# SPDX-License-Identifier: Apache-2.0
"""A job's description becomes the object that its kind's published schema describes, and that the manifests hold."""

import copy
import importlib
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from megascale_ops.engines.kubernetes.job import PRIORITY, QUEUE, KubernetesJob, manifest
from megascale_ops.errors import UsageError
from tests.fakes.typed_commands import parse

Json = dict[str, Any]
DEPLOY = Path(__file__).parents[3] / "agents" / "deploy" / "kubernetes"
GPT = KubernetesJob(
    command=("train.py",), name="gpt", image="example.com/train:1", nodes=2, min_nodes=1, gpus_per_node=8
)
EVERYTHING = msgspec.structs.replace(
    GPT, spares=1, cpus="64", memory="512Gi", queue="gpus", priority="high", managed_by="kueue.x-k8s.io/multikueue",
    namespace="ml", node_selector=("pool=h200",), env=("A=b=c",), label=("team=x",), options=("--warm",),
)  # fmt: skip


def pods(made: Json) -> Json:
    """Return the template's pod of any kind."""
    spec = made["spec"]
    if made["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    if made["kind"] == "TrainJob":
        (patch,) = spec["runtimePatches"]
        spec = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    return dict(spec["template"]["spec"])


def command(made: Json) -> list[str]:
    """Return what each pod runs."""
    if made["kind"] == "TrainJob":
        return list(made["spec"]["trainer"]["command"])
    return list(pods(made)["containers"][0]["command"])


def of_trainer(made: Json) -> Json:
    """Return what the models that Trainer publishes leave of a JobSet or TrainJob: what they don't know is gone."""
    name, kind = {
        "JobSet": ("jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet"),
        "TrainJob": ("trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
    }[made["kind"]]
    reason = "Kubeflow's models are missing: pip install 'kubeflow-trainer-api>=2.3'"
    pytest.importorskip("kubeflow_trainer_api", reason=reason)
    model = getattr(importlib.import_module(f"kubeflow_trainer_api.models.{name}"), kind)
    return dict(model.from_dict(copy.deepcopy(made)).to_dict())


@pytest.mark.parametrize(("kind", "file"), [("Job", "job"), ("", "jobset")])
def test_what_is_handed_in_is_what_the_manifests_hold(kind: str, file: str) -> None:
    """Field by field: the file that is copied by hand and the verb make one object."""
    held = yaml.safe_load((DEPLOY / "training" / f"{file}.yaml").read_text(encoding="utf-8"))

    assert manifest(msgspec.structs.replace(GPT, kind=kind)) == held


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
@pytest.mark.parametrize("job", [GPT, EVERYTHING], ids=["little", "everything"])
def test_kinds_of_operators_are_as_their_schemas_say(kind: str, job: KubernetesJob) -> None:
    """By the models of the package kubeflow-trainer-api (Apache-2.0), made of both operators' OpenAPI descriptions."""
    made = manifest(msgspec.structs.replace(job, kind=kind))

    assert of_trainer(made) == made


def test_a_field_that_no_schema_has_would_be_seen() -> None:
    """The check above can fail: by a name, and by a wrong type."""
    made = manifest(EVERYTHING)
    made["spec"]["managdBy"] = "x"
    assert of_trainer(made) != made
    del made["spec"]["managdBy"]
    made["spec"]["replicatedJobs"][0]["replicas"] = "one"

    with pytest.raises(ValueError, match="replicas"):
        of_trainer(made)


@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainJob"])
def test_kueues_labels_and_another_controller_are_passed_on(kind: str) -> None:
    """The queue's label is on the object itself, where Kueue looks; nothing is said of `suspend`, which is Kueue's."""
    made = manifest(msgspec.structs.replace(EVERYTHING, kind=kind))

    assert made["metadata"]["labels"] == {"team": "x", QUEUE: "gpus", PRIORITY: "high"}
    assert made["spec"]["managedBy"] == "kueue.x-k8s.io/multikueue"
    assert "suspend" not in made["spec"]
    assert "labels" not in manifest(msgspec.structs.replace(GPT, kind=kind))["metadata"]


@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainJob"])
def test_the_command_is_one_that_run_takes(kind: str) -> None:
    """With spares beyond the nodes, the same grace as the pod's, and the job's name; nothing of torchrun's is left."""
    made = manifest(msgspec.structs.replace(EVERYTHING, kind=kind, grace_s=300))
    words = command(made)
    ours = words[words.index("megascale-ops") :]

    parse(shlex.join(ours))
    assert ours[:4] == ["megascale-ops", "run", "--job=gpt", "--nnodes=1:2"]
    assert ours[-4:] == ["--eviction-grace=300", "--warm", "--", "train.py"]
    assert pods(made)["terminationGracePeriodSeconds"] == 300
    assert (kind == "TrainJob") is ("PET_MASTER_ADDR" in words)
    whole = str(made)
    assert {"Job": "'completions': 3", "JobSet": "'parallelism': 3", "TrainJob": "'numNodes': 3"}[kind] in whole
    assert "{'name': 'A', 'value': 'b=c'}" in whole


def test_without_gpus_there_is_one_rank_and_nothing_is_asked_for() -> None:
    """A trial on nodes without any."""
    made = manifest(KubernetesJob(command=("My_Train.py",), image="x"))

    assert made["metadata"]["name"] == "my-train"
    assert "--nproc-per-node=1" in command(made)
    assert "--nnodes=1" in command(made)
    assert "resources" not in pods(made)["containers"][0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"command": ()}, "nothing to run"),
        ({"image": ""}, "no image"),
        ({"name": "GPT"}, "the name 'GPT' can't be"),
        ({"name": "a" * 43}, "42 at most"),
        ({"min_nodes": 3}, "min_nodes = 3 is more than nodes = 2"),
        ({"memory": "512GB"}, "memory = '512GB' is no quantity"),
        ({"cpus": "-1"}, "cpus = '-1' is no quantity"),
        ({"queue": "a b"}, "'a b' can't be the label kueue.x-k8s.io/queue-name"),
        ({"label": ("team",)}, "label 'team' can't be: KEY=VALUE is wanted"),
        ({"node_selector": ("a=b c",)}, "node_selector 'a=b c' can't be"),
        ({"env": ("1A=b",)}, "env '1A=b' can't be: NAME=VALUE is wanted"),
        ({"runtime": "torch"}, "runtime is TrainJob's"),
        ({"kind": "TrainJob", "priority_class": "high"}, "priority_class can't be set on a TrainJob"),
    ],
    ids=lambda one: "" if isinstance(one, str) else next(iter(one)),
)
def test_what_cannot_be_is_one_sentence(changes: Json, words: str) -> None:
    """Before anything is handed in."""
    with pytest.raises(UsageError) as raised:
        manifest(msgspec.structs.replace(GPT, **changes))

    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


# What the Prometheus Operator's definitions allow of that which we use, from monitoring.coreos.com_prometheusrules.yaml
# (0.82.2) and monitoring.coreos.com_servicemonitors.yaml (0.80.1) of prometheus-operator/prometheus-operator.
_DURATION = {
    "type": "string",
    "pattern": r"^(0|([0-9]+y)?([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?)$",
}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def _only(required: list[str] | None = None, **fields: Json) -> Json:
    return {"type": "object", "properties": fields, "additionalProperties": False, "required": required or []}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


_TEXT: Json = {"type": "string"}
_RULE = _only(
    ["expr"], alert=_TEXT, record=_TEXT, expr={"type": ["string", "integer"]}, keep_firing_for=_DURATION,
    labels=_TEXTS, annotations=_TEXTS, **{"for": _DURATION},
)  # fmt: skip
_RELABELING = _only(
    action=_TEXT, modulus={"type": "integer"}, regex=_TEXT, replacement=_TEXT, separator=_TEXT,
    sourceLabels=_list(_TEXT), targetLabel=_TEXT,
)  # fmt: skip
_KEY = _only(["key"], name=_TEXT, key=_TEXT, optional={"type": "boolean"})
_ENDPOINT = _only(
    port=_TEXT, path=_TEXT, interval=_DURATION, scrapeTimeout=_DURATION, honorLabels={"type": "boolean"},
    params={"type": "object", "additionalProperties": _list(_TEXT)}, relabelings=_list(_RELABELING),
    authorization=_only(type=_TEXT, credentials=_KEY), scheme={"enum": ["http", "https"]},
)  # fmt: skip
OPERATORS: dict[str, Json] = {
    "PrometheusRule": _only(
        groups=_list(_only(["name"], name={**_TEXT, "minLength": 1}, interval=_DURATION, rules=_list(_RULE)))
    ),
    "ServiceMonitor": _only(
        ["selector", "endpoints"], endpoints=_list(_ENDPOINT), selector=_only(matchLabels=_TEXTS), jobLabel=_TEXT
    ),
}


def _of_operators() -> list[Json]:
    files = sorted((DEPLOY / "monitoring").glob("[rs]*.yaml"))
    found = [one for path in files for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    return [one for one in found if one["kind"] in OPERATORS]


def test_rules_and_monitors_are_as_their_definitions_say() -> None:
    """Each field that we use is one of theirs, and of their type."""
    found = _of_operators()

    assert [one["kind"] for one in found] == ["PrometheusRule", "PrometheusRule", "ServiceMonitor", "ServiceMonitor"]
    for one in found:
        assert one["apiVersion"] == "monitoring.coreos.com/v1"
        jsonschema.validate(one["spec"], OPERATORS[one["kind"]])


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("PrometheusRule", lambda spec: spec["groups"][0].update(interval="30 s")),
        ("PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].pop("expr")),
        ("ServiceMonitor", lambda spec: spec["endpoints"][0].update(honor_labels=True)),
        ("ServiceMonitor", lambda spec: spec.pop("selector")),
    ],
)
def test_a_mistake_in_them_would_be_seen(kind: str, change: Any) -> None:  # noqa: ANN401  a function of the parameters
    """The check above can fail: a wrong duration, a field less, a name of Prometheus' own file."""
    spec = next(one["spec"] for one in _of_operators() if one["kind"] == kind)
    change(spec)

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spec, OPERATORS[kind])
