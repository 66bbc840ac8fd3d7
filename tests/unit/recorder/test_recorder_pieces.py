# SPDX-License-Identifier: Apache-2.0
"""The recorder's smaller parts: settings, stepping aside, the import hook, the beat's position, the last exception."""

import errno
import gc
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.blackbox.writer import collective_name
from megascale_ops.recorder import hook_guard
from megascale_ops.recorder.first_use import open_first
from megascale_ops.recorder.hook_guard import guarded, guarded_about, guarded_plain, step_aside
from megascale_ops.recorder.recording.api import Recorder
from megascale_ops.recorder.recording.config import read_settings
from megascale_ops.recorder.recording.endings import describe
from megascale_ops.recorder.recording.monitor_thread import inside, read_position
from megascale_ops.recorder.torch_hooks import import_hook

RANK = {"RANK": "3", "MEGASCALE_BOX_DIR": "/box/gpt"}


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins with nothing said yet."""
    monkeypatch.setattr(hook_guard, "_said", set())


def test_settings_of_a_rank() -> None:
    """The launcher's variables and ours make the identity."""
    environ = {
        **RANK, "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MEGASCALE_JOB": "gpt", "MEGASCALE_NODE": "n1",
        "MEGASCALE_ROUND": "4", "MEGASCALE_STDERR_PATH": "/run/stderr.log",
    }  # fmt: skip

    found = read_settings(environ, 10)

    assert found is not None
    assert (found.job, found.node, found.round, found.rank, found.local_rank) == ("gpt", "n1", 4, 3, 1)
    assert (found.world_size, found.stderr_path, found.box_dir) == (8, "/run/stderr.log", Path("/box/gpt"))


def test_settings_have_defaults() -> None:
    """Rank and folder suffice."""
    found = read_settings(RANK, 10)

    assert found is not None
    assert (found.job, found.node, found.round, found.local_rank) == ("gpt", os.uname().nodename, 0, -1)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0"},
        {"MEGASCALE_BOX_DIR": "/box"},
        {**RANK, "MEGASCALE_RECORDER": "0"},
        {**RANK, "MEGASCALE_CLAIMED_BY": "11"},
    ],
)
def test_no_rank_no_settings(environ: dict[str, str]) -> None:
    """Outside of a run, switched off, or in a child of a rank there is nothing to record."""
    assert read_settings(environ, 10) is None


def test_a_claim_of_ones_own_counts() -> None:
    """A process that replaced itself by exec is still the rank."""
    assert read_settings({**RANK, "MEGASCALE_CLAIMED_BY": "10"}, 10) is not None


def test_stepping_aside_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """One line per piece, with the reason."""
    step_aside("the beat", ValueError("first\nreason"))
    step_aside("the beat", ValueError("second"))

    assert capsys.readouterr().err == "megascale-ops recorder: the beat steps aside: ValueError: first reason\n"


class Full(io.StringIO):
    """A stderr on a disk without room."""

    def write(self, text: str) -> int:
        """Write nothing."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), len(text))


def closed() -> io.StringIO:
    """Return a stderr that was closed."""
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stderr", [lambda: None, closed, Full], ids=["none", "closed", "full"])
def test_stepping_aside_without_a_stderr(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], stderr: Callable[[], io.StringIO | None]
) -> None:
    """A process that has no stderr is not ended by our message: the piece is off, and nothing is written elsewhere."""
    calls = []

    def event() -> None:
        calls.append(1)
        raise ValueError("x")

    monkeypatch.setattr(sys, "stderr", stderr())
    monkeypatch.setattr(sys, "__stderr__", None)
    safe = guarded_plain("the beat", event)

    safe()
    safe()

    assert calls == [1]
    assert capfd.readouterr() == ("", "")


def test_a_guarded_event_fails_once(capsys: pytest.CaptureFixture[str]) -> None:
    """After its first failure an event is not tried again, and nothing is raised."""
    calls = []

    def event(value: int) -> None:
        calls.append(value)
        raise RuntimeError("no")

    safe = guarded("the hook", event)
    safe(1)
    safe(2)

    assert calls == [1]
    assert capsys.readouterr().err.count("the hook steps aside") == 1


def test_the_short_guards_fail_once_too(capsys: pytest.CaptureFixture[str]) -> None:
    """The one without arguments, and the one that drops what torch's hooks are told besides."""
    calls: list[object] = []

    def event(thing: object = None) -> None:
        calls.append(thing)
        raise RuntimeError("no")

    plain, about = guarded_plain("the plain hook", event), guarded_about("the other hook", event)
    for _ in range(2):
        plain()
        about("optimizer", (), {})

    assert calls == [None, "optimizer"]
    err = capsys.readouterr().err
    assert (err.count("the plain hook steps aside"), err.count("the other hook steps aside")) == (1, 1)


