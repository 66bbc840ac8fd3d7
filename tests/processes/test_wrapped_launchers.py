# SPDX-License-Identifier: Apache-2.0
"""``run --wrap`` around launchers that give no RANK before Python starts: each rank is seen, named, and restarted."""

import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec

import pytest

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity
from tests.matrix import wide
from tests.processes.launch import SCRIPTS, Launch, acted_upon, free_port, until

pytestmark = pytest.mark.processes

SCRIPT = str(SCRIPTS / "wrapped.py")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, SCRIPT, "--launcher=mpi")

# Accelerate hands its ranks to torchrun or, with CPUs only, to mpirun; --cpu alone starts one process.
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--num_processes=2", "--num_machines=1")
ON_CPU = (SCRIPT, "--launcher=accelerate")


def accelerate(launch: Launch, launcher: str) -> tuple[str, ...]:
    """Return a command that starts two ranks on CPU by way of ``accelerate launch``."""
    settings = ("--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={free_port()}")
    if launcher == "debug-launcher":
        return python(launcher)
    if launcher == "torchrun":
        return *ACCELERATE, "--multi_gpu", *settings, *ON_CPU
    hosts = launch.tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n", encoding="utf-8")
    return *ACCELERATE, "--cpu", f"--mpirun_hostfile={hosts}", *settings, *ON_CPU


def training(launch: Launch) -> list[BoxIdentity]:
    """Return who both ranks are, by the black boxes they write; nothing before both have made steps."""
    found = []
    for path in (launch.box_root / "toy").glob("*.box"):
        with BoxReader(path) as box:
            if box.progress().step >= 5:
                found.append(box.identity())
    return sorted(found, key=lambda one: one.rank) if len(found) == 2 else []


def wrap(launch: Launch, *command: str, options: tuple[str, ...] = ()) -> None:
    """Run a launcher to its end, which is a good one."""
    run = launch.spawn("run", "--job=toy", "--wrap", *options, "--", *command, f"--port={free_port()}")
    assert launch.finish(run) == 0, launch.output()


def python(launcher: str, *options: str) -> tuple[str, ...]:
    """Return the command of a launcher inside the script."""
    return sys.executable, SCRIPT, f"--launcher={launcher}", *options


@pytest.mark.parametrize(
    ("launcher", "fault", "culprit"),
    wide(
        [
            ("spawn", "killed", 1),
            ("spawn", "frozen", 1),
            ("spawn", "exception", 1),
            ("lightning", "killed", 1),
            ("lightning", "frozen", 1),
            ("alone", "killed", 0),
            ("alone", "frozen", 0),
            ("mpi", "killed", 1),
            ("mpi", "frozen", 1),
        ],
        keep=[("mpi", "killed", 1)],
    ),
)
def test_a_rank_of_another_launcher_is_named(launch: Launch, launcher: str, fault: str, culprit: int) -> None:
    """Whoever started it: a rank that is killed, stopped or raises is named with its step; the whole starts again."""
    if launcher == "mpi" and not shutil.which("mpirun"):
        pytest.skip("needs Open MPI's mpirun (Debian: openmpi-bin), which make test installs")
    told = {"killed": "kill", "frozen": "stop", "exception": "raise"}[fault]

    command = MPIRUN if launcher == "mpi" else python(launcher)
    wrap(launch, *command, f"--fault={told}")

    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == (fault, (culprit,)), incident.verdict.reason
    assert incident.verdict.since_step >= 28
    assert incident.state == "recovered"
    assert "is done" in launch.output()
    launch.assert_nothing_left()


@pytest.mark.parametrize(
    ("launcher", "fault"),
    [
        # Accelerate hands its ranks to torchrun, which test_launches wraps, or to mpirun, or spawns them, as above.
        pytest.param("torchrun", "killed", marks=pytest.mark.matrix),
        pytest.param("torchrun", "frozen", marks=pytest.mark.matrix),
        pytest.param("mpirun", "killed", marks=pytest.mark.matrix),
        pytest.param("mpirun", "frozen", marks=pytest.mark.matrix),
        pytest.param("debug-launcher", "killed", marks=pytest.mark.matrix),
        pytest.param("debug-launcher", "frozen", marks=pytest.mark.matrix),
    ],
)
def test_ranks_of_accelerate_are_seen_and_named(launch: Launch, launcher: str, fault: str) -> None:
    """Whichever launcher accelerate hands its two ranks to: each has its number, and the one that is hurt is named."""
    if launcher == "mpirun" and not shutil.which("mpirun"):
        pytest.skip("needs Open MPI's mpirun (Debian: openmpi-bin), which make test installs")
    launch.env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "HF_HUB_OFFLINE": "1"}
    told = {"killed": "kill", "frozen": "stop"}[fault]

    run = launch.spawn("run", "--job=toy", "--wrap", "--", *accelerate(launch, launcher), f"--fault={told}")
    seen = until(lambda: training(launch), "two black boxes of ranks that train")
    assert launch.finish(run) == 0, launch.output()

    # torch's own spawn, which accelerate's debug_launcher uses, sets no place on the node for a rank.
    local_ranks = (-1, -1) if launcher == "debug-launcher" else (0, 1)
    assert [(one.rank, one.world_size) for one in seen] == [(0, 2), (1, 2)]
    assert tuple(one.local_rank for one in seen) == local_ranks
    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == (fault, (1,)), incident.verdict.reason
    assert incident.verdict.since_step >= 28
    assert incident.state == "recovered"
    assert launch.output().count("is done") == 2
    launch.assert_nothing_left()


