# SPDX-License-Identifier: Apache-2.0
"""What the user typed becomes what will be started, or one sentence."""

import os
from pathlib import Path

import pytest

from megascale_ops.errors import UsageError
from megascale_ops.runner.config import RunConfig
from megascale_ops.runner.plan import (
    Machine,
    as_node,
    default_job,
    make_plan,
    parse_nnodes,
    parse_nproc,
    with_whole_paths,
)
from megascale_ops.runner.preflight import look_at_machine
from megascale_ops.runner.programs import check_program, is_python

MACHINE = Machine(
    hostname="node-a", cores=16, gpus=0, state_root="/state", stamp="20260131-142501", python="/usr/bin/python3"
)
GPU_MACHINE = Machine(hostname="node-g", cores=16, gpus=8, state_root="/state", stamp="x", python="/usr/bin/python3")


@pytest.mark.parametrize(("text", "expected"), [("1", (1, 1)), ("4", (4, 4)), ("1:2", (1, 2)), ("3:3", (3, 3))])
def test_nnodes_takes_a_number_or_a_range(text: str, expected: tuple[int, int]) -> None:
    """``--nnodes`` reads what torchrun reads."""
    assert parse_nnodes(text) == expected


@pytest.mark.parametrize("text", ["0", "2:1", "0:4", "", "a", "1:", ":2", "-1", "1:2:3", "1.5"])
def test_nnodes_refuses_what_cannot_be_met(text: str) -> None:
    """A range that no set of nodes can meet is refused before anything starts."""
    with pytest.raises(UsageError, match="--nnodes"):
        parse_nnodes(text)


@pytest.mark.parametrize(
    ("text", "machine", "expected"),
    [
        ("4", MACHINE, 4),
        ("cpu", MACHINE, 16),
        ("auto", MACHINE, 16),
        ("auto", GPU_MACHINE, 8),
        ("gpu", GPU_MACHINE, 8),
    ],
)
def test_nproc_counts_ranks(text: str, machine: Machine, expected: int) -> None:
    """``--nproc-per-node`` takes a number or asks the machine."""
    assert parse_nproc(text, machine) == expected


@pytest.mark.parametrize("text", ["0", "-1", "", "many", "1.5", "gpu"])
def test_nproc_refuses_zero_ranks_and_missing_gpus(text: str) -> None:
    """Zero ranks, and GPUs that are not there, are said so."""
    with pytest.raises(UsageError, match="--nproc-per-node"):
        parse_nproc(text, MACHINE)


def test_a_lone_job_is_named_after_script_and_time() -> None:
    """A second try starts afresh instead of resuming the first one's checkpoints by accident."""
    name = default_job(("scripts/train v2.py",), alone=True, stamp="20260131-142501")

    assert name == "train-v2-20260131-142501"


