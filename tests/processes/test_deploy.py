# SPDX-License-Identifier: Apache-2.0
"""The deployment files under the tools that will read them, and Slurm's scripts run as Slurm would run them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megascale_ops.runner.services.attendance import find_agents
from megascale_ops.schema.tokens import new_token
from tests.fakes.prometheus import RealPrometheus
from tests.fakes.typed_commands import parse
from tests.processes.launch import PATIENCE_S, Launch, until
from tests.processes.nodes import Clusters, Controller
from tests.processes.slurm_scripts import DEPLOY, Slurm, is_gone, tool

pytestmark = pytest.mark.processes

PAGE = "docs/how-to/kubernetes.md"
COMPOSE = DEPLOY.parents[1] / "dashboards" / "compose.yml"
PROGRAMS = Path(sys.executable).parent
UNIT = DEPLOY / "systemd" / "megascale-ops-agent@.service"
Json = dict[str, Any]
WORD = new_token()
# 3.1 when written: a right that is added shall be seen. systemd calls up to 4 "OK".
MOST_EXPOSURE = 3.2
MOST_EXPOSURE_FOR_ALL = 4.0


@pytest.fixture
def controller(clusters: Clusters, launch: Launch) -> Controller:
    """A controller that wants a token."""
    cluster = clusters()
    token = launch.tmp_path / "token"
    token.write_text(WORD)
    token.chmod(0o600)
    cluster.controller.token_file = token
    cluster.controller.start()
    return cluster.controller


def settings_for(controller: Controller) -> str:
    """Return what an administrator writes into agent.env."""
    program = PROGRAMS / "megascale-ops"
    return (
        f"MEGASCALE_CONTROLLER={controller.url}\nMEGASCALE_TOKEN_FILE={controller.token_file}\n"
        f"MEGASCALE_OPS_PROGRAM={program}\nMEGASCALE_AGENT_METRICS_LISTEN=127.0.0.1:0\nMEGASCALE_AGENT_NODE=n1\n"
    )


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """`systemd-analyze verify` has nothing to say, and the unit is as closed as it was when written."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine: apt-get install systemd")
    program = shutil.which("true")
    unit = tmp_path / "megascale-ops-agent@train.service"
    unit.write_text(UNIT.read_text().replace("/opt/megascale-ops/bin/megascale-ops", str(program)))

    verified = tool("systemd-analyze", "verify", str(unit))
    security = tool("systemd-analyze", "security", "--offline=true", "--no-pager", str(unit))

    assert verified.returncode == 0
    assert not verified.stdout + verified.stderr
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", security.stdout)
    assert exposure, security.stdout + security.stderr
    assert float(exposure[1]) <= MOST_EXPOSURE


def test_systemd_takes_the_unit_for_all_accounts(tmp_path: Path) -> None:
    """With its drop-in it has the rights of both files, and of root's no others."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine: apt-get install systemd")
    unit = tmp_path / "megascale-ops-agent@root.service"
    unit.write_text(UNIT.read_text().replace("/opt/megascale-ops/bin/megascale-ops", str(shutil.which("true"))))
    shutil.copytree(UNIT.parent / f"{unit.name}.d", tmp_path / f"{unit.name}.d")

    verified = tool("systemd-analyze", "verify", str(unit))
    security = tool("systemd-analyze", "security", "--offline=true", "--no-pager", str(unit))

    assert not verified.stdout + verified.stderr
    granted = re.findall(r"^✗ .*CapabilityBoundingSet=~(\S+)", security.stdout, re.MULTILINE)
    assert sorted(granted) == [
        *("CAP_(DAC_*|FOWNER|IPC_OWNER)", "CAP_KILL", "CAP_SET(UID|GID|PCAP)", "CAP_SYSLOG", "CAP_SYS_PTRACE")
    ], security.stdout
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", security.stdout)
    assert exposure
    assert float(exposure[1]) <= MOST_EXPOSURE_FOR_ALL


def test_systemd_would_say_what_is_wrong_with_a_unit(tmp_path: Path) -> None:
    """The check above can fail."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine: apt-get install systemd")
    unit = tmp_path / "megascale-ops-agent@train.service"
    unit.write_text(UNIT.read_text().replace("RestrictRealtime=", "RestrictRealTime="))

    done = tool("systemd-analyze", "verify", str(unit))

    assert "RestrictRealTime" in done.stderr


