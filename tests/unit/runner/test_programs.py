# SPDX-License-Identifier: Apache-2.0
"""What Python or the kernel would not start is one sentence before anything is started; the rest is left be."""

import errno
import os
import socket
import stat
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megascale_ops.errors import UsageError
from megascale_ops.runner.config import RunConfig
from megascale_ops.runner.plan import make_plan
from megascale_ops.runner.preflight import look_at_machine
from megascale_ops.runner.programs import check_program, is_python, own_world


def _check(path: Path, *, no_python: bool = False, python: str = "") -> None:
    machine = look_at_machine()
    machine = machine if not python else msgspec.structs.replace(machine, python=python)
    check_program(make_plan(RunConfig(no_python=no_python), (str(path),), machine, threads_set=False))


def _file(folder: Path, content: bytes, name: str = "train.py", mode: int = 0o755) -> Path:
    path = folder / name
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"x = 1\ndef f(:\n", r"SyntaxError: invalid syntax, line 2: def f\(:"),
        (b"if 1:\nx = 2\n", r"IndentationError: .*, line 2: x = 2"),
        (b"if 1:\n\tx = 2\n        y = 3\n", r"TabError: .*, line 3: y = 3"),
        (b"print('caf\xe9')\n", "Non-UTF-8 code|unicode error|'utf-8' codec"),
        (b"# coding: no-such\n", "no-such"),
        (b"x = 1\0\n", "null bytes"),
        (b"return 3\n", "'return' outside function"),
        (b"<<<<<<< HEAD\nx = 1\n", "invalid syntax, line 1: <<<<<<< HEAD"),
    ],
)
def test_a_script_that_python_cannot_read_is_not_started(tmp_path: Path, content: bytes, words: str) -> None:
    """It would fail on each rank, twice; the sentence has the line."""
    with pytest.raises(UsageError, match=words) as error:
        _check(_file(tmp_path, content))

    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"print(1)\r\nprint(2)\r\n",
        b"#!/usr/bin/env python3\r\nprint(1)\r\n",
        b"\xef\xbb\xbfprint(1)\n",
        b"# -*- coding: latin-1 -*-\nprint('caf\xe9')\n",
        b"x = 1 is 1\nassert (1, 'always')\n'\\d'\n",  # warnings are the rank's to print
        b"raise SystemExit(3)\n",
        b"import no_such_module\n",
    ],
    ids=["empty", "Windows", "Windows with a first line", "BOM", "latin-1", "warnings", "exits", "import"],
)
def test_what_python_runs_is_left_be(tmp_path: Path, content: bytes) -> None:
    """The negative control: nothing is imported or executed, and no warning is an error."""
    _check(_file(tmp_path, content))


def test_archives_byte_code_and_another_python_are_not_read(tmp_path: Path) -> None:
    """The negative control: what is no source of this Python's is none to judge."""
    with zipfile.ZipFile(tmp_path / "train.pyz", "w") as archive:
        archive.writestr("__main__.py", "print(1)")
    other = _file(tmp_path, b"print 'of another Python'\n", "old.py")

    _check(tmp_path / "train.pyz")
    _check(_file(tmp_path, b"\0\0\0", "train.pyc"))
    _check(other, python="/usr/bin/python2")
    with pytest.raises(UsageError, match="Python can't run"):
        _check(other)


def test_a_script_that_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """A FIFO (`<(...)` of a shell) can be read once; opening it would wait for a writer."""
    fifo = tmp_path / "train.py"
    os.mkfifo(fifo)
    bare = tmp_path / "train"
    os.mkfifo(bare)

    with pytest.raises(UsageError, match="is no file: each rank"):
        _check(fifo)
    assert not is_python(str(bare))


def test_a_script_without_rights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel tells any user but root."""
    path = _file(tmp_path, b"x = 1\n")
    opened = Path.open

    def refuse(one: Path, *mode: Any) -> Any:  # noqa: ANN401  as Path.open
        if one == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(one, *mode)

    monkeypatch.setattr(Path, "open", refuse)

    with pytest.raises(UsageError, match=r"can't be read \(Permission denied\): check its rights"):
        _check(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"#!/bin/bash\r\necho hi\r\n", "lines end as Windows'"),
        (b"#!/usr/bin/env python3\r\nprint(1)\r\n", "lines end as Windows'"),
        (b"#!/no/such/interpreter -x\n", "names the interpreter /no/such/interpreter, which is not there"),
        (b"#!/usr/bin/env no-such-python\n", "asks for no-such-python, which is on no PATH"),
        (b"#!\n", "names no interpreter"),
    ],
)
def test_a_program_that_the_kernel_would_not_start_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    """Its own word would be "No such file or directory", of a file that is there."""
    program = _file(tmp_path, content, "train")

    with pytest.raises(UsageError, match=words) as error:
        _check(program, no_python=True)

    assert str(program) in str(error.value)


@pytest.mark.parametrize(
    "first",
    ["#!/bin/sh", "#! /usr/bin/env  sh", "#!/usr/bin/env -S sh -e", "#!/usr/bin/env A=1 sh", f"#!{sys.executable}"],
)
def test_a_program_that_the_kernel_starts_is_left_be(tmp_path: Path, first: str) -> None:
    """The negative control: usual first lines, and a binary."""
    _check(_file(tmp_path, f"{first}\necho\n".encode(), "train"), no_python=True)
    _check(Path(sys.executable), no_python=True)
    assert stat.S_IMODE((tmp_path / "train").stat().st_mode) == 0o755


@pytest.mark.parametrize("name", ["/tmp/train.py", "./train.py", "package/train"])
def test_a_path_is_no_module(name: str) -> None:
    """Python would look for a package of that name in every round; the negative control is a module's name."""
    machine = look_at_machine()
    for asked in (name, "package.train"):
        plan = make_plan(RunConfig(module=True), (asked,), machine, threads_set=False)
        if asked == name:
            with pytest.raises(UsageError, match=r"--module takes a module's name.*leave --module out"):
                check_program(plan)
        else:
            check_program(plan)


def test_a_socket_is_no_program(tmp_path: Path) -> None:
    """The kernel would refuse it once the job has begun."""
    path = tmp_path / "train"
    with socket.socket(socket.AF_UNIX) as listens:
        listens.bind(str(path))
        path.chmod(0o755)

        with pytest.raises(UsageError, match="is no file"):
            _check(path, no_python=True)


@pytest.mark.parametrize(
    ("environ", "max_nodes", "is_told"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1, True),
        ({"WORLD_SIZE": "16"}, 1, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 2, False),  # a pod a node, which meet
        ({"RANK": "0", "WORLD_SIZE": "1"}, 1, False),
        ({"RANK": "0"}, 1, False),
        ({"WORLD_SIZE": "0"}, 1, False),
        ({"WORLD_SIZE": "many"}, 1, False),
        ({}, 1, False),
    ],
)
def test_a_world_of_another_launcher_is_told(environ: dict[str, str], max_nodes: int, *, is_told: bool) -> None:
    """Several runs beside each other would be as many jobs, which write the same checkpoints."""
    assert bool(own_world(environ, max_nodes)) == is_told