FETCHED = pytest.param("fetched", marks=pytest.mark.matrix)


def have(launch: Launch, where: str, module: str, *packages: str) -> None:
    """Have a launcher that `make setup` leaves out: what is installed, or fetched for this test alone."""
    if where == "here":
        if not find_spec(module):
            pytest.skip(f"needs {module}, which is not installed; `make test-matrix` fetches it for the test")
        return
    folder = launch.tmp_path / module
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"--target={folder}"]
    done = subprocess.run([*command, *packages], capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        pytest.skip(f"{module} can't be fetched here: {done.stderr.strip()[-300:]}")
    launch.env["PYTHONPATH"] = str(folder)


@pytest.mark.timeout(2000)  # 900 s to fetch it, 900 s to run: its launcher imports torch twice before a rank does
@pytest.mark.parametrize("where", ["here", FETCHED])
def test_a_rank_of_deepspeed_is_named_and_what_it_cannot_have_is_said(launch: Launch, where: str) -> None:
    """Its own launcher, which kills the others when a rank has died; the line at the start names its own restarts."""
    have(launch, where, "deepspeed", "--no-deps", "deepspeed", "hjson", "ninja", "py-cpuinfo", "einops", "msgpack")
    launch.env["DS_ACCELERATOR"] = "cpu"
    command = sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2", f"--master_port={free_port()}"

    run = launch.spawn("run", "--job=toy", "--wrap", "--", *command, SCRIPT, "--launcher=deepspeed", "--fault=kill")
    assert launch.finish(run, 900) == 0, launch.output()

    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("killed", (1,)), incident.verdict.reason
    assert incident.state == "recovered"
    assert "deepspeed is restarted as a whole" in launch.output()
    assert "its own restarts (--elastic_training) are not seen" in launch.output()
    launch.assert_nothing_left()


@pytest.mark.timeout(2000)  # 900 s to fetch it, 900 s to run
@pytest.mark.parametrize("where", ["here", FETCHED])
def test_a_worker_of_ray_train_is_named(launch: Launch, where: str) -> None:
    """Workers of a cluster that the script starts are below this run; Ray Train starts no new ones, we do."""
    have(launch, where, "ray", "ray[train]")
    launch.env["RAY_USAGE_STATS_ENABLED"] = "0"

    # Its sockets' names have to be short. 15 minutes: it starts a dozen programs of its own, and everything twice here.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as launch.env["RAY_TMPDIR"]:
        run = launch.spawn("run", "--job=toy", "--wrap", "--", sys.executable, SCRIPT, "--launcher=ray", "--fault=kill")
        assert launch.finish(run, 900) == 0, launch.output()

    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("killed", (1,)), incident.verdict.reason
    assert incident.state == "recovered"
    assert "ray is restarted as a whole" in launch.output()
    assert all(f"rank {rank} of 2 is done" in launch.output() for rank in range(2)), launch.output()
    launch.assert_nothing_left()


def test_a_launcher_that_never_looks_at_its_ranks_is_ended(launch: Launch) -> None:
    """It joins rank 0, which waits for ever for rank 1, which was killed: that one is named, and all start again."""
    wrap(launch, *python("never-looks", "--fault=kill"), options=("--stop-grace=4",))

    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("killed", (1,)), incident.verdict.reason
    assert "its launcher has not reacted so far" in launch.output()
    launch.assert_nothing_left()


def test_two_worlds_below_one_launcher_do_not_accuse_each_other(launch: Launch) -> None:
    """The negative control: both have ranks 0 and 1; one of them is watched, the other is left alone, and both end."""
    wrap(launch, *python("two-worlds"))

    assert acted_upon(launch.incidents()) == []
    assert launch.output().count("is done") == 4
    assert "is watched on this node" in launch.output() or "is rank" in launch.output()
    launch.assert_nothing_left()
