# SPDX-License-Identifier: Apache-2.0
"""Rules, alerts and inhibitions, by the programs that run them: promtool, amtool, Prometheus, Alertmanager."""

import os
import re
import shutil
import signal
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from tests.fakes.alertmanager import RealAlertmanager, Webhook
from tests.fakes.asked_rules import written
from tests.fakes.exposition import Exposition
from tests.fakes.prometheus import RealPrometheus
from tests.fakes.servers import until
from tests.processes.launch import LOCKSTEP, Launch

pytestmark = pytest.mark.processes

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
RULES = DASHBOARDS / "rules"
CONFIGURATION = DASHBOARDS / "alertmanager" / "alertmanager.yml"
GUIDE = DASHBOARDS.parent / "docs" / "how-to" / "prometheus-and-grafana.md"
CONFIGS = [
    text for text in re.findall(r"^```yaml\n(.+?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if "scrape_configs:" in text
]  # fmt: skip


def tool(*command: str) -> str:
    """Run a program of Prometheus and return what it said; a test is skipped where it is missing.

    Raises:
        AssertionError: it found something wrong; the message is its own.
    """
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} on this machine: apt-get install prometheus prometheus-alertmanager")
    # A third of its CPU time goes into garbage, unless that is collected when there is five times as much as lives; a
    # tenth into threads that wait for each other: eight tests run on two cores.
    env = {**os.environ, "GOGC": "400", "GOMAXPROCS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300.0, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_rules_and_configuration_are_accepted() -> None:
    """``promtool check rules`` and ``amtool check-config`` find nothing wrong."""
    alerts = RULES / "alerts.yml"
    count = alerts.read_text(encoding="utf-8").count("- alert: ")
    assert f"SUCCESS: {count} rules found" in tool("promtool", "check", "rules", str(alerts))
    assert "SUCCESS" in tool("promtool", "check", "rules", str(RULES / "recording.yml"))
    assert "SUCCESS" in tool("amtool", "check-config", str(CONFIGURATION))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda text: text.splitlines()[0].strip("# "))
def test_configurations_of_the_guide_are_accepted(config: str, tmp_path: Path) -> None:
    """``promtool check config`` finds nothing wrong in what the guide shows for one Prometheus, shards, federation."""
    (tmp_path / "rules").symlink_to(RULES)
    path = tmp_path / "prometheus.yml"
    path.write_text(config, encoding="utf-8")
    assert "SUCCESS" in tool("promtool", "check", "config", "--syntax-only", str(path))


@pytest.mark.parametrize("promises", sorted((RULES / "tests").glob("*.yml")), ids=lambda path: path.stem)
def test_alerts_fire_when_they_should_and_only_then(promises: Path, tmp_path: Path) -> None:
    """``promtool test rules``: each alert fires with its words, stays silent nearby, and a healthy job fires none."""
    assert "SUCCESS" in tool("promtool", "test", "rules", *map(str, written(promises, tmp_path)))


@pytest.mark.parametrize(
    ("right", "wrong"), [("== 1", "== 2"), ("by (node, gpu)", "by (node)"), ("n't replace", " use")]
)
def test_an_alert_that_breaks_its_promise_is_seen(tmp_path: Path, right: str, wrong: str) -> None:
    """The control: one that never fires, has other labels or says something else fails its tests, and no other."""
    shutil.copytree(RULES, copy := tmp_path / "rules")
    text = (copy / "alerts.yml").read_text(encoding="utf-8")
    before, alert, after = text.partition("- alert: GpuRowRemapFailed")
    (copy / "alerts.yml").write_text(before + alert + after.replace(right, wrong, 1), encoding="utf-8")

    with pytest.raises(AssertionError) as failed:
        tool("promtool", "test", "rules", *map(str, written(copy / "tests" / "gpu.yml", tmp_path)))

    assert set(re.findall(r"alertname: (\w+)", str(failed.value))) == {"GpuRowRemapFailed"}


def fitted(webhook: Webhook) -> str:
    """Return the configuration as it is in the repository, with a test's receiver and less waiting."""
    text = CONFIGURATION.read_text(encoding="utf-8").replace("http://127.0.0.1:9099", webhook.url)
    return re.sub(r"(group_wait|group_interval): \w+", r"\1: 1s", text)