def test_promtool_takes_every_scrape_example(tmp_path: Path) -> None:
    """Each is a whole configuration of its own. Debian builds Prometheus without Kubernetes: that key is left out."""
    if shutil.which("promtool") is None:
        pytest.skip("no promtool on this machine: apt-get install prometheus")
    token = tmp_path / "token"
    token.write_text(WORD)
    for path in sorted((DEPLOY / "prometheus").glob("*.yml")):
        copy = tmp_path / path.name
        config = yaml.safe_load(path.read_text().replace("/etc/megascale-ops/token", str(token)))
        for job in config["scrape_configs"]:
            job.pop("kubernetes_sd_configs", None)
        copy.write_text(yaml.safe_dump(config))

        done = tool("promtool", "check", "config", str(copy))

        assert done.returncode == 0, done.stdout + done.stderr


def manifests(folder: Path) -> list[Path]:
    """Return the files of a folder that kubectl applies: not its list for kustomize, nor what is Helm's."""
    others = ("kustomization.yaml", "Chart.yaml", "values.yaml")
    return [path for path in sorted(folder.glob("*.yaml")) if path.name not in others]


@pytest.mark.parametrize("version", ["1.25", "1.31", "1.37"])  # what long-lived clusters run, and the newest
def test_kubernetes_takes_the_manifests(version: str) -> None:
    """Every resource is as the schema says that Kubernetes publishes with a version, and has nothing besides."""
    files = manifests(DEPLOY / "kubernetes")

    done = tool(str(PROGRAMS / "kubernetes-validate"), "--strict", "-k", version, *map(str, files))

    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"passed for resource (\w+)/", done.stdout + done.stderr)
    assert sorted(said) == [
        "clusterrole", "clusterrolebinding", "daemonset", "deployment", "networkpolicy", "persistentvolumeclaim",
        "poddisruptionbudget", "service", "serviceaccount",
    ]  # fmt: skip


@pytest.mark.parametrize("version", ["1.25", "1.37"])
@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_kubernetes_takes_the_training_jobs(version: str, kind: str, tmp_path: Path) -> None:
    """Each is a Job, a JobSet by its template; its command has options that exist, its controller is ours."""
    made = yaml.safe_load((DEPLOY / "kubernetes" / "training" / f"{kind}.yaml").read_text())
    if kind == "jobset":
        (node,) = made["spec"]["replicatedJobs"]
        made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "gpt"}, **node["template"]}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(made))

    done = tool(str(PROGRAMS / "kubernetes-validate"), "--strict", "-k", version, str(path))

    (container,) = made["spec"]["template"]["spec"]["containers"]
    controller = next(one["value"] for one in container["env"] if one["name"] == "MEGASCALE_CONTROLLER")
    assert "passed for resource job" in done.stdout + done.stderr
    parse(shlex.join(container["command"]))
    assert shlex.join(container["command"]).replace("'", "") in (DEPLOY.parents[1] / PAGE).read_text()
    assert controller in (DEPLOY / "kubernetes" / "agent.yaml").read_text()


