# SPDX-License-Identifier: Apache-2.0
"""Other ways to launch: plain torchrun, a wrapped launcher, a module, no torch at all, two nodes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.launch import LOCKSTEP, PATIENCE_S, TOY, Launch, acted_upon, until
from tests.processes.warmed import Ahead

pytestmark = pytest.mark.processes

# Ends when all nodes have joined: two runners import torch side by side, on a machine that is busy.
LAST_CALL = ("--policy", f"last_call_s={PATIENCE_S:g}")


def serve(launch: Launch) -> str:
    """Start a controller and return its address."""
    port_file = launch.tmp_path / "port"
    launch.spawn(
        "controller",
        "--listen=127.0.0.1:0",
        f"--store=sqlite:///{launch.tmp_path / 'ops.db'}",
        f"--port-file={port_file}",
        log="controller.log",
    )
    until(port_file.exists, "the controller to serve")
    return f"127.0.0.1:{port_file.read_text().strip()}"


def faults(launch: Launch, address: str) -> list[str]:
    """Return the classes of all incidents that were acted upon, in order."""
    found = acted_upon(launch.incidents(where=f"http://{address}"))
    return [one.verdict.fault for one in found if one.verdict is not None]


def test_plain_torchrun_with_our_rendezvous_recovers(launch: Launch) -> None:
    """``torchrun --rdzv-backend megascale`` needs no command of ours: the controller names and restarts."""
    address = serve(launch)
    launch.spawn("agent", f"--controller=http://{address}", log="agent.log")
    with (launch.tmp_path / "run.log").open("wb") as out:
        run = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3"),
                *("--rdzv-backend=megascale", f"--rdzv-endpoint={address}", "--rdzv-id=toy"),
                *(f"--rdzv-conf=box_root={launch.box_root}", str(LOCKSTEP), "--fault=sigkill"),
            ],
            env=launch.env,
            stdout=out,
            stderr=out,
        )
    launch.procs.append(run)

    assert launch.finish(run) == 0, launch.output() + launch.output("controller.log")
    assert "begins at step 20 in round 2" in launch.output()
    assert faults(launch, address) == ["killed"]


@pytest.mark.matrix  # the next one restarts the whole as well
def test_a_wrapped_launcher_is_one_unit(launch: Launch) -> None:
    """Under --wrap the ranks of another launcher are watched, and the whole is restarted when it fails."""
    run = launch.spawn(
        *("run", "--job=toy", "--wrap", "--", sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node=2", str(TOY), "--fault=exit3"),
    )

    assert launch.finish(run) == 0, launch.output()
    assert "begins at step 20 in round 2" in launch.output()
    incident = launch.the_incident()
    assert incident.verdict is not None
    assert incident.state == "recovered"
    launch.assert_nothing_left()


def test_a_frozen_rank_of_a_wrapped_launcher_is_named(launch: Launch) -> None:
    """Black boxes of ranks that another launcher started are judged like any other; the whole is restarted as one."""
    run = launch.spawn(
        *("run", "--job=toy", "--wrap", "--", sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node=2", str(TOY), "--fault=sigstop"),
    )

    assert launch.finish(run) == 0, launch.output()
    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("frozen", (1,))
    assert incident.state == "recovered"
    assert "begins at step 20 in round 2" in launch.output()
    launch.assert_nothing_left()


def test_a_wrapped_shell_script_is_one_unit(launch: Launch) -> None:
    """What a shell script starts fails: the script is named with that status, and started again as a whole."""
    loop, script = launch.tmp_path / "loop.py", launch.tmp_path / "script.sh"
    loop.write_text(
        "import os, sys, time\nfor i in range(10): time.sleep(0.05)\n"
        "print('loop of round', os.environ['MEGASCALE_ROUND'], flush=True)\n"
        "sys.exit(3 if os.environ['MEGASCALE_ROUND'] == '1' else 0)\n"
    )
    script.write_text(f"set -e\necho begun\n{sys.executable} {loop}\necho over\n")
    run = launch.spawn("run", "--job=toy", "--wrap", "--", "sh", str(script))

    assert launch.finish(run) == 0, launch.output()
    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("exit_code", (0,))
    assert "exit code 3" in incident.verdict.reason
    told = [launch.output().count(line) for line in ("begun", "loop of round 1", "loop of round 2", "over")]
    assert told == [2, 1, 1, 1], launch.output()
    launch.assert_nothing_left()


def test_a_module_is_run_by_its_name(launch: Launch) -> None:
    """``-m package.module`` works as in ``python -m``."""
    (launch.tmp_path / "pkg").mkdir()
    (launch.tmp_path / "pkg" / "train.py").write_text("import sys\nprint('module', __name__, sys.argv[1:])\n")
    launch.env["PYTHONPATH"] = str(launch.tmp_path)

    done = launch.command("run", "-m", "--", "pkg.train", "--x=1")

    assert done.returncode == 0, done.stderr
    assert "module __main__ ['--x=1']" in done.stdout


# A shell script leads through all that a script in Python does, and has no recorder besides.
@pytest.mark.parametrize("language", [pytest.param("python", marks=pytest.mark.matrix), "shell"])
def test_what_is_no_torch_script_is_supervised_too(launch: Launch, language: str) -> None:
    """Its death is named and it is started again; its process, which lives until then, is seen in the status."""
    script = launch.tmp_path / ("loop.py" if language == "python" else "loop.sh")
    script.write_text(
        "import os, time\nround_ = os.environ['MEGASCALE_ROUND']\nwhile round_ == '1': time.sleep(0.1)\n"
        "print('round', round_)\n"
        if language == "python"
        else "#!/bin/sh\n[ $MEGASCALE_ROUND != 1 ] || exec sleep 600\necho round $MEGASCALE_ROUND\n"
    )
    script.chmod(0o755)
    run = launch.spawn("run", "--job=toy", "--", str(script))

    def seen() -> bool:
        status = launch.status()
        return status is not None and bool(status.ranks) and status.ranks[0].report.process.state in {"S", "R"}

    until(seen, "the process to be seen in the status")
    os.kill(launch.pid(0), signal.SIGKILL)

    assert launch.finish(run) == 0, launch.output()
    assert "round 2" in launch.output()
    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("killed", (0,))
    launch.assert_nothing_left()


def test_two_nodes_recover_together(launch: Launch) -> None:
    """A rank of one node dies: both nodes restart into the same round, and both end well."""
    address = serve(launch)
    shared = f"--checkpoint-dir={launch.tmp_path / 'checkpoints'}"
    options = (shared, "--nnodes=1:2", f"--controller=http://{address}", *LAST_CALL)
    first, second = (
        launch.run(
            "--fault=sigkill",
            options=(*options, f"--node={name}", f"--run-dir={launch.state}/{name}"),
            nproc=1,
            script=LOCKSTEP,
        )
        for name in "ab"
    )

    assert launch.finish(first) == 0, launch.output() + launch.output("controller.log")
    assert launch.finish(second) == 0, launch.output()
    assert launch.output().count("in round 2") == 2
    assert faults(launch, address) == ["killed"]


def test_a_node_that_is_done_does_not_hold_up_the_restart_of_another(launch: Launch) -> None:
    """One node's ranks have ended well when a rank of the other fails: that one restarts without it, at once."""
    address = serve(launch)
    script = launch.tmp_path / "apart.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "first, over = os.environ['MEGASCALE_NODE'] == 'a', pathlib.Path(sys.argv[1])\n"
        "print('node', os.environ['MEGASCALE_NODE'], 'round', os.environ['MEGASCALE_ROUND'], flush=True)\n"
        "over.touch() if first else None\n"
        "while not over.exists(): time.sleep(0.1)\n"
        "time.sleep(0 if first else 3)\n"
        "sys.exit(0 if first or os.environ['MEGASCALE_ROUND'] > '1' else 3)\n"
    )
    common = ("run", "--job=toy", "--nnodes=1:2", f"--controller=http://{address}", *LAST_CALL)
    apart = ("--", str(script), str(launch.tmp_path / "over"))
    first = launch.spawn(*common, "--node=a", f"--run-dir={launch.state}/a", *apart)
    second = launch.spawn(*common, "--node=b", f"--run-dir={launch.state}/b", *apart)

    assert launch.finish(first) == 0, launch.output() + launch.output("controller.log")
    assert launch.finish(second) == 0, launch.output() + launch.output("controller.log")
    assert "node b round 2" in launch.output()
    assert "node a round 2" not in launch.output()


