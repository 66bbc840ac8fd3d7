# SPDX-License-Identifier: Apache-2.0
"""A rank of a real run is killed; the run goes on from its checkpoint to the bit, and all that saves cost is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import urllib3
from prometheus_client.parser import text_string_to_metric_families

from megascale_ops.link import BlockingLink
from tests.processes.launch import SCRIPTS, Launch, until
from tests.processes.warmed import Ahead

pytestmark = pytest.mark.processes


def losses(folder: Path, name: str, rank: int) -> dict[int, str]:
    """What a rank has written: losses to the bit, by step."""
    found = json.loads((folder / f"{name}-{rank}.json").read_text(encoding="utf-8"))
    return {int(step): loss for step, loss in found.items()}


def page(url: str, token: str = "") -> str:
    """What is told Prometheus there."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return urllib3.request("GET", f"{url}/metrics", headers=headers, timeout=10.0, retries=False).data.decode()


def values(page: str) -> dict[str, float]:
    """The value of each of our metrics of checkpoints, by name."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("megascale_checkpoint_")
    }


def stages(text: str) -> dict[str, float]:
    """What the incidents of a job have cost, by stage: only those that took time."""
    return {
        sample.labels["stage"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "megascale_incident_seconds_total" and sample.value > 0.0
    }


def test_a_training_that_was_killed_goes_on_to_the_bit_and_its_saves_are_told(launch: Launch) -> None:
    """What the first round did after its last save the second does again: every loss is the same.

    So weights, moments, the schedule, each rank's place in its data and all generators are back; without the
    generators the losses are others. The ledger books stall and restart, and both pages of metrics tell of the saves.
    """
    script = SCRIPTS / "resumes.py"
    launch.ahead = Ahead(scripts=(str(script),))
    proc = launch.run(script=script)
    folder = launch.run_dir() / "checkpoints"
    written = [folder / f"control-2-{rank}.json" for rank in range(2)]
    until(lambda: all(path.exists() for path in written), f"the second round; so far:\n{launch.output()}")
    launch.until_more_steps(3)
    with launch.link() as link:
        told = until(lambda: told_by(link), "the agent to tell of a sealed checkpoint and of a save that failed")
    token = (launch.run_dir() / "controller.token").read_text().strip()
    wanted = {"restart", "reload", "recompute"}
    # Told when the incident is over: the controller hears a heartbeat later of the step at which it is.
    until(lambda: stages(page(link.url, token)).keys() >= wanted, "the controller to tell what the incident has cost")
    controller = page(link.url, token)
    launch.enough()
    assert launch.finish(proc) == 0, launch.output()
    until((launch.run_dir() / "history-toy.bin").exists, "the history to be written")
    report = launch.command("report", "toy", "--json")

    for rank in range(2):
        first, second = (losses(folder, f"losses-{number}", rank) for number in (1, 2))
        control = losses(folder, "control-2", rank)
        assert sorted(second) == list(range(17, 25))
        assert {step: second[step] for step in range(17, 21)} == {step: first[step] for step in range(17, 21)}
        assert len({*first.values(), *second.values()}) == len(first | second), "no step does what another one did"
        assert all(control[step] != second[step] for step in second)
    assert not list(folder.rglob("*.pickle"))

    ledger = json.loads(report.stdout)["ledger_s"]
    assert min(ledger[row] for row in ("checkpoint", "restart", "reload", "recompute")) > 0.0
    assert told["megascale_checkpoint_stall_seconds"] > 0.0
    assert told["megascale_checkpoint_write_seconds"] > 0.0
    assert told["megascale_checkpoint_saves_in_flight"] == 0.0
    assert told["megascale_checkpoint_sealed_timestamp_seconds"] > 0.0
    assert told["megascale_checkpoint_restores_total"] == 2.0  # of the training, and of its control
    assert told["megascale_checkpoint_restore_seconds"] > 0.0
    assert told["megascale_checkpoint_restore_read_bytes"] > 0.0
    assert told["megascale_checkpoint_passed_over_total"] == told["megascale_checkpoint_failed_restores_total"] == 0.0
    assert values(controller)["megascale_checkpoint_last_success_timestamp_seconds"] > 0.0
    launch.assert_nothing_left()


def told_by(link: BlockingLink) -> dict[str, Any] | None:
    """What the agent tells of checkpoints, once it tells of one that is sealed and of one that failed."""
    (group,) = link.targets()
    found = values(page(f"http://{group.targets[0]}"))
    is_all = found.get("megascale_checkpoint_failed_saves_total") == 1.0
    return found if is_all and "megascale_checkpoint_sealed_timestamp_seconds" in found else None