def test_what_is_told_and_to_whom(tmp_path: Path) -> None:
    """A hung job notifies the engineer on call; its straggler follows when it moves again; info is not sent."""
    still = {"alertname": "JobNoProgress", "severity": "critical", "job": "gpt"}
    late = {"alertname": "StragglerPersistent", "severity": "warning", "job": "gpt", "rank": "3"}
    elsewhere = {**late, "job": "bert"}
    xid = {"alertname": "GpuFatalXid", "severity": "critical", "node": "n3", "gpu": "5", "xid": "79"}
    hurt = {"alertname": "NodeUnhealthyInJob", "severity": "warning", "node": "n3", "check": "gpu"}
    other = {**hurt, "node": "n4"}
    note = {"alertname": "GpuRowRemapPending", "severity": "info", "node": "n5", "gpu": "0"}
    with Webhook() as webhook, RealAlertmanager(tmp_path, fitted(webhook)) as manager:
        manager.post(still, late, elsewhere, xid, hurt, other, note)
        webhook.wait_for("/pager", "JobNoProgress")
        webhook.wait_for("/pager", "GpuFatalXid")
        webhook.wait_for("/chat", "StragglerPersistent", job="bert")
        webhook.wait_for("/chat", "NodeUnhealthyInJob", node="n4")
        before = [*webhook.sent("/pager"), *webhook.sent("/chat")]

        manager.post(still, ends=datetime.now(UTC).isoformat())
        webhook.wait_for("/pager", "JobNoProgress", status="resolved")
        webhook.wait_for("/chat", "StragglerPersistent", job="gpt")

        after = [*webhook.sent("/pager"), *webhook.sent("/chat")]
    assert late not in before
    assert hurt not in after
    assert note not in after


def test_every_inhibition_holds_and_only_where_it_should(tmp_path: Path) -> None:
    """Each rule: with its source there, the target is held back where the labels are equal, and nowhere else."""
    rules = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))["inhibit_rules"]
    with Webhook() as webhook, RealAlertmanager(tmp_path, fitted(webhook)) as manager:
        # A rule without equal labels holds everywhere, so it comes last.
        for number, rule in sorted(enumerate(rules), key=lambda one: not one[1].get("equal")):
            source, targets = _names(rule["source_matchers"][0]), _names(rule["target_matchers"][0])
            equal = rule.get("equal", [])
            here = dict.fromkeys(equal, f"{number}-here") or {"node": f"{number}"}
            held = [{"alertname": name, "severity": "warning", **here} for name in targets]
            # Each on its own: targets of one rule may be sources of another.
            free = [{**one, equal[-1]: f"{number}-{one['alertname']}"} for one in held] if equal else []

            manager.post(*held, *free)
            before = manager.states()
            manager.post(*({"alertname": name, "severity": "critical", **here} for name in source))
            # Alertmanager takes an alert first and what it inhibits a moment later.
            targets_here = [frozenset(one.items()) for one in held]
            until(lambda of=targets_here: {manager.states()[one] for one in of} == {"suppressed"}, f"{rule} to hold")

            states = manager.states()
            assert "active" in {before[one] for one in targets_here}, rule
            assert "suppressed" not in {states[frozenset(one.items())] for one in free}, rule


def _names(matcher: str) -> list[str]:
    found = re.fullmatch(r'alertname=~?"([^"]+)"', matcher.strip())
    assert found
    return found[1].split("|")


def hurried(folder: Path, wait: str = "") -> list[Path]:
    """Copy the rules with an evaluation a second, and with another ``for`` where one is given."""
    made = []
    for name in ("recording.yml", "alerts.yml"):
        text = re.sub(r"(?m)^    interval: \w+$", "    interval: 1s", (RULES / name).read_text(encoding="utf-8"))
        text = re.sub(r"(?m)^        (keep_firing_)?for: \w+$", rf"        \1for: {wait}", text) if wait else text
        made.append(folder / name)
        made[-1].write_text(text, encoding="utf-8")
    return made


