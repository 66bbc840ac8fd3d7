# SPDX-License-Identifier: Apache-2.0
"""The deployment files say what the agent needs: settings that exist, rights and mounts that go together."""

import configparser
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from megascale_agents import config as configuration
from megascale_agents.config import AgentConfig
from megascale_agents.metrics.page import PARTS

import megascale_ops
from megascale_ops.blackbox.roots import SHARED
from megascale_ops.cli import agent as cli_agent
from megascale_ops.cli.config.configuration import load

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "agents" / "deploy"
UNIT = DEPLOY / "systemd" / "megascale-ops-agent@.service"
FOR_ALL = DEPLOY / "systemd" / "megascale-ops-agent@root.service.d" / "all_users.conf"
SETTINGS = DEPLOY / "systemd" / "agent.env"
SCRAPES = sorted((DEPLOY / "prometheus").glob("*.yml"))
Json = dict[str, Any]


def resource(file: str, kind: str) -> Json:
    """Return the resource of a kind in one of the files for Kubernetes."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / file).read_text(encoding="utf-8"))
    (found,) = [one for one in documents if one["kind"] == kind]
    return dict(found)


@pytest.fixture
def pod() -> Json:
    """What the DaemonSet runs on every node."""
    return dict(resource("agent.yaml", "DaemonSet")["spec"]["template"]["spec"])


def environment(path: Path) -> dict[str, str]:
    """Return the variables that a file of settings sets."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def agent_config(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> AgentConfig:
    """Return what an agent makes of its environment, unknown names refused."""
    for name, value in variables.items():
        if name.startswith("MEGASCALE_"):
            monkeypatch.setenv(name, value)
    config, _ = load("agent", {}, None)
    assert isinstance(config, AgentConfig)
    return config


def test_the_settings_of_systemd_are_settings_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is known, and together they are accepted: beyond loopback with a token."""
    config = agent_config(environment(SETTINGS), monkeypatch)

    configuration.check(config)
    address = configuration.metrics_address(config)
    assert address is not None
    assert not address.is_loopback
    assert config.token_file


def test_the_unit_runs_our_command_as_the_account_that_trains() -> None:
    """Root would make the black boxes' folder its own, and no rank could write into it."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign, assignment]  # systemd's names are not lower case
    unit.read(UNIT)
    service = unit["Service"]

    assert service["User"] == "%i"
    assert service["ExecStart"].endswith("/megascale-ops agent")
    assert service["Restart"] == "always"
    # What must stay open, or the agent sees nothing: the ranks' /proc, shared memory, run folders, kernel log, network.
    for closed in ("PrivateDevices", "ProtectProc", "PrivateTmp", "ProtectHome", "ProtectKernelLogs", "PrivateNetwork"):
        assert closed not in service
    assert service["AmbientCapabilities"] == service["CapabilityBoundingSet"] == "CAP_SYS_PTRACE CAP_SYSLOG"


