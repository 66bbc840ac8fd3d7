# SPDX-License-Identifier: Apache-2.0
"""What Slurm's commands print becomes values and sentences. The texts are those of Slurm 22.05.8."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.engines.actuator import PREFIX, EngineNode, find, reason_of
from megascale_ops.engines.slurm.answers import read_job, read_nodes, read_settings, refusal

NODES = """n1|idle|Unknown|none
n2|drained|root|admin: fan | broken
n3|draining|slurm|megascale-ops: killed
n3|draining|slurm|megascale-ops: killed
n4|mixed*|Unknown|none
n5|down*|slurm|Not responding
n6|mixed|Unknown|none
n7|maint|root|window
n8|allocated@|root|megascale-ops: x
n9|mixed$|Unknown|none
nonsense
"""
JOB = (
    "JobId=3 JobName=a UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 "
    "TimeLimit=00:05:00 StartTime=2026-11-26T13:46:51 EndTime=2026-11-26T13:51:51 PreemptTime=None "
    "Comment=x Requeue=0 JobState=FAILED"
)


def test_nodes_are_read() -> None:
    """One of several partitions is one node; a reason may hold anything; what can't be read is passed over."""
    found = read_nodes(NODES)

    assert sorted(found) == [f"n{number}" for number in range(1, 10)]
    assert [name for name, one in found.items() if one.is_usable] == ["n1", "n4", "n6", "n9"]
    assert found["n2"] == EngineNode("n2", "drained", is_usable=False, reason="admin: fan | broken", by="root")
    assert [name for name, one in found.items() if one.is_ours] == ["n3", "n8"]


@given(st.text())
def test_whatever_is_printed_is_no_traceback(text: str) -> None:
    """Another version of Slurm may print anything."""
    read_nodes(text)
    read_job(text)
    read_settings(text)
    assert refusal("sinfo", text, 1)


def test_a_node_is_found_by_its_host_name() -> None:
    """Ours may have a domain, Slurm's has none."""
    states = read_nodes(NODES)

    assert find(states, "n2.cluster.example") == states["n2"]
    assert find(states, "n22") is None


def test_a_job_is_read() -> None:
    """A comment of the user's that looks like a field changes nothing."""
    job = read_job(JOB)

    assert (job.state, job.may_requeue, job.restarts, job.preempted_wall_s) == ("RUNNING", True, 2, 0.0)
    assert job.ends_wall_s > 1.7e9


def test_settings_are_read() -> None:
    """Codes may be ranges; where nothing is told Slurm's default holds."""
    told = "KillWait                = 45 sec\nRequeueExit             = 75,100-102\n"

    assert read_settings(told) == (45.0, (75, 100, 101, 102))
    assert read_settings("RequeueExit = (null)\n") == (30.0, ())


@pytest.mark.parametrize(
    ("stderr", "sentence"),
    [
        (
            "sbatch: error: x: nope\nsbatch: error: Batch job submission failed: Invalid partition name specified\n",
            "sbatch: Invalid partition name specified; `sinfo --summarize` lists the partitions",
        ),
        ("slurm_update error: Invalid user id\n", "sbatch: Invalid user id; it takes Slurm's level Operator"),
        (
            "scontrol: error: RebootProgram isn't defined\nscontrol_reboot_nodes error: Unspecified error\n",
            "sbatch: RebootProgram isn't defined; slurm.conf has to name a RebootProgram",
        ),
        ("", "sbatch: exit code 1"),
    ],
)
def test_a_refusal_is_one_sentence(stderr: str, sentence: str) -> None:
    """Slurm's own words, and what to do about them."""
    assert refusal("sbatch", stderr, 1).startswith(sentence)
    assert "\n" not in refusal("sbatch", stderr, 1)


def test_a_reason_is_one_short_line() -> None:
    """Whatever a verdict says."""
    assert reason_of("a\nb") == f"{PREFIX}a b"
    assert len(reason_of("x" * 1000)) == len(PREFIX) + 200
