# SPDX-License-Identifier: Apache-2.0
"""Programs of ours, forked where their start is no part of the story: out of ``tests/fixtures/warm_parent.py``."""

import atexit
import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

from tests.fixtures import warm_client, warm_parent
from tests.fixtures.warm_parent import PROGRAM

READY_S = 120.0


class Forked(subprocess.Popen[bytes]):
    """A child of the warm parent, with the face of one of our own."""

    parent: "WarmParent"
    end: "End"

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        if self.returncode is None:
            self.returncode = self.parent.code_of(self.end, 0.0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            self.returncode = self.parent.code_of(self.end, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode


class End:
    """How one child has ended; by itself, since a session starts more processes than the kernel has pids for."""

    code: int | None = None


class Ahead(NamedTuple):
    """What a runner imports before it begins, and scripts of which it may therefore fork the ranks."""

    imports: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()


class WarmParent:
    """This worker's end of the process that has imported everything, and that ends with the last of its session.

    Attributes:
        cpu_s: CPU time of those of its children that have ended, with what these have waited for.
    """

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._early = warm_parent.early_variables(_BEGAN_WITH)
        self._living: dict[int, End] = {}
        self._ended = threading.Condition()
        self._ordering = threading.Lock()  # who orders gets the answer to that
        self._begun: queue.Queue[tuple[int, End]] = queue.Queue()  # what was ordered; pid 0: the parent is gone
        self._orders = connected()
        self._listener = threading.Thread(target=self._listen, name="warm-parent", daemon=True)
        self._listener.start()
        atexit.register(self.close)

    def takes(self, env: Mapping[str, str]) -> bool:
        """Say whether it may start a program with these variables: it has begun with the same."""
        is_like = warm_parent.early_variables(env) == self._early and not any(map(begins_python, folders_of(env)))
        return is_like and self._listener.is_alive()

    def fork(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        out: IO[bytes],
        err: IO[bytes] | None = None,
        cwd: Path | None = None,
        *,
        netns: str = "",
        ahead: Ahead | None = None,
        script: str = "",
    ) -> Forked:
        """Start ``megascale-ops``, or a rank's script, in a session of its own; its output goes to ``out``."""
        os.umask(umask := os.umask(0o077))
        ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
        found = [folder for folder in folders_of(env) if folder not in folders_of(os.environ)]
        where = {
            "folders": found,
            "cwd": str(cwd or Path.cwd()),
            "netns": netns,
            "mounts": 0,
            "umask": umask,
            "ignored": ignored,
        }
        early = (ahead or Ahead())._asdict()
        order = json.dumps({"arguments": arguments, "env": dict(env), "script": script, **where, **early}).encode()
        assert len(order) <= warm_parent.MOST
        with self._ordering, Path(os.devnull).open("rb") as nothing:
            socket.send_fds(self._orders, [order], [nothing.fileno(), out.fileno(), (err or out).fileno()])
            pid, end = self._begun.get(timeout=READY_S)
        assert pid, "the warm parent has ended"
        forked = warm_parent.adopt(
            Forked, pid, [sys.executable, "-c", script, *arguments] if script else [*PROGRAM, *arguments]
        )
        forked.parent, forked.end = self, end
        return forked

    def code_of(self, end: End, timeout_s: float | None) -> int | None:
        """Return the exit status of a child; None when there is none within ``timeout_s``."""
        with self._ended:
            self._ended.wait_for(lambda: end.code is not None, timeout_s)
            return end.code

    def close(self) -> None:
        """End it, and what still lives of its children."""
        with suppress(OSError):  # it is gone
            self._orders.shutdown(socket.SHUT_WR)
        self._listener.join(READY_S)

    def _listen(self) -> None:
        while raw := self._received():
            told = json.loads(raw)
            if "began" in told:
                end = self._living[told["began"]] = End()
                self._begun.put((told["began"], end))
                continue
            with self._ended:
                self._living.pop(told["ended"]).code = told["code"]
                self.cpu_s += told["cpu_s"]
                self._ended.notify_all()
        self._begun.put((0, End()))

    def _received(self) -> bytes:
        with suppress(ConnectionError):  # it was killed
            return self._orders.recv(warm_parent.MOST)
        return b""


def connected() -> socket.socket:
    """Return a connection to the warm parent of this session, started by the worker that comes first."""
    door = _door()
    with warm_parent.locked(door.parent.parent):
        door.parent.mkdir(mode=0o700, exist_ok=True)  # whoever can connect has all that this user may do
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.connect(str(door))
        except OSError:
            _started.append(_start_parent(door))
            ours.connect(str(door))  # it listens already, and answers when it has imported all
    return ours


def _door() -> Path:
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"{os.getpid()}"
    return Path(tempfile.gettempdir(), f"megascale-warm-{os.getuid()}-{session}", "door")


_started: "list[subprocess.Popen[bytes]]" = []  # it may outlive this worker, for others of the session


def _start_parent(path: Path) -> "subprocess.Popen[bytes]":
    path.unlink(missing_ok=True)
    room = "x" * warm_parent.ROOM
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(path))
        door.listen(64)
        return subprocess.Popen(
            [sys.executable, "-m", "tests.fixtures.warm_parent", str(door.fileno()), room],
            env={**_BEGAN_WITH, "ROOM": room}, pass_fds=(door.fileno(),), stdin=subprocess.DEVNULL,
            cwd=Path(__file__).parents[2], start_new_session=True,
        )  # fmt: skip


def env_of_programs() -> dict[str, str]:
    """Return what programs of ours are started with in tests, where nothing else is said."""
    named = {name: value for name, value in os.environ.items() if not name.startswith("MEGASCALE_")}
    return {**named, "OMP_NUM_THREADS": "1"}


# As it is before any test: the one that comes first may have set a variable for itself.
_BEGAN_WITH = env_of_programs()


def folders_of(env: Mapping[str, str]) -> list[str]:
    """Return where modules are looked for before all others."""
    return [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]


def begins_python(folder: str) -> bool:
    """Say whether a folder has a file that Python runs before a program."""
    return any(Path(folder, f"{name}.py").exists() for name in ("sitecustomize", "usercustomize"))


@cache
def _parent() -> WarmParent:
    return WarmParent()


def start(
    arguments: Sequence[str],
    env: Mapping[str, str],
    out: IO[bytes],
    *,
    netns: str = "",
    ahead: Ahead | None = None,
    is_cold: bool = False,
) -> "subprocess.Popen[bytes]":
    """Start ``megascale-ops`` in a session of its own: forked, or as a program where that would be another thing.

    Args:
        arguments: Of the program.
        env: Its environment.
        out: Where what it prints goes.
        netns: The network namespace that it lives in; "": ours.
        ahead: For a runner that is forked.
        is_cold: It is started as a program in any case.
    """
    if not is_cold and _parent().takes(env):
        return _parent().fork(arguments, env, out, netns=netns, ahead=ahead)
    line = [*(("ip", "netns", "exec", netns) if netns else ()), *PROGRAM, *arguments]
    return subprocess.Popen(line, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)


def stand_in() -> str:
    """Return what to write for ``megascale-ops`` where another program starts it: see ``warm_client``."""
    _parent()
    return shlex.join([sys.executable, "-S", "-E", warm_client.__file__, str(_door())])


def put_stand_in(folder: Path) -> Path:
    """Write the same as a program ``megascale-ops`` into a folder, for PATH; return the folder."""
    folder.mkdir(exist_ok=True)
    program = folder / "megascale-ops"
    program.write_text(f'#!/bin/sh\nexec {stand_in()} "$@"\n')
    program.chmod(0o755)
    return folder


def start_rank(
    script: str, arguments: Sequence[str], env: Mapping[str, str], err: IO[bytes]
) -> "subprocess.Popen[bytes]":
    """Start a rank of a script that imports torch, as `FakeNode` does with ``recorder``."""
    return _parent().fork(arguments, env, err, script=script)


def start_script(path: Path, env: Mapping[str, str], out: Path, err: Path, *, cwd: Path) -> "subprocess.Popen[bytes]":
    """Start a rank's script from a file, as ``python PATH`` does; what it prints goes to files."""
    script = f"import runpy, sys; sys.argv = [{str(path)!r}]; runpy.run_path({str(path)!r}, run_name='__main__')"
    with out.open("wb") as to_out, err.open("wb") as to_err:
        return _parent().fork((), env, to_out, to_err, cwd, script=script)


def start_module(
    module: str, arguments: Sequence[str], env: Mapping[str, str], out: IO[bytes], err: IO[bytes]
) -> "subprocess.Popen[bytes]":
    """Start a module of ``tests.fixtures``, as `play_module` does; what it prints goes to files or pipes."""
    return _parent().fork(arguments, env, out, err, script=_module(module))


def play_module(
    module: str, arguments: Sequence[str], env: Mapping[str, str], deadline_s: float
) -> "subprocess.CompletedProcess[str]":
    """Run a module of ``tests.fixtures`` to its end, as ``python -m`` does, where torch has been imported already.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was killed with what it had started in its session.
    """
    script = _module(module)
    return _to_its_end(lambda out, err: _parent().fork(arguments, env, out, err, script=script), deadline_s)


def _module(name: str) -> str:
    return f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"


def play_script(
    path: Path, arguments: Sequence[str], env: Mapping[str, str], deadline_s: float
) -> "subprocess.CompletedProcess[str]":
    """Run a script without torch's compiler to its end, as ``python PATH`` does, where torch has been imported already.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was killed with what it had started in its session.
    """
    return _to_its_end(lambda out, err: _parent().fork(arguments, env, out, err, script=_soon(path)), deadline_s)


def play_ranks(
    path: Path,
    arguments: Sequence[str],
    env: Mapping[str, str],
    world_size: int,
    port: int,
    deadline_s: float,
    *,
    has_compiler: bool = False,
) -> "list[subprocess.CompletedProcess[str]]":
    """Run all ranks of a script to their ends, each as `play_script` does, with what torchrun tells it of its place.

    Args:
        path: The script.
        arguments: Of every rank.
        env: Of every rank, but for its place.
        world_size: How many there are, all on this node.
        port: Of rank 0's store; free.
        deadline_s: How long each may take.
        has_compiler: The script may ask for torch's compiler, 0.5 s of CPU time a rank.

    Raises:
        subprocess.TimeoutExpired: one took longer, and was killed.
    """
    world = {"WORLD_SIZE": f"{world_size}", "LOCAL_WORLD_SIZE": f"{world_size}"}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    script = _as_main(path) if has_compiler else _soon(path)
    one_at_a_time = threading.Lock()  # the parent answers in the order in which it was asked

    def play(rank: int) -> "subprocess.CompletedProcess[str]":
        place = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", **world, **master}

        def start_it(out: IO[bytes], err: IO[bytes]) -> Forked:
            with one_at_a_time:
                return _parent().fork(arguments, {**env, **place}, out, err, script=script)

        return _to_its_end(start_it, deadline_s)

    with ThreadPoolExecutor(world_size) as ranks:
        return list(ranks.map(play, range(world_size)))


def _soon(path: Path) -> str:
    return f"from megascale_ops.chaos import no_compiler; no_compiler.leave_out(); {_as_main(path)}"


def _as_main(path: Path) -> str:
    place = f"sys.argv[0] = {str(path)!r}; sys.path.insert(0, {str(path.parent)!r})"
    return f"import runpy, sys; {place}; runpy.run_path(sys.argv[0], run_name='__main__')"


def ask(
    arguments: Sequence[str],
    env: Mapping[str, str],
    *,
    cwd: Path | None = None,
    deadline_s: float,
    ahead: Ahead | None = None,
    is_cold: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run ``megascale-ops`` to its end.

    Args:
        arguments: Of the program.
        env: Its environment.
        cwd: Where it runs; None: here.
        deadline_s: How long it may take.
        ahead: For a runner that is forked.
        is_cold: It is started as a program in any case.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was killed.
    """
    if is_cold or not _parent().takes(env):
        line = [*PROGRAM, *arguments]
        return subprocess.run(line, env=env, cwd=cwd, capture_output=True, text=True, timeout=deadline_s, check=False)
    return _to_its_end(lambda out, err: _parent().fork(arguments, env, out, err, cwd, ahead=ahead), deadline_s)


def _to_its_end(
    start_it: Callable[[IO[bytes], IO[bytes]], Forked], deadline_s: float
) -> "subprocess.CompletedProcess[str]":
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        proc = start_it(out.buffer, err.buffer)
        try:
            code = proc.wait(deadline_s)
        except subprocess.TimeoutExpired:
            os.killpg(proc.pid, signal.SIGKILL)
            raise
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess(proc.args, code, out.read(), err.read())


def spent_s() -> float:
    """Return the CPU time of what was forked and has ended, for ``--cpu-times``."""
    return _parent().cpu_s if _parent.cache_info().currsize else 0.0