@pytest.mark.matrix  # test_checkpoint_ranks does every kind of damage to ranks without a run around them
def test_a_damaged_newest_checkpoint_is_skipped_and_said(launch: Launch) -> None:
    """The second run of the GPT finds a flipped byte in the newest checkpoint and goes on from the one before."""
    script = Path(TOY).parents[3] / "examples" / "train_gpt.py"
    small = ("--layers=1", "--width=32", "--heads=2", "--sequence-length=32", "--batch-size=4", "--evaluate-every=1000")
    arguments = ("run", "--job=toy", "--nproc-per-node=2", "--", str(script), *small, "--checkpoint-every=5")
    assert launch.finish(launch.spawn(*arguments, "--steps=20")) == 0, launch.output()
    newest = max((launch.run_dir() / "checkpoints").glob("step-*"))
    shard = next(path for path in sorted(newest.iterdir()) if path.suffix == ".tensors")
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)

    assert launch.finish(launch.spawn(*arguments, "--steps=25", log="second.log")) == 0, launch.output("second.log")

    assert newest.name in launch.output("second.log")
    assert "resumed after step 15" in launch.output("second.log") or "step 15" in launch.output("second.log")


def test_a_full_disk_while_saving_is_named_and_the_checkpoint_before_stays(launch: Launch) -> None:
    """The save fails on every rank with one sentence; the verdict says disk_full; older checkpoints still verify."""
    disk = launch.tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        script = Path(TOY).parents[3] / "examples" / "train_gpt.py"
        launch.ahead = Ahead(("torch._dynamo", "megascale_ops.checkpoint.persist"), (str(script),))
        run = launch.spawn(
            *("run", "--job=toy", "--nproc-per-node=2", f"--checkpoint-dir={disk}", "--max-restarts=1", "--"),
            *(str(script), "--layers=1", "--width=64", "--heads=2", "--sequence-length=32", "--batch-size=4"),
            *("--evaluate-every=1000", "--checkpoint-every=5", "--steps=60"),
        )

        assert launch.finish(run) == 1, launch.output()
        assert "No space left on device" in launch.output()
        verdicts = [incident.verdict for incident in launch.incidents()]
        assert any(verdict is not None and verdict.fault == "disk_full" for verdict in verdicts), verdicts
        launch.assert_nothing_left()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
