# SPDX-License-Identifier: Apache-2.0
"""What torchrun promises of its launch line, kept by ``megascale-ops run`` in its place.

The promises are those of PyTorch's own launcher tests; the README of the runner has the table. What a line *means* is
told by `tests/unit/cli/test_run_options.py` and `tests/unit/runner/test_meeting.py`, where it costs no process.
"""

import json
import socket
import time
from pathlib import Path

import pytest

from tests.processes.launch import SCRIPTS, Launch, free_port
from tests.processes.warmed import Ahead

pytestmark = pytest.mark.processes

TOLD, SHELL, MEETS = SCRIPTS / "told.py", SCRIPTS / "told.sh", SCRIPTS / "meets.py"
# Its ranks need nothing but torch, which their runner has imported.
MEETING = Ahead(scripts=(str(MEETS),))
NAMES = (
    *("LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
    "OMP_NUM_THREADS",
)


def told(folder: Path) -> dict[int, dict[str, str]]:
    """Return each rank's environment."""
    return {int(path.stem): json.loads(path.read_text())["environ"] for path in folder.glob("*.json")}


def test_the_usual_line_runs_the_script_on_every_rank(launch: Launch) -> None:
    """c10d and its endpoint, spellings of both kinds: every rank is told all that torchrun tells, and of the parent."""
    launch.env.pop("OMP_NUM_THREADS")
    launch.env["SENTINEL_OF_THE_PARENT"] = "here"

    done = launch.command(
        *("run", "--nnodes=1", "--nproc_per_node=3", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400"),
        *("--rdzv-id=line", "--monitor-interval=0.1", "--start-method=spawn", "--role=trainer", "--max-restarts=3"),
        *(str(TOLD), str(launch.tmp_path), "--local=${local_rank}"),
    )

    assert done.returncode == 0, done.stderr
    assert "--rdzv-endpoint localhost:29400 (c10d) is not needed: one node meets nobody" in done.stderr
    environs = told(launch.tmp_path)
    assert set(environs) == {0, 1, 2}
    for rank, environ in environs.items():
        assert [name for name in NAMES if name not in environ] == []
        assert (environ["LOCAL_RANK"], environ["WORLD_SIZE"], environ["GROUP_RANK"]) == (str(rank), "3", "0")
        assert (environ["ROLE_NAME"], environ["ROLE_RANK"], environ["ROLE_WORLD_SIZE"]) == ("trainer", str(rank), "3")
        assert (environ["TORCHELASTIC_RUN_ID"], environ["OMP_NUM_THREADS"]) == ("line", "1")
        assert (environ["TORCHELASTIC_RESTART_COUNT"], environ["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "3")
        assert environ["SENTINEL_OF_THE_PARENT"] == "here"
        arguments = json.loads((launch.tmp_path / f"{rank}.json").read_text())["arguments"]
        assert arguments == [f"--local={rank}"]  # torchrun puts the local rank into arguments
    launch.assert_nothing_left()


def test_variables_of_torchruns_stand_for_its_options(launch: Launch) -> None:
    """PET_ variables launch a program that is no Python on as many ranks as they say; its lines get their prefix."""
    launch.env.update(PET_NNODES="1", PET_NPROC_PER_NODE="2", PET_RDZV_ID="pet", PET_NO_PYTHON="1")
    launch.env.update(PET_MONITOR_INTERVAL="0.1", PET_START_METHOD="spawn", PET_REDIRECTS="3", PET_TEE="3")
    launch.env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank${rank}]: "
    refused = launch.command("run", "-m", str(SHELL), str(launch.tmp_path))

    done = launch.command("run", str(SHELL), str(launch.tmp_path))

    assert refused.returncode == 2
    assert "--module can't be combined with --wrap or --no-python" in refused.stderr
    assert done.returncode == 0, done.stderr
    assert {path.name for path in launch.tmp_path.glob("[0-9]")} == {"0", "1"}
    for rank in range(2):
        assert f"[rank{rank}]: creating {launch.tmp_path}/{rank}" in done.stdout
    assert (launch.state / "megascale-ops" / "pet").is_dir()


def test_one_node_of_a_range_starts_alone(launch: Launch) -> None:
    """``--nnodes 1:2`` without a place to meet, one rank by default, on the port that the line names."""
    port = free_port()

    done = launch.command(
        *("run", "--nnodes=1:2", "--standalone", "--master-addr=localhost", f"--master-port={port}", "--node-rank=0"),
        *("--run-path", str(TOLD), str(launch.tmp_path)),
    )

    assert done.returncode == 0, done.stderr
    assert "--nnodes 1:2 starts with one node" in done.stderr
    (environ,) = told(launch.tmp_path).values()
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("localhost", str(port))


def test_a_port_that_is_taken_is_said(launch: Launch) -> None:
    """Rank 0 could not serve there: one sentence, before anything is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        done = launch.command("run", f"--master-port={port}", str(TOLD), str(launch.tmp_path))

    assert done.returncode == 2
    assert done.stderr.strip() == f"megascale-ops: --master-port {port} is taken on this machine: give another one"


def test_a_script_meets_at_the_port_that_it_names_itself(launch: Launch) -> None:
    """``init_method="tcp://localhost:PORT"`` with ``--master-port PORT`` meets, and meets again after a restart."""
    port, launch.ahead = free_port(), MEETING
    run = launch.spawn(
        *("run", "--job=toy", "--nproc-per-node=2", "--master-addr=localhost", f"--master-port={port}"),
        *(str(MEETS), f"tcp://localhost:{port}", "--fail"),
    )

    assert launch.finish(run) == 0, launch.output()
    for restarts in range(2):
        for rank in range(2):
            assert f"rank {rank} met 2 after {restarts} restarts, True" in launch.output()
    launch.assert_nothing_left()


def test_two_runners_of_one_line_meet_at_its_endpoint(launch: Launch) -> None:
    """The same c10d line twice on a machine: one brings the controller up, each is a node of its own, both end well."""
    line = (
        *("run", "--nnodes=1:2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=both", "--monitor-interval=1"),
        *(f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-conf='last_call_timeout=60,timeout=60'"),
        *(str(TOLD), str(launch.tmp_path)),
    )
    runs = [launch.spawn(*line, log=f"{name}.log") for name in "ab"]

    codes = [launch.finish(run) for run in runs]

    said = launch.output("a.log") + launch.output("b.log")
    assert codes == [0, 0], said
    environs = told(launch.tmp_path)
    assert {(rank, environ["WORLD_SIZE"]) for rank, environ in environs.items()} == {(rank, "4") for rank in range(4)}
    assert {environ["GROUP_RANK"] for environ in environs.values()} == {"0", "1"}
    launch.assert_nothing_left()


def test_nodes_of_a_static_line_meet_at_the_port_that_the_script_names_itself(launch: Launch) -> None:
    """Rank 0 is where the line says, whichever node comes first; the controller is beside it, and the port is rank 0's.

    The nodes share their run folder, and neither takes the other's output for that of an earlier life.
    """
    port, launch.ahead = free_port(), MEETING
    line = ("run", "--job=toy", "--nnodes=2", "--master-addr=localhost", f"--master-port={port}", "--node-rank")
    script = (str(MEETS), f"tcp://localhost:{port}")

    second = launch.spawn(*line, "1", "--node=b", *script, log="second.log")
    time.sleep(1.0)  # it is on its way before the controller is there
    first = launch.spawn(*line, "0", "--node=a", *script, log="first.log")
    codes = [launch.finish(run) for run in (first, second)]

    said = [launch.output("first.log"), launch.output("second.log")]
    assert codes == [0, 0], said
    for rank, told in enumerate(said):
        assert f"; rank 0 serves at localhost:{port}" in told
        assert f"rank {rank} met 2 after 0 restarts, True" in told
    logs = launch.run_dir() / "logs"
    assert {str(path.relative_to(logs)) for path in logs.glob("*/*/*/stdout.log")} == {
        "a/round-1/rank-0/stdout.log",
        "b/round-1/rank-1/stdout.log",
    }
    launch.assert_nothing_left()


def test_a_script_that_fails_makes_the_launch_fail(launch: Launch) -> None:
    """``--max-restarts=0``: one life, exit code 1, the script's own error on stderr and no traceback of ours."""
    done = launch.command(
        *("run", "--nnodes=1:1", "--nproc-per-node=2", "--max-restarts=0", "--rdzv-backend=c10d"),
        *("--rdzv-endpoint=localhost:0", str(TOLD), str(launch.tmp_path), "--fail"),
    )

    assert done.returncode == 1, done.stderr
    assert "RuntimeError: this rank was asked to fail" in done.stderr
    assert "megascale_ops/" not in done.stderr.replace(str(SCRIPTS), "")
    # On a busy machine the other rank is stopped before it has begun.
    lives = {environ["TORCHELASTIC_RESTART_COUNT"] for environ in told(launch.tmp_path).values()}
    assert lives == {"0"}