def test_a_job_with_a_controller_has_the_same_name_on_every_node() -> None:
    """Nodes that start seconds apart must agree on the name."""
    meeting = {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:29400"}
    configs = (RunConfig(controller="http://127.0.0.1:7070"), RunConfig(**meeting))  # type: ignore[arg-type]  # fields

    assert {make_plan(config, ("train.py",), MACHINE, threads_set=False).job for config in configs} == {"train"}


def test_a_script_runs_unbuffered_under_this_python() -> None:
    """``train.py --steps 5`` becomes ``python -u train.py --steps 5``."""
    plan = make_plan(RunConfig(), ("train.py", "--steps", "5"), MACHINE, threads_set=False)

    assert (plan.program, plan.arguments) == ("/usr/bin/python3", ("-u", "train.py", "--steps", "5"))


def test_a_module_runs_with_dash_m() -> None:
    """``-m package.train`` becomes ``python -u -m package.train``."""
    plan = make_plan(RunConfig(module=True), ("package.train", "x"), MACHINE, threads_set=False)

    assert plan.arguments == ("-u", "-m", "package.train", "x")


def test_a_program_runs_as_it_is() -> None:
    """What is no script of Python's is a program, as is everything under --no-python and --wrap."""
    shell = make_plan(RunConfig(), ("./train.sh", "x"), MACHINE, threads_set=False)
    wrapped = make_plan(RunConfig(wrap=True, nproc_per_node="4"), ("deepspeed", "t.py"), MACHINE, threads_set=False)

    assert (shell.program, shell.arguments) == ("./train.sh", ("x",))
    assert (wrapped.program, wrapped.nproc) == ("deepspeed", 1)


@pytest.mark.parametrize(
    ("name", "content", "mode", "expected"),
    [
        ("train", b"print(1)\n", 0o644, True),
        ("train", b"#!/usr/bin/env python3\nprint(1)\n", 0o755, True),
        ("train", b"#!/opt/conda/bin/python3.11 -u\n", 0o755, True),
        ("train.cfg.run", b"print(1)\n", 0o755, True),
        ("train.pyz", b"PK\x03\x04", 0o644, True),
        ("train", b"PK\x03\x04", 0o644, True),
        ("train", b"#!/bin/sh\n", 0o755, False),
        ("train", b"#! /usr/bin/perl\n", 0o755, False),
        ("train", b"\x7fELF\x02", 0o755, False),
        ("train.sh", b"echo 1\n", 0o755, False),
        ("train.py", b"#!/bin/sh\n", 0o755, True),
        ("train", b"", 0o644, True),
    ],
)
def test_python_runs_scripts_of_any_name(tmp_path: Path, name: str, content: bytes, mode: int, expected: bool) -> None:
    """What a file is, its first bytes tell: scripts need no ending, programs stay programs."""
    script = tmp_path / name
    script.write_bytes(content)
    script.chmod(mode)

    assert is_python(str(script)) is expected


def test_python_runs_a_folder_and_no_name_on_the_path(tmp_path: Path) -> None:
    """A folder has a __main__.py, or is refused by a sentence; what is not there is a program by its name."""
    (tmp_path / "folder").mkdir()
    plan = make_plan(RunConfig(), (str(tmp_path / "folder"),), look_at_machine(), threads_set=False)

    with pytest.raises(UsageError, match=r"has no __main__\.py"):
        check_program(plan)
    (tmp_path / "folder" / "__main__.py").touch()

    check_program(plan)
    assert plan.arguments == ("-u", str(tmp_path / "folder"))
    assert not is_python("bash")


def test_no_two_launches_have_the_same_name() -> None:
    """Also within the same second."""
    jobs = {make_plan(RunConfig(), ("t.py",), look_at_machine(), threads_set=False).job for _ in range(50)}

    assert len(jobs) == 50


def test_every_path_is_whole() -> None:
    """A script may change its folder: what is relative to where the user stands is made absolute before."""
    given = RunConfig(run_dir="r", box_root="/b", checkpoint_dir="../c", log_dir="./l", token_file="")

    whole = with_whole_paths(given, "/home/me")

    assert (whole.run_dir, whole.box_root, whole.token_file) == ("/home/me/r", "/b", "")
    assert (whole.checkpoint_dir, whole.log_dir) == ("/home/me/../c", "/home/me/l")


def test_a_url_for_checkpoints_stays_as_it_is() -> None:
    """It is no path of this machine."""
    whole = with_whole_paths(RunConfig(checkpoint_dir="s3://bucket/run7", run_dir="r"), "/home/me")

    assert (whole.checkpoint_dir, whole.run_dir) == ("s3://bucket/run7", "/home/me/r")
    assert make_plan(whole, ("t.py",), MACHINE, threads_set=False).checkpoint_dir == "s3://bucket/run7"


def test_ranks_of_one_node_share_its_cores() -> None:
    """As torchrun does: one OpenMP thread each, unless the user has said otherwise."""
    several = RunConfig(nproc_per_node="2")

    assert make_plan(several, ("t.py",), MACHINE, threads_set=False).threads == 1
    assert make_plan(several, ("t.py",), MACHINE, threads_set=True).threads == 0
    assert make_plan(RunConfig(), ("t.py",), MACHINE, threads_set=False).threads == 0


def test_folders_follow_the_job() -> None:
    """Everything of a run lies in its run folder unless told otherwise."""
    plan = make_plan(RunConfig(job="j"), ("t.py",), MACHINE, threads_set=False)

    assert (plan.run_dir, plan.checkpoint_dir, plan.log_dir) == ("/state/j", "/state/j/checkpoints", "/state/j/logs")


@pytest.mark.parametrize(("given", "base"), [("", "/state/j/logs"), ("/far/logs", "/far/logs")])
def test_each_of_several_nodes_writes_into_a_folder_of_its_name(given: str, base: str) -> None:
    """They may share the folder; also a second runner on one machine, which is a node of another name."""
    config = RunConfig(job="j", node_name="a", nnodes="1:2", controller="http://h:1", log_dir=given)
    plan = make_plan(config, ("t.py",), MACHINE, threads_set=False)

    assert plan.log_dir == f"{base}/a"
    assert as_node(plan, "a-2").log_dir == f"{base}/a-2"


@pytest.mark.parametrize(
    ("config", "command", "words"),
    [
        (RunConfig(), (), "nothing to run"),
        (RunConfig(), ("", "--steps=3"), "nothing to run"),  # a variable of the shell that is not set
        (RunConfig(monitor_interval_s=0.0), ("t.py",), "--monitor-interval 0 can't be used"),
        (RunConfig(monitor_interval_s=float("nan")), ("t.py",), "--monitor-interval nan can't be used"),
        (RunConfig(max_restarts=-5), ("t.py",), "--max-restarts -5 can't be used"),
        (RunConfig(job="a/b"), ("t.py",), "job name 'a/b'"),
        (RunConfig(node_name=".x"), ("t.py",), "node name"),
        (RunConfig(nnodes="2"), ("t.py",), "needs a controller"),
        (RunConfig(module=True, wrap=True), ("t",), "--module"),
    ],
)
def test_what_cannot_be_started_is_said_in_one_sentence(
    config: RunConfig, command: tuple[str, ...], words: str
) -> None:
    """Bad input is refused before anything is started, naming what was wrong."""
    with pytest.raises(UsageError, match=words) as error:
        make_plan(config, command, MACHINE, threads_set=False)

    assert "\n" not in str(error.value)


def test_a_script_of_any_name_is_a_script() -> None:
    """One like an option is none for Python, and a long one makes no job name that can't be."""
    dashed = make_plan(RunConfig(), ("-x.py", "--help"), MACHINE, threads_set=False)
    long = make_plan(RunConfig(), ("n" * 240 + ".py",), MACHINE, threads_set=False)

    assert dashed.arguments == ("-u", "./-x.py", "--help")
    assert dashed.job.startswith("x-")
    assert long.job == f"{'n' * 70}-{MACHINE.stamp}"


@pytest.mark.parametrize(
    ("mode", "words"),
    [(0o755, r"is on no PATH; .* write \./train"), (0o644, "may not be executed: run `chmod"), (0, "can't be found")],
)
def test_a_program_that_cannot_be_started_is_said_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, words: str
) -> None:
    """A file of that name may be there and still be none that the shell would start."""
    monkeypatch.chdir(tmp_path)
    if mode:
        (tmp_path / "train").write_text("#!/bin/bash\n")
        (tmp_path / "train").chmod(mode)
    plan = make_plan(RunConfig(no_python=True), ("train",), MACHINE, threads_set=False)

    with pytest.raises(UsageError, match=words) as error:
        check_program(plan)

    assert "\n" not in str(error.value)


def test_a_folder_that_was_removed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays the working folder of the process, and no path is relative to it any more."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    try:
        with pytest.raises(UsageError, match="the folder that you are in was removed"):
            look_at_machine()
    finally:
        os.chdir(tmp_path)