def test_a_right_in_the_unit_has_its_reason() -> None:
    """Each capability that the unit grants is explained beside it; for all accounts it has those of the DaemonSet."""
    text = UNIT.read_text(encoding="utf-8") + FOR_ALL.read_text(encoding="utf-8")
    granted = " ".join(re.findall(r"^CapabilityBoundingSet=(.*)$", text, re.MULTILINE))
    reason = "\n".join(line for line in text.splitlines() if line.startswith("#"))

    for right in granted.split():
        assert re.search(rf"\b{right.removeprefix('CAP_')}(, SETGID)?: \w", reason) or right == "CAP_SETGID", right
    of_pod = resource("agent.yaml", "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert {f"CAP_{right}" for right in of_pod["capabilities"]["add"]} | {"CAP_SYSLOG"} == set(granted.split())


def test_the_daemon_set_gives_the_agent_settings_that_exist(pod: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for systemd; the node's name is Kubernetes' own."""
    (container,) = pod["containers"]
    given = {one["name"]: one.get("value", "node-7") for one in container["env"]}

    config = agent_config(given, monkeypatch)

    configuration.check(config)
    assert config.node == "node-7"
    assert next(one for one in container["env"] if one["name"].endswith("_NODE"))["valueFrom"] == {
        "fieldRef": {"fieldPath": "spec.nodeName"}
    }
    address = configuration.metrics_address(config)
    assert address is not None
    assert address.port == container["ports"][0]["containerPort"]


def test_the_daemon_set_mounts_what_the_agent_reads(pod: Json) -> None:
    """Black boxes, run folders, token; each volume is used and each mount has its volume."""
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}

    assert mounts.keys() == volumes.keys()
    assert mounts["boxes"]["mountPath"] == volumes["boxes"]["hostPath"]["path"] == str(SHARED)
    assert mounts["runs"]["mountPath"] == volumes["runs"]["hostPath"]["path"]
    token = next(one["value"] for one in container["env"] if one["name"] == "MEGASCALE_TOKEN_FILE")
    assert token.startswith(mounts["token"]["mountPath"])
    # The agent refuses a token that others can read.
    assert volumes["token"]["secret"]["defaultMode"] & 0o077 == 0
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_daemon_set_sees_the_host_and_takes_nothing_from_training(pod: Json) -> None:
    """Ranks' process ids and connections are the host's; a GPU that the agent asked for would be lost to training."""
    (container,) = pod["containers"]

    assert pod["hostPID"] is pod["hostNetwork"] is True
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert not any("gpu" in name for name in {**container["resources"]["limits"], **container["resources"]["requests"]})
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in container["env"]
    assert {"operator": "Exists"} in pod["tolerations"]


def test_the_daemon_set_has_five_of_roots_rights_and_a_reason_for_each(pod: Json) -> None:
    """It is not privileged, gains nothing by starting a program, and root's other 36 capabilities are dropped.

    `tests/processes/test_shared_memory.py` runs an agent with these five and no more.
    """
    (container,) = pod["containers"]
    rights = container["securityContext"]
    text = (DEPLOY / "kubernetes" / "agent.yaml").read_text(encoding="utf-8")
    reasons = dict(re.findall(r"^ +- ([A-Z_]+)  # (\S.*)$", text, re.MULTILINE))

    assert "privileged" not in rights
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
    assert rights["capabilities"]["drop"] == ["ALL"]
    assert rights["capabilities"]["add"] == [*reasons]
    assert {*reasons} == {"DAC_READ_SEARCH", "SETUID", "SETGID", "KILL", "SYS_PTRACE"}


def test_the_kernels_log_is_read_only_where_somebody_wants_it(pod: Json) -> None:
    """/dev/kmsg takes `privileged`: without it is off, and one patch turns it on and gives all that it needs."""
    (container,) = pod["containers"]
    patch = yaml.safe_load((DEPLOY / "kubernetes" / "patches" / "kernel_log.yaml").read_text(encoding="utf-8"))
    patched = patch["spec"]["template"]["spec"]
    (changed,) = patched["containers"]
    log = msgspec.structs.asdict(AgentConfig())["kernel_log"]

    logs = []
    for args in (container["args"], changed["args"]):
        options = cli_agent.agent.make_context("agent", [*args[1:]]).params
        options.pop("config_path")
        config, _ = load("agent", options, None)
        assert isinstance(config, AgentConfig)
        logs.append(config.kernel_log)

    assert logs == ["", log]
    assert changed["name"] == container["name"]
    assert changed["securityContext"] == {"privileged": True, "allowPrivilegeEscalation": True}
    assert [one["mountPath"] for one in changed["volumeMounts"]] == [log]
    assert [one["name"] for one in patched["volumes"]] == [one["name"] for one in changed["volumeMounts"]]
    assert not {one["name"] for one in patched["volumes"]} & {one["name"] for one in pod["volumes"]}


@pytest.mark.parametrize(("file", "kind"), [("agent.yaml", "DaemonSet"), ("controller.yaml", "Deployment")])
def test_pods_are_well_formed(file: str, kind: str) -> None:
    """Selector and labels agree, probes ask the open page, limits are set, the image is this version."""
    made = resource(file, kind)
    spec = made["spec"]
    (container,) = spec["template"]["spec"]["containers"]

    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert container["image"] == f"megascale-ops:{megascale_ops.__version__}"
    names = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] == "/healthz"
        assert container[probe]["httpGet"]["port"] in names
    assert {"limits", "requests"} <= container["resources"].keys()
    # An account only where the API server is asked.
    assert spec["template"]["spec"]["automountServiceAccountToken"] is ("--engine=kubernetes" in container["args"])
    assert ("serviceAccountName" in spec["template"]["spec"]) is ("--engine=kubernetes" in container["args"])


def test_there_is_one_controller_and_agents_find_it(pod: Json) -> None:
    """Two at once would give the same ranks different orders; its service's name and port are the agents' address."""
    deployment, service = resource("controller.yaml", "Deployment"), resource("controller.yaml", "Service")
    url = next(one["value"] for one in pod["containers"][0]["env"] if one["name"] == "MEGASCALE_CONTROLLER")

    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    assert url == f"http://{name}.{namespace}.svc:{service['spec']['ports'][0]['port']}"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_the_image_is_built_from_this_repository() -> None:
    """With a pinned base and our command; its own ignore file keeps virtual environments and caches out."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")

    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.1[1-3]\.\d+-slim-bookworm", bases[0])
    assert 'ENTRYPOINT ["megascale-ops"]' in text
    assert f"megascale-ops:{megascale_ops.__version__}" in text
    assert ".venv" in (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("path", SCRAPES, ids=lambda path: path.stem)
def test_scrape_examples_keep_our_job_label_and_show_the_token(path: Path) -> None:
    """Without `honor_labels` every query for a training job would find nothing; alerts know the scrape jobs by name."""
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["scrape_configs"]

    assert [job["job_name"] for job in jobs] == ["megascale-controller", "megascale-agents", "megascale-nodes"]
    for job in jobs:
        assert job["honor_labels"] is True
        assert job["authorization"]["credentials_file"]


@pytest.mark.parametrize("path", [*SCRAPES, ROOT / "dashboards" / "prometheus.yml"], ids=lambda path: path.stem)
def test_every_part_of_an_agent_is_scraped_once(path: Path) -> None:
    """Series of jobs, which have a budget, and those of nodes are two scrape jobs that find the same agents."""
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["scrape_configs"]
    found = {job["job_name"]: job for job in jobs}
    of_jobs, of_nodes = found["megascale-agents"], found["megascale-nodes"]

    assert tuple(part for job in (of_jobs, of_nodes) for part in job["params"]["part"]) == PARTS
    same = {"job_name": None, "params": None}
    assert of_jobs | same == of_nodes | same
    assert not any(
        "params" in job for name, job in found.items() if name not in {"megascale-agents", "megascale-nodes"}
    )


def test_prologs_and_epilogs_call_none_of_slurms_commands() -> None:
    """With thousands of nodes at once these calls are what brings slurmctld down; comments may name them."""
    called = re.compile(r"\b(scontrol|sinfo|squeue|sacct|sacctmgr|sbatch|srun|scancel)\b")
    scripts = sorted((DEPLOY / "slurm").glob("*.sh"))

    found = [
        f"{path.name}: {line}"
        for path in scripts
        for line in path.read_text(encoding="utf-8").splitlines()
        if called.search(line.partition("#")[0])
    ]

    assert len(scripts) == 3
    assert found == []
    assert called.search('reason=$(scontrol show node "$node")')