SOUND = """
megascale_rank_info{job="gpt",node="n3",rank="29",gpu_uuid="GPU-5"} 1
megascale_gpu_ecc_errors_total{node="n3",gpu="5",type="uncorrected"} 0
megascale_health_check_timeouts_total{node="n3",check="gpu"} 0
"""
BROKEN = (
    SOUND.replace("} 0", "} 3") + 'megascale_gpu_xid_age_seconds{node="n3",gpu="5",xid="79",action="restart_node"} 2\n'
)


def test_a_gpu_that_leaves_the_bus_wakes_somebody_once(tmp_path: Path) -> None:
    """From a page of metrics to the pager: the Xid is told with its job, what it drags along is held back."""
    told = {"text": SOUND}
    consequences = {"GpuEccUncorrectable", "HealthCheckTimingOut"}
    with (
        Webhook() as webhook,
        RealAlertmanager(tmp_path, fitted(webhook)) as manager,
        Exposition(lambda: told["text"]) as pages,
    ):
        scrapes = f"""
            - job_name: megascale-agents
              honor_labels: true
              static_configs: [{{targets: ["{pages.target}"]}}]
        """
        alerting = f'alerting: {{alertmanagers: [{{static_configs: [{{targets: ["{manager.address}"]}}]}}]}}'
        with RealPrometheus(tmp_path, scrapes, hurried(tmp_path), extra_yaml=alerting) as prometheus:
            prometheus.wait_for("job_node:megascale_rank_info:count")
            quiet = prometheus.query("ALERTS")

            told["text"] = BROKEN
            webhook.wait_for("/pager", "GpuFatalXid", node="n3", gpu="5")
            until(lambda: consequences <= {dict(one)["alertname"] for one in manager.states()}, "all are told")

            states = {dict(labels)["alertname"]: state for labels, state in manager.states().items()}
            told_also = webhook.sent("/chat")
    assert not quiet
    assert states == {"GpuFatalXid": "active", **dict.fromkeys(consequences, "suppressed")}
    assert not told_also
    said = webhook.annotations("GpuFatalXid")
    assert "gpt (ranks there: 1)" in said["description"]
    assert said["runbook_url"].endswith("runbooks/GpuFatalXid.md")


def test_a_real_run_is_understood(tmp_path: Path, launch: Launch) -> None:
    """A healthy run raises no alert; a rank that is stopped and left alone raises its class's while it lasts."""
    run = launch.run("--steps=100000", options=("--dry-run",), script=LOCKSTEP)
    launch.until_step(5)
    url = str((launch.controller() or {})["url"])
    token = tmp_path / "prometheus.token"
    issued = launch.command("token", "issue", "--right=read", f"--run-dir={launch.run_dir()}", f"--out={token}")
    assert issued.returncode == 0, issued.stderr
    scrapes = f"""
        - job_name: megascale-controller
          honor_labels: true
          authorization: {{credentials_file: {token}}}
          static_configs: [{{targets: ["{url.removeprefix("http://")}"]}}]
        - job_name: megascale-agents
          honor_labels: true
          http_sd_configs:
            - url: "{url}/v1/sd/agents"
              refresh_interval: 1s
              authorization: {{type: Bearer, credentials_file: {token}}}
    """
    with RealPrometheus(tmp_path, scrapes, hurried(tmp_path, wait="3s")) as prometheus:
        prometheus.wait_for('job:megascale_job_training:max{job="toy"} == 1')
        prometheus.wait_for('job_node:megascale_rank_info:count{job="toy"} == 2')
        prometheus.wait_for('job:megascale_rank_step_duration_seconds:spread_ratio{job="toy"}')
        sound = prometheus.query('ALERTS{alertname!="DiskAlmostFull"}')

        pid = launch.pid(1)
        os.kill(pid, signal.SIGSTOP)
        # Of verdicts: a busy machine has alerts of its own.
        told = prometheus.wait_for('ALERTS{alertstate="firing", job="toy", verdict!=""}')
        os.kill(pid, signal.SIGCONT)
        prometheus.wait_for('absent(ALERTS{job="toy", verdict!=""})')

        sick = [rule for group in prometheus.rules() for rule in group["rules"] if rule["health"] != "ok"]
    run.send_signal(signal.SIGTERM)
    launch.finish(run)
    assert not sound
    assert [(one["metric"]["alertname"], one["metric"]["verdict"]) for one in told] == [
        ("CollectiveHangSuspected", "frozen")
    ]
    assert not sick