@pytest.mark.parametrize("folder", [".", "monitoring"])
def test_kustomize_builds_all_that_its_folder_has(folder: str) -> None:
    """Each file beside the list is in it; what comes out is what the files hold."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl on this machine: apt-get install kubernetes-client")
    where = DEPLOY / "kubernetes" / folder
    files = manifests(where)

    done = tool("kubectl", "kustomize", str(where))

    assert done.returncode == 0, done.stderr
    held = [one for path in files for one in yaml.safe_load_all(path.read_text())]

    def by_name(objects: list[Json]) -> dict[tuple[str, str], Json]:
        return {(one["kind"], one["metadata"]["name"]): one for one in objects}

    assert by_name([*yaml.safe_load_all(done.stdout)]) == by_name(held)


def test_kubernetes_takes_the_daemon_set_with_its_patch(tmp_path: Path) -> None:
    """As `kubectl patch` merges it: lists by the name of what is in them."""
    folder = DEPLOY / "kubernetes"
    whole = yaml.safe_load((folder / "agent.yaml").read_text())
    patch = yaml.safe_load((folder / "patches" / "kernel_log.yaml").read_text())
    path = tmp_path / "patched.yaml"
    path.write_text(yaml.safe_dump(merged(whole, patch)))

    done = tool(str(PROGRAMS / "kubernetes-validate"), "--strict", "-k", "1.37", str(path))

    assert "passed for resource daemonset" in done.stdout + done.stderr
    pod = yaml.safe_load(path.read_text())["spec"]["template"]["spec"]
    assert pod["containers"][0]["securityContext"]["privileged"] is True
    assert "/dev/kmsg" in str(pod["volumes"])


def merged(whole: Json, patch: Json) -> Json:
    """Return what a strategic merge patch makes of a resource."""
    found = dict(whole)
    for name, part in patch.items():
        before = whole.get(name)
        if isinstance(before, dict):
            found[name] = merged(before, part)
        elif isinstance(before, list) and isinstance(part[0], dict):
            named = {one["name"]: one for one in before}
            found[name] = [*(named | {one["name"]: merged(named.get(one["name"], {}), one) for one in part}).values()]
        else:
            found[name] = part
    return found


@pytest.mark.parametrize(
    ("right", "wrong"), [("hostPID:", "hostPid:"), ("periodSeconds: 2", "periodSeconds: soon"), ("apps/v1", "apps/v2")]
)
def test_kubernetes_would_not_take_a_mistake(tmp_path: Path, right: str, wrong: str) -> None:
    """The check above can fail: a name of ours, a wrong kind of value, a version that does not exist."""
    path = tmp_path / "agent.yaml"
    path.write_text((DEPLOY / "kubernetes" / "agent.yaml").read_text().replace(right, wrong, 1))

    done = tool(str(PROGRAMS / "kubernetes-validate"), "--strict", "-k", "1.37", str(path))

    assert "passed for" not in done.stdout + done.stderr


def test_the_specification_of_compose_takes_our_file(tmp_path: Path) -> None:
    """By the schema that Compose publishes; a word that is not in it is refused."""
    check = (str(PROGRAMS / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec")
    mistaken = tmp_path / "compose.yml"
    mistaken.write_text(COMPOSE.read_text().replace("depends_on:", "depend_on:", 1))

    done, refused = tool(*check, str(COMPOSE)), tool(*check, str(mistaken))

    assert done.returncode == 0, done.stdout + done.stderr
    assert refused.returncode == 1
    assert "depend_on" in refused.stdout + refused.stderr


@pytest.mark.parametrize("name", ["prolog", "epilog", "task_prolog"])
def test_shell_takes_slurms_scripts(name: str) -> None:
    """They parse, they are executable, and shellcheck, where there is one, has nothing to say."""
    path = DEPLOY / "slurm" / f"{name}.sh"

    assert path.stat().st_mode & 0o111
    assert tool("bash", "-n", str(path)).returncode == 0
    if shutil.which("shellcheck") is not None:
        checked = tool("shellcheck", str(path))
        assert checked.returncode == 0, checked.stdout


def test_slurm_starts_an_agent_for_a_job_and_ends_it(controller: Controller, launch: Launch) -> None:
    """The controller hears it, `run` in the job finds it, and after the epilog nothing is left."""
    slurm = Slurm(launch, settings_for(controller))

    slurm.script("prolog")  # one that waited for the agent would never end
    try:
        until(lambda: find_agents(slurm.box_root, "n1"), f"the agent to be there: {slurm.log()}")
        (agent,) = find_agents(slurm.box_root, "n1")
        told = slurm.script("task_prolog").stdout.splitlines()

        assert agent.controller == controller.url
        assert agent.pid == slurm.pid()
        assert told == [
            f"export MEGASCALE_CONTROLLER={controller.url}",
            f"export MEGASCALE_BOX_ROOT={slurm.box_root}",
            f"export MEGASCALE_TOKEN_FILE={slurm.folder / 'token'}",
        ]
        assert (slurm.folder / "token").stat().st_mode & 0o777 == 0o600
        until(lambda: "reports to" in slurm.log(), "the agent to report")
    finally:
        pid = slurm.pid()
        ended = slurm.script("epilog")

    assert is_gone(pid)
    assert not ended.stderr
    assert not slurm.folder.exists()
    assert not slurm.box_root.exists()


def test_the_epilog_ends_only_what_the_prolog_has_started(controller: Controller, launch: Launch) -> None:
    """A process that got the agent's pid later lives on; another job of this user keeps the black boxes."""
    slurm = Slurm(launch, settings_for(controller))
    slurm.pretend_job()
    slurm.box_root.mkdir()
    slurm.pretend_job("18")
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        (slurm.folder / "agent.pid").write_text(f"{bystander.pid} 1\n")

        said = slurm.script("epilog").stderr

        assert bystander.poll() is None
        assert "the agent had ended before the job" in said
        assert slurm.box_root.exists()
    finally:
        bystander.kill()
        bystander.wait(PATIENCE_S)
        slurm.box_root.rmdir()


