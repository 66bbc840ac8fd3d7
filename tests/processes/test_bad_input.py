# SPDX-License-Identifier: Apache-2.0
"""A user's mistake gets one clear sentence and a non-zero exit; nothing is started, nothing is lost."""

import os
import re
import socket
import sqlite3
import subprocess
import sys

import pytest

from tests.processes.launch import TOY, Launch, until

pytestmark = pytest.mark.processes


SCRIPT = ("--", str(TOY))
# The first mistake with each verb is made with a program, as a user makes it; the others are forked (``warmed.py``).
AS_PROGRAMS = (
    ("run", "--nproc-per-nodes", "2", *SCRIPT), ("rum", *SCRIPT), ("controller", "--listen", "0.0.0.0:0"),
    ("status", "--controller", "http://127.0.0.1:9"), ("why", "nothing-1", "--run-dir", "/no/such/run"),
)  # fmt: skip


def assert_refused(done: "subprocess.CompletedProcess[str]", *words: str) -> None:
    """One line on stderr that carries ``words``, and a non-zero exit."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode not in {0, -6, -11}, done.stdout
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("megascale-ops: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--nproc-per-nodes", "2", *SCRIPT), ("--nproc-per-nod", "--nproc-per-node")),
        (("rum", *SCRIPT), ("rum", "run")),
        (("run", "--", "no/such/train.py"), ("no/such/train.py", "can't be found")),
        (("run", "--", "no-such-program"), ("no-such-program", "can't be found")),
        (("run",), ("nothing to run",)),
        (("run", "--", "/dev/null"), ("/dev/null is no file",)),
        (("run", "--run-dir", "/tmp/caf\udce9", *SCRIPT), ("not in UTF-8", "--run-dir")),
        (("run", "--run-dir", "/tmp" + 6 * f"/{'d' * 90}", *SCRIPT), ("550 bytes", "shorter --run-dir")),
        (("run", "--nproc-per-node", "0", *SCRIPT), ("--nproc-per-node '0'", "at least 1")),
        (("run", "--nnodes", "3:2", *SCRIPT), ("--nnodes '3:2'",)),
        (("run", "--job", "a/b", *SCRIPT), ("a/b",)),
        (("run", "--controller", "http://127.0.0.1:9", "--controller-wait", "0", *SCRIPT), ("127.0.0.1:9",)),
        (("run", "--policy", "silence_flor_s=3", *SCRIPT), ("silence_flor_s", "silence_floor_s")),
        (("run", "--policy", "silence_floor_s=soon", *SCRIPT), ("silence_floor_s=soon",)),
        (("run", "--box-root", "/no/such/place", *SCRIPT), ("/no/such",)),
        (("run", "--token-file", "/no/such/token", *SCRIPT), ("/no/such/token",)),
        (("controller", "--listen", "0.0.0.0:0"), ("token",)),
        (("controller", "--listen", "nonsense"), ("nonsense",)),
        (("controller", "--store", "mysql://x"), ("mysql",)),
        (("controller", "--record", "/dev/null/recording"), ("/dev/null is no folder", "--record-mb 0")),
        (("status", "--controller", "http://127.0.0.1:9"), ("127.0.0.1:9",)),
        (("why", "nothing-1", "--run-dir", "/no/such/run"), ("/no/such/run",)),
    ],
)
def test_a_mistake_gets_one_sentence(launch: Launch, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """It names what was wrong and what to do."""
    done = launch.command(*arguments, is_cold=arguments in AS_PROGRAMS)

    assert_refused(done, *words)


def test_an_unknown_configuration_key_is_refused_with_the_nearest(launch: Launch) -> None:
    """A typing error in the file never passes silently."""
    config = launch.tmp_path / "ops.toml"
    config.write_text("[run]\nnproc_per_nod = '2'\n")

    assert_refused(launch.command("run", f"--config={config}", *SCRIPT), "nproc_per_nod", "nproc_per_node")


def test_a_program_that_the_kernel_does_not_start_fails_the_job(launch: Launch) -> None:
    """Nothing of it speaks against a start; the reason is the kernel's, told once, and no person has stopped it."""
    garbage = launch.tmp_path / "train"
    garbage.write_bytes(b"\1\2\3 no program")
    garbage.chmod(0o755)
    run = launch.spawn("run", "--job=toy", "--no-python", "--", str(garbage))

    code = launch.finish(run)

    assert code == 1, launch.output()
    assert launch.output().count("Exec format error") == 1
    assert re.search(rf"failed: the runner on \S+ gave up: {garbage} can't be started: Exec", launch.output())
    assert "by hand" not in launch.output()
    launch.assert_nothing_left()


def test_a_taken_port_is_said(launch: Launch) -> None:
    """The controller does not fight for a port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        done = launch.command("controller", f"--listen=127.0.0.1:{port}", f"--store=sqlite:///{launch.tmp_path}/x.db")

    assert_refused(done, str(port), "taken")


def test_a_store_that_is_not_ours_is_left_alone(launch: Launch) -> None:
    """A database of something else is refused and not changed."""
    path = launch.tmp_path / "other.db"
    with sqlite3.connect(path) as other:
        other.execute("create table songs (title text)")
    before = path.read_bytes()

    done = launch.command("controller", "--listen=127.0.0.1:0", f"--store=sqlite:///{path}")

    assert_refused(done, "other.db")
    assert path.read_bytes() == before


def test_a_store_of_a_newer_version_is_refused(launch: Launch) -> None:
    """Both versions are named."""
    path = launch.tmp_path / "ops.db"
    serve = ("controller", "--listen=127.0.0.1:0", f"--store=sqlite:///{path}")
    first = launch.spawn(*serve, f"--port-file={launch.tmp_path / 'port'}", log="first.log")
    until((launch.tmp_path / "port").exists, "the first controller to serve")
    first.terminate()
    assert launch.finish(first) == 0
    with sqlite3.connect(path) as journal:
        journal.execute("update meta set value = '7' where key = 'version'")

    done = launch.command(*serve)

    assert_refused(done, "version 7", "version 2")


def test_a_full_shared_memory_is_said_before_anything_starts(launch: Launch) -> None:
    """Black boxes that do not fit are refused with the place and the size."""
    full = launch.tmp_path / "shm"
    full.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(full)], check=False).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        done = launch.command("run", f"--box-root={full / 'boxes'}", *SCRIPT)
    finally:
        subprocess.run(["umount", str(full)], check=True)

    assert_refused(done, "free", "--box-root")


@pytest.mark.parametrize("option", ["--run-dir", "--checkpoint-dir"])
def test_a_folder_without_rights_is_said(launch: Launch, option: str) -> None:
    """Asked without the capability by which root writes anywhere."""
    closed = launch.tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    plain = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--") if os.geteuid() == 0 else ()
    command = (*plain, sys.executable, "-m", "megascale_ops.cli.main", "run", f"{option}={closed}", *SCRIPT)

    done = subprocess.run(command, env=launch.env, capture_output=True, text=True, timeout=180, check=False)

    assert_refused(done, str(closed), "can't be written to")
