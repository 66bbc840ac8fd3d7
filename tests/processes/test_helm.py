# SPDX-License-Identifier: Apache-2.0
"""The chart under the real Helm: it renders what the manifests hold, and a wrong value is one clear sentence."""

import copy
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import megascale_ops
from tests.fakes.helm import CHART, LOADER, helm, rendered
from tests.processes.slurm_scripts import tool

pytestmark = pytest.mark.processes

Json = dict[str, Any]
# What Helm puts on every object of a release.
OF_HELM = ("helm.sh/chart", "app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "app.kubernetes.io/version")
README_COMMANDS = (
    "helm lint deploy/kubernetes --values ops.yaml",
    "helm template megascale-ops deploy/kubernetes --namespace megascale-ops --values ops.yaml",
    "megascale-ops submit kubernetes job.toml --dry-run",
)
GUIDE = CHART.parents[2] / "docs" / "how-to" / "kubernetes.md"
KEPT = {"helm.sh/resource-policy": "keep"}
MONITORING: Json = {"monitoring": {part: {"enabled": True} for part in ("scrape", "rules", "dashboards")}}
GPT: Json = {"image": "example.com/train:1", "command": ["train.py"], "nodes": 2, "minNodes": 1}


def held(*places: str) -> list[Json]:
    """Return the objects of manifests, by file or by pattern."""
    files = [path for place in places for path in sorted(CHART.glob(place)) if path.name != "kustomization.yaml"]
    return [one for path in files for one in yaml.load_all(path.read_bytes(), Loader=LOADER) if one]


def named(objects: list[Json]) -> dict[tuple[str, str], Json]:
    """Return objects by kind and name, without what is Helm's: labels, and that it leaves one at an uninstall."""
    found = {}
    for one in copy.deepcopy(objects):
        labels = one["metadata"].pop("labels", {})
        if one["metadata"].get("annotations") == KEPT:
            del one["metadata"]["annotations"]
        own = {key: value for key, value in labels.items() if key not in OF_HELM}
        if own:
            one["metadata"]["labels"] = own
        found[one["kind"], one["metadata"]["name"]] = one
    return found


def test_helm_has_nothing_to_say_about_the_chart() -> None:
    """`helm lint --strict`, with all that can be switched on; its version is the program's."""
    values = yaml.safe_dump({**MONITORING, "jobs": {"gpt": GPT}, "agent": {"kernelLog": True}})

    done = helm("lint", "--strict", str(CHART), "--values", "-", said=values)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == chart["version"] == megascale_ops.__version__


def test_the_chart_renders_what_the_manifests_hold() -> None:
    """With no value set, object by object and field by field; what operators read too, where it is switched on."""
    plain = held("agent.yaml", "controller.yaml", "disruption.yaml", "network.yaml", "rbac.yaml")

    assert named(rendered()) == named(plain)
    assert named(rendered(MONITORING)) == named([*plain, *held("monitoring/*.yaml")])


@pytest.mark.parametrize(("kind", "file"), [("Job", "job"), ("JobSet", "jobset")])
def test_a_training_job_of_the_chart_is_that_of_the_manifests(kind: str, file: str) -> None:
    """Both kinds; the namespace is the release's, and a queue of Kueue's is a label of the object."""
    alone = {"controller": {"enabled": False}, "agent": {"enabled": False}}
    url = "http://megascale-ops-controller.megascale-ops.svc:7070"

    (made,) = rendered({**alone, "controllerUrl": url, "jobs": {"gpt": {**GPT, "kind": kind, "queue": "gpus"}}})

    assert made["metadata"].pop("namespace") == "megascale-ops"
    assert made["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name") == "gpus"
    assert named([made]) == named(held(f"training/{file}.yaml"))


def test_a_difference_would_be_seen() -> None:
    """The comparison above can fail: another port, another right, an object less."""
    plain = named(rendered())

    assert named(rendered({"agent": {"port": 7072}})) != plain
    assert named(rendered({"disruptionBudget": {"enabled": False}})).keys() < plain.keys()
    assert named(rendered({"agent": {"kernelLog": True}})) != plain


def test_the_kernels_log_is_what_the_patch_turns_on() -> None:
    """`agent.kernelLog` and patches/kernel_log.yaml are two ways to one container."""
    (patch,) = held("patches/kernel_log.yaml")
    wanted = patch["spec"]["template"]["spec"]
    (changed,) = wanted["containers"]

    pod = named(rendered({"agent": {"kernelLog": True}}))["DaemonSet", "megascale-ops-agent"]["spec"]["template"][
        "spec"
    ]

    (container,) = pod["containers"]
    assert container["args"] == changed["args"]
    assert changed["securityContext"].items() <= container["securityContext"].items()
    assert changed["volumeMounts"][0] in container["volumeMounts"]
    assert wanted["volumes"][0] in pod["volumes"]


def test_a_controller_that_touches_no_node_has_no_account() -> None:
    """`engine: none` leaves account, role and binding out; no pod gets an API token."""
    made = named(rendered({"controller": {"engine": "none"}}))

    assert not [kind for kind, _ in made if kind in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")]
    pod = made["Deployment", "megascale-ops-controller"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod


def test_an_uninstall_leaves_the_journal() -> None:
    """It and nothing else: what a job was restarted for, and which nodes are bad, outlives the release."""
    kept = [one["metadata"]["name"] for one in rendered() if one["metadata"].get("annotations") == KEPT]

    assert kept == ["megascale-ops-journal"]


def test_two_releases_share_no_name() -> None:
    """Every object carries its release's name, also those of the cluster; each finds its own controller."""
    values = {**MONITORING, "jobs": {}}
    one, other = (named(rendered(values, name=name)) for name in ("one", "other"))

    assert not {*one} & {*other}
    assert len(one) == len(other)
    for name, made in (("one", one), ("other", other)):
        agent = made["DaemonSet", f"{name}-agent"]["spec"]["template"]["spec"]["containers"][0]
        assert {"name": "MEGASCALE_CONTROLLER", "value": f"http://{name}-controller.{name}.svc:7070"} in agent["env"]


def test_what_is_set_reaches_the_objects(tmp_path: Path) -> None:
    """Image, token, journal, network and the rest; Kubernetes' schema takes all of it."""
    where = [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    values: Json = {
        "image": {"repository": "reg.example:5000/ops", "tag": "9", "pullPolicy": "Always", "pullSecrets": ["reg"]},
        "token": {"secret": "mine", "key": "word"},
        "controller": {
            "storeSecret": {"name": "db"}, "args": ["--journal-mb=64"], "priorityClass": "high",
            "nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}],
            "journal": {"existingClaim": "old"},
        },
        "agent": {"runtimeClass": "", "nodeSelector": {}, "port": 9000, "runs": "/data/runs"},
        "networkPolicy": {"from": where},
        "jobs": {"cpu": {**GPT, "kind": "Job", "gpusPerNode": 0, "priorityClass": "low", "tokenSecret": "job"}},
    }  # fmt: skip

    objects = rendered(values)

    made = named(objects)
    pod = made["Deployment", "megascale-ops-controller"]["spec"]["template"]["spec"]
    (controller,) = pod["containers"]
    assert controller["image"] == "reg.example:5000/ops:9"
    assert controller["args"][-1] == "--journal-mb=64"
    assert not [one for one in controller["args"] if one.startswith("--store")]
    assert controller["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "db", "key": "url"}
    assert {"name": "token", "secret": {"secretName": "mine", "defaultMode": 0o400,
                                        "items": [{"key": "word", "path": "token"}]}} in pod["volumes"]  # fmt: skip
    assert ("PersistentVolumeClaim", "megascale-ops-journal") not in made
    assert made["NetworkPolicy", "megascale-ops-controller"]["spec"]["ingress"][0]["from"] == where
    (train,) = made["Job", "cpu"]["spec"]["template"]["spec"]["containers"]
    assert "resources" not in train
    assert "--nproc-per-node=1" in train["command"]
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    done = tool(str(Path(sys.executable).with_name("kubernetes-validate")), "--strict", "-k", "1.37", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"imgae": {"tag": "1"}}, "additional properties 'imgae' not allowed"),
        ({"agent": {"port": 99999}}, "at '/agent/port': maximum: got 99,999, want 65,535"),
        ({"controller": {"engine": "slurm"}}, "at '/controller/engine': value must be one of 'kubernetes', 'none'"),
        ({"controller": {"journal": {"size": "10GB"}}}, "at '/controller/journal/size': '10GB' does not match"),
        ({"jobs": {"gpt": {**GPT, "nodes": "two"}}}, "at '/jobs/gpt/nodes': got string, want integer"),
        ({"jobs": {"GPT": GPT}}, "invalid propertyName 'GPT'"),
        ({"jobs": {"gpt": {"command": ["a.py"]}}}, "jobs.gpt.image is missing"),
        ({"jobs": {"gpt": {"image": "a"}}}, "jobs.gpt.command is missing"),
        ({"jobs": {"gpt": {**GPT, "minNodes": 3}}}, "jobs.gpt.minNodes is 3, more than its nodes (2)"),
        ({"controller": {"enabled": False}}, "so agents and jobs need controllerUrl"),
        ({"controller": {"store": "sqlite:///a", "storeSecret": {"name": "b"}}}, "exclude each other"),
    ],
    ids=lambda one: one.split()[0] if isinstance(one, str) else "",
)
def test_a_wrong_value_is_refused_and_named(values: Json, words: str) -> None:
    """By the schema or by the template: nothing is rendered that would be wrong."""
    done = helm("template", "megascale-ops", str(CHART), "--values", "-", said=yaml.safe_dump(values))

    assert done.returncode != 0
    assert not done.stdout
    assert words in done.stderr


def test_every_value_has_its_place_in_the_schema() -> None:
    """Defaults and schema name the same values, so that none is refused that exists, nor taken that does nothing."""
    schema = yaml.safe_load((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert {*schema["properties"]} == {*values, "global"}
    for name, part in schema["properties"].items():
        if "properties" in part:
            assert {*part["properties"]} == {*values[name]}, name
    assert {*schema["definitions"]["job"]["properties"]} == {*values["jobDefaults"]}
    texts = "".join(path.read_text(encoding="utf-8") for path in (CHART / "templates").iterdir())
    for name in values["jobDefaults"]:
        assert f".{name}" in texts, name


def test_the_commands_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its values and its job.toml, in a folder as it describes it; what asks a cluster is tried without one."""
    page = GUIDE.read_text(encoding="utf-8")
    for kind, name in (("yaml", "ops.yaml"), ("toml", "job.toml")):
        (block,) = re.findall(rf"^```{kind}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(block)
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "kubernetes").symlink_to(CHART)
    monkeypatch.chdir(tmp_path)

    asking = re.findall(r"^helm (?:install|upgrade) .*$", page, re.MULTILINE)
    for command in (*README_COMMANDS[:2], *asking):
        words = shlex.split(command)[1:]
        words[:1] = ["install"] if words[0] == "upgrade" else words[:1]  # which asks for the release that is there
        done = helm(*words, *(["--dry-run=client"] if command in asking else []))
        assert done.returncode == 0, done.stderr
    assert len(asking) == 2
    submitted = tool(str(Path(sys.executable).with_name("megascale-ops")), *shlex.split(README_COMMANDS[2])[1:])
    assert submitted.returncode == 0, submitted.stderr
    made = yaml.safe_load(submitted.stdout)
    assert (made["kind"], made["metadata"]["name"]) == ("JobSet", "train")
    assert made["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == 5
