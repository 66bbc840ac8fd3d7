# SPDX-License-Identifier: Apache-2.0
"""What Python and the kernel would say of a script or program, found out before anything is started.

A script that Python can't read fails on every rank and in every round alike, and the kernel's own word for a missing
interpreter ("No such file or directory") is about another file than the one that it names.
"""

import os
import shutil
import stat
import sys
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megascale_ops.errors import UsageError
from megascale_ops.foreign import opened
from megascale_ops.runner.plan import Plan

_HEAD_BYTES = 256  # Linux reads as much of a file to see what it is (BINPRM_BUF_SIZE)
# 4 MB: a script of a hundred thousand lines, which Python reads in a second; what is larger holds data.
_MOST_BYTES = 4 << 20
_SEVERAL = 2
_NO_FILE = "is no file: each rank and each restart reads the script anew, so save it as one"


def is_python(path: str) -> bool:
    """Return whether Python runs what is at ``path``: torchrun gives it everything, we leave programs be programs.

    A folder or an archive with ``__main__.py``, a script of any name. No script: what the kernel itself can start,
    which is an ELF file, or a file whose first line names another interpreter; and what is called as a shell's is.
    """
    target = Path(path)
    if path.endswith((".py", ".pyc", ".pyz")) or target.is_dir():
        return True
    head = _head(target)
    if head is None:
        return False  # not there: a program, by its name
    if head.startswith(b"#!"):
        words = head.partition(b"\n")[0].removeprefix(b"#!").split()
        return any(word.rpartition(b"/")[2].startswith(b"python") for word in words)
    return not head.startswith(b"\x7fELF") and not path.endswith((".sh", ".bash"))


def check_program(plan: Plan) -> None:
    """Refuse a script or program that can't be started, or that Python can't read.

    Raises:
        UsageError: one sentence.
    """
    if plan.arguments[:1] == ("-u",) and plan.arguments[1] != "-m":
        _check_script(Path(plan.arguments[1]), is_ours=plan.program == sys.executable)
        return
    if plan.arguments[:2] == ("-u", "-m") and os.sep in plan.arguments[2]:
        name = plan.arguments[2]
        raise UsageError(
            f"--module takes a module's name, as in package.train, and {name} is a path: leave --module out"
        )
    found = shutil.which(plan.program)
    if found is None:
        raise UsageError(_why_not(plan.program))
    if not _is_file(Path(found)):
        raise UsageError(f"{plan.program} {_NO_FILE}")
    if why := _why_not_begun(found):
        raise UsageError(f"the program {plan.program} can't be started: {why}")


def own_world(environ: Mapping[str, str], max_nodes: int) -> str:
    """Return what to tell where another launcher has set a world of several, and this run is one of its own; or "".

    A run starts all ranks of its node itself, so one that was started for each rank, or for each pod, would be several
    jobs beside each other.
    """
    world = environ.get("WORLD_SIZE", "")[:9]
    if max_nodes > 1 or not world.isdecimal() or int(world) < _SEVERAL:
        return ""
    return (
        f"WORLD_SIZE={world} is set, as by a launcher that starts each rank or each pod: this run has one node and "
        "starts its ranks itself, so several of them are as many jobs (--nnodes and --rdzv-endpoint make them one)"
    )


def _check_script(script: Path, *, is_ours: bool) -> None:
    if script.is_dir():
        if not (script / "__main__.py").is_file():
            raise UsageError(f"the folder {script} has no __main__.py, so Python can't run it: name a script")
        return
    if not script.exists():
        raise UsageError(f"the script {script} can't be found from {Path.cwd()}: check the path after `--`")
    if not _is_file(script):
        raise UsageError(f"{script} {_NO_FILE}")
    try:
        with script.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"the script {script} can't be read ({error.strerror}): check its rights, `ls -l`") from error
    is_text = script.suffix != ".pyc" and not zipfile.is_zipfile(script) and len(text) <= _MOST_BYTES
    if is_ours and is_text and (why := _why_no_python(text, script)):
        raise UsageError(f"Python can't run {script}: {why}")


def _why_no_python(text: bytes, script: Path) -> str:
    """Return what this Python says of a script that it can't read, with the line, or ""."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are the rank's to print
        try:
            compile(text, os.fsencode(script), "exec", dont_inherit=True)
        except SyntaxError as error:
            where = f", line {error.lineno}" if error.lineno else ""
            shown = f": {error.text.strip()}" if error.text and error.text.strip() else ""
            return f"{type(error).__name__}: {error.msg}{where}{shown}"
        except ValueError as error:  # null bytes, in older versions
            return str(error)
        except (RecursionError, MemoryError, OverflowError):
            return ""  # a rank has other limits
    return ""


def _why_not(program: str) -> str:
    """Return why a program can't be started: a file of that name may exist all the same."""
    path = Path(program)
    if path.exists() and not path.is_dir() and not path.is_file():
        return f"{program} {_NO_FILE}"
    if not path.is_file():
        return f"the program {program} can't be found or may not be executed: check what follows `--`"
    if not os.access(path, os.X_OK):
        return f"the program {program} may not be executed: run `chmod +x {program}`, or name its interpreter before it"
    return f"the program {program} is on no PATH; for the file of that name in this folder write ./{program}"


def _why_not_begun(path: str) -> str:
    """Return what the kernel would not start a file for, by its first line; "" where nothing speaks against it."""
    head = _head(Path(path))
    if head == b"":
        return "it is empty"
    if head is None or not head.startswith(b"#!"):
        return ""
    line = head.partition(b"\n")[0].removeprefix(b"#!")
    if line.endswith(b"\r"):
        return "its lines end as Windows' do, so that the kernel looks for an interpreter with a CR in its name"
    return _why_no_interpreter([os.fsdecode(word) for word in line.split()])


def _why_no_interpreter(words: list[str]) -> str:
    """Return what is wrong with the words of a first line, "" where nothing is; ``env`` looks for the second one."""
    if not words:
        return "its first line names no interpreter"
    if shutil.which(words[0]) is None:
        return f"its first line names the interpreter {words[0]}, which is not there or may not be executed"
    asked = words[1] if len(words) > 1 and Path(words[0]).name == "env" else ""
    if asked and "=" not in asked and not asked.startswith("-") and shutil.which(asked) is None:
        return f"its first line asks for {asked}, which is on no PATH"
    return ""


def _head(path: Path) -> bytes | None:
    """Return how a file begins; None where it is none that can be read (a FIFO would be waited for)."""
    with suppress(OSError, ValueError), opened(path, follow=True) as handle:
        return os.read(handle, _HEAD_BYTES)
    return None


def _is_file(path: Path) -> bool:
    with suppress(OSError):
        return stat.S_ISREG(path.stat().st_mode)
    return False