@pytest.fixture
def make_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """Return a function that writes an importable module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        made.append(name)
        return name

    before = list(sys.meta_path)
    yield make
    sys.meta_path[:] = before
    for name in made:
        sys.modules.pop(name, None)
        import_hook._waiting.pop(name, None)


def test_the_hook_runs_once_after_the_import(make_module: Callable[[str, str], str]) -> None:
    """The module is complete when the callback runs; a second import or reload calls nothing."""
    name = make_module("megascale_hooked_a", "value = 41\nvalue += 1\n")
    seen = []
    import_hook.after_import(name, lambda: seen.append(sys.modules[name].value))

    module = importlib.import_module(name)
    importlib.import_module(name)
    importlib.reload(module)

    assert seen == [42]
    assert module.__spec__ is not None
    assert "exec_module" not in vars(module.__spec__.loader)


def test_a_failing_callback_does_not_fail_the_import(
    make_module: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The import succeeds, and one line says what stepped aside."""
    name = make_module("megascale_hooked_b", "")

    def fail() -> None:
        raise RuntimeError("not today")

    import_hook.after_import(name, fail)
    importlib.import_module(name)

    assert f"the hook on {name} steps aside: RuntimeError: not today" in capsys.readouterr().err


def test_a_failing_import_fails_as_ever(make_module: Callable[[str, str], str]) -> None:
    """The module's own exception passes, and the callback waits for an import that succeeds."""
    name = make_module("megascale_hooked_c", "raise ZeroDivisionError('mine')\n")
    seen: list[int] = []
    import_hook.after_import(name, lambda: seen.append(1))

    with pytest.raises(ZeroDivisionError, match="mine"):
        importlib.import_module(name)
    make_module(name, "value = 123456\n")
    importlib.import_module(name)

    assert seen == [1]


def test_nobody_looks_for_garbage_during_the_import(make_module: Callable[[str, str], str]) -> None:
    """The collector is off while what is waited for is imported, and on again for the script, also when that fails."""
    name = make_module("megascale_hooked_e", "import gc\nwas_on = gc.isenabled()\n")
    failing = make_module("megascale_hooked_f", "raise ZeroDivisionError('mine')\n")
    frozen = gc.get_freeze_count()
    for each in (name, failing):
        import_hook.after_import(each, lambda: None)

    module = importlib.import_module(name)
    with pytest.raises(ZeroDivisionError, match="mine"):
        importlib.import_module(failing)

    assert not module.was_on
    assert gc.isenabled()
    # This test is a function, during which garbage of its own may exist: nothing is left out. What was before, may go.
    assert gc.get_freeze_count() <= frozen


def test_a_module_that_does_not_exist_is_not_found(make_module: Callable[[str, str], str]) -> None:
    """Waiting for a module does not make it exist."""
    make_module("megascale_hooked_d", "")
    import_hook.after_import("megascale_hooked_none", lambda: None)

    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("megascale_hooked_none")


def status(**groups: tuple[int, int]) -> bytes:
    """Return torch's status of process groups, enqueued and completed, as its flight recorder prints it."""
    pg_status = {
        name.removeprefix("g"): {"last_enqueued_collective": str(a), "last_completed_collective": str(b)}
        for name, (a, b) in groups.items()
    }
    return json.dumps({"version": "2.10", "pg_status": pg_status}).encode()


@pytest.mark.parametrize(
    ("dump", "position"),
    [
        (status(), (-1, -1, "")),
        (status(g0=(6, 5)), (6, 5, "pg 0")),
        (status(g0=(6, 6), g1=(3, 2), g2=(9, 1)), (3, 2, "pg 1")),
        (status(g2=(4, 4), g10=(1, 1)), (4, 4, "pg 2")),
        (b"", (-1, -1, "")),
        (b'{"pg_status": {"0": {}}}', (-1, -1, "")),
    ],
)
def test_the_position_is_that_of_the_first_group_that_waits(dump: bytes, position: tuple[int, int, str]) -> None:
    """A group with more enqueued than completed says most; without one, the first group stands for all."""
    assert read_position(dump) == position


@pytest.mark.parametrize(
    ("nccl", "others", "position"),
    [
        (status(g0=(6, 5)), status(), (6, 5, "pg 0")),
        (status(g0=(6, 6)), status(g0=(-1, -1)), (6, 6, "pg 0")),
        (status(g0=(-1, -1)), status(g0=(4, 4)), (4, 4, "pg 0")),
        (status(g0=(6, 6)), status(g3=(2, 1)), (2, 1, "pg 3")),
        (b"no json", status(g0=(4, 4)), (4, 4, "pg 0")),
    ],
)
def test_of_two_recorders_the_one_that_says_something_counts(
    nccl: bytes, others: bytes, position: tuple[int, int, str]
) -> None:
    """Under NCCL the recorder of all other backends is empty, and the other way round; with both in use, who waits."""
    assert read_position(nccl, others) == position