def test_an_agent_that_does_not_listen_is_killed(launch: Launch) -> None:
    """The node is the next job's: 5 s are enough for a goodbye."""
    stubborn = launch.tmp_path / "stubborn"
    stubborn.write_text("#!/bin/bash\ntrap '' TERM\nwhile true; do sleep 0.1; done\n")
    stubborn.chmod(0o755)
    slurm = Slurm(launch, f"MEGASCALE_OPS_PROGRAM={stubborn}\n")
    slurm.script("prolog")
    pid = slurm.pid()
    # A shell that has not come to its trap yet would listen.
    until(lambda: int(re.findall(r"SigIgn:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())[0], 16) >> 14 & 1, "trap")

    said = slurm.script("epilog").stderr

    assert "is killed" in said
    until(lambda: is_gone(pid), "it to be gone")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (None, "can't be read"),
        ("MEGASCALE_TOKEN_FILE=/no/such/token\n", "the token /no/such/token can't be read"),
        ("MEGASCALE_OPS_PROGRAM=/no/such/program\n", ""),
    ],
)
def test_a_prolog_never_costs_a_node(launch: Launch, settings: str | None, words: str) -> None:
    """Whatever is missing, it ends with 0, says what, and the epilog tidies up."""
    slurm = Slurm(launch, settings or "")
    if settings is None:
        Path(slurm.env["MEGASCALE_OPS_SETTINGS"]).unlink()

    said = slurm.script("prolog").stderr
    slurm.script("task_prolog")
    after = slurm.script("epilog").stderr

    assert words in said
    assert settings is None or not slurm.folder.exists()
    if "PROGRAM" in (settings or ""):
        assert "the agent had ended before the job" in after
        assert "/no/such/program" in after


def test_the_agent_runs_as_the_jobs_user(launch: Launch) -> None:
    """Never as root: it gives the token and the log to the user too, and takes all rights from the agent."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become somebody else, by setpriv")
    nobody = 65534
    # Below a folder of mode 0755 all the way: /tmp/pytest-of-root is root's alone.
    place = launch.box_root
    place.mkdir(mode=0o755)
    told = Path(f"{place}/told")
    told.touch()
    told.chmod(0o666)
    program = place / "program"
    program.write_text(
        f'#!/bin/bash\n{{ id -u; cat "$MEGASCALE_TOKEN_FILE"; grep CapEff /proc/$$/status; }} >{told}\nsleep 60\n'
    )
    program.chmod(0o755)
    token = launch.tmp_path / "token"
    token.write_text(f"{WORD}\n")
    slurm = Slurm(launch, f"MEGASCALE_OPS_PROGRAM={program}\nMEGASCALE_TOKEN_FILE={token}\n", uid=nobody)
    slurm.move(place)
    try:
        slurm.script("prolog")
        until(lambda: "CapEff" in told.read_text(), f"the program to tell: {slurm.log()}")
        pid = slurm.pid()

        assert told.read_text().split("\n")[:2] == [str(nobody), WORD]
        assert told.read_text().split()[-1] == "0" * 16
        assert (slurm.folder / "token").stat().st_uid == nobody
        assert {path.name: path.stat().st_uid for path in slurm.folder.iterdir()} | {"token": 0} == dict.fromkeys(
            ("uid", "token", "agent.pid", "agent.log"), 0
        )
        slurm.script("epilog")
        assert is_gone(pid)
        assert not slurm.folder.exists()
    finally:
        shutil.rmtree(place)


def test_prometheus_finds_agents_through_the_controller(controller: Controller, launch: Launch) -> None:
    """The example for a Prometheus that one has, with addresses and token put in: all is scraped, and once."""
    slurm = Slurm(launch, settings_for(controller))
    slurm.script("prolog")
    example = (DEPLOY / "prometheus" / "from_controller.yml").read_text()
    example = example.replace("controller.example.com:7070", f"{controller.host}:{controller.port}")
    example = example.replace("/etc/megascale-ops/token", str(controller.token_file)).replace("30s", "1s")
    scrapes = yaml.safe_dump(yaml.safe_load(example)["scrape_configs"])
    try:
        until(lambda: find_agents(slurm.box_root, "n1"), "the agent to be there")
        with RealPrometheus(launch.tmp_path, scrapes) as prometheus:
            prometheus.wait_for_target("megascale-controller")
            found = prometheus.wait_for('megascale_host_load_1m{node="n1"}')

            prometheus.wait_for_target("megascale-agents")

            assert [(one["metric"]["node"], one["metric"]["job"]) for one in found] == [("n1", "megascale-nodes")]
            assert not prometheus.query('{__name__=~"megascale_.*", job="megascale-agents"}')
            assert prometheus.wait_for("megascale_controller_nodes == 1")
            assert not prometheus.query('{__name__=~"megascale_.*", exported_job!=""}')
    finally:
        slurm.script("epilog")