@pytest.mark.parametrize(
    ("known", "position"),
    [
        ((-1, -1, ""), (1, 0, "pg 0")),
        ((7, 7, "pg 0"), (8, 7, "pg 0")),
        ((7, 7, "pg 2"), (1, 0, "pg 0")),
    ],
)
def test_a_call_that_torch_does_not_count_yet_is_the_next(
    known: tuple[int, int, str], position: tuple[int, int, str]
) -> None:
    """NCCL's first collective of a group waits for all members before it is counted."""
    assert inside(known, "0") == position


def test_a_group_has_one_name_in_heartbeats_and_in_the_ring() -> None:
    """Torch names the parts of a split group by a hash of 40 digits, of which the ring holds 23."""
    name = "da39a3ee5e6b4b0d3255bfef95601890afd80709"
    held = collective_name(name).decode()

    position = read_position(status(**{f"g{name}": (7, 7)}))

    assert position == (7, 7, f"pg {held}")
    assert inside(position, held) == (8, 7, f"pg {held}")


@given(
    st.binary() | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(lambda x: json.dumps(x).encode())
)
def test_any_status_is_survived(dump: bytes) -> None:
    """A torch that prints something else gives no position, and no exception."""
    assert read_position(dump) == (-1, -1, "")


class BadError(Exception):
    """An exception that cannot say what is wrong."""

    def __str__(self) -> str:
        raise ValueError("broken")


def raised(error: Exception) -> BaseException:
    """Return ``error`` with the traceback of having been raised through a library."""
    try:
        json.loads("[1]", object_hook=lambda _: None, parse_int=lambda _: (_ for _ in ()).throw(error))
    except Exception as caught:  # noqa: BLE001  that is what we return
        return caught
    raise AssertionError("nothing was raised")


def test_the_last_exception_names_the_scripts_innermost_frame() -> None:
    """Frames of Python's own library and of packages are passed over."""
    found = describe(raised(KeyError("lr")), 12)

    assert (found.type, found.message, found.step) == ("KeyError", "'lr'", 12)
    assert found.where.startswith(f"{__file__}:")


@pytest.mark.parametrize("folder", ["other/lib/python3.11/site-packages/torch", "usr/lib/python3/dist-packages/torch"])
def test_packages_of_another_environment_are_passed_over(tmp_path: Path, folder: str) -> None:
    """An environment that stands on another one, as in many images, has its libraries there."""
    package = compile("def load(path):\n    raise OSError(path)\n", str(tmp_path / folder / "serialization.py"), "exec")
    names: dict[str, Any] = {}
    exec(package, names)  # noqa: S102  a frame of a file that is not installed here

    with pytest.raises(OSError, match="last") as caught:
        names["load"]("last.pt")

    assert describe(caught.value, 3).where.startswith(f"{__file__}:")


def test_an_exception_without_words_is_still_described() -> None:
    """A broken __str__ costs the message only; one never raised has no place."""
    found = describe(BadError(), -1)

    assert found.type == f"{__name__}.BadError"
    assert found.message == "(its message cannot be read: ValueError)"
    assert found.where == ""


def test_the_explicit_api_does_nothing_outside_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and phases pass, and exceptions inside a phase are the script's own."""
    monkeypatch.delenv("MEGASCALE_BOX_DIR", raising=False)
    recorder = Recorder()

    recorder.step()
    recorder.step(7)
    with recorder.phase("eval"), recorder.phase("inner"):
        pass
    with pytest.raises(KeyError, match="mine"), recorder.phase("eval"):
        raise KeyError("mine")


def test_a_process_that_may_become_a_rank_is_asked_again() -> None:
    """A phase before the first step of a wrapped launcher's process settles nothing; its first step does."""
    asked: list[bool] = []
    recorder = Recorder()
    recorder.open_with(lambda trains: asked.append(trains) or trains)  # type: ignore[func-returns-value]  a list's

    with recorder.phase("load"), recorder.phase("inner"):
        recorder.step()
    recorder.step()
    recorder.loss(0.5)

    assert asked == [False, False, True]


def test_a_box_that_cannot_be_made_costs_a_wrapped_script_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The explicit API is the first to ask for it, and an error must not be the script's."""
    (tmp_path / "file").touch()
    for name, value in (("BOX_DIR", str(tmp_path / "file" / "boxes")), ("WRAPPED", "1"), ("NODE", "n")):
        monkeypatch.setenv(f"MEGASCALE_{name}", value)
    monkeypatch.delenv("MEGASCALE_CLAIMED_BY", raising=False)
    monkeypatch.delenv("MEGASCALE_RECORDER", raising=False)
    monkeypatch.setattr(hook_guard, "_said", set())
    recorder = Recorder()
    recorder.open_with(open_first)

    recorder.step()
    recorder.step()

    err = capsys.readouterr().err
    assert err.startswith("megascale-ops recorder: the black box steps aside: ")
    assert err.count("\n") == 1
