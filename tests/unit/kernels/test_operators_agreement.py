# SPDX-License-Identifier: Apache-2.0
"""Ranks agree before a collective; graphs begin with a meeting."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

import torch.distributed as dist  # noqa: E402 - after the skips
from megascale_kernels.errors import KernelError, RankMismatch, TileTimeout  # noqa: E402
from megascale_kernels.memory import graph_capture  # noqa: E402
from megascale_kernels.memory import workspace as workspaces  # noqa: E402
from megascale_kernels.memory.agreement import Agreement  # noqa: E402


def together(*acts: Callable[[], Any]) -> list[Any]:
    """Run one function per rank at the same time; give what each returned or raised."""
    results: list[Any] = [None] * len(acts)

    def run(rank: int) -> None:
        try:
            results[rank] = acts[rank]()
        except (RankMismatch, TileTimeout) as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def ranks(count: int) -> tuple[dist.HashStore, list[Agreement]]:
    """Ranks that talk through one store."""
    store = dist.HashStore()
    return store, [Agreement(store, "talk", rank, count) for rank in range(count)]


def ignore(_: int) -> None:
    """Nobody wants to know who is waited for."""


def test_ranks_that_say_the_same_go_on() -> None:
    """Round after round, and old rounds are forgotten: the store does not grow."""
    store, both = ranks(2)

    for _ in range(5):
        assert together(*(lambda a=a: a.compare("f(M 1)", 5.0, ignore) for a in both)) == [None, None]

    assert store.num_keys() <= 2 * 3


def test_ranks_that_differ_all_raise() -> None:
    """Each names itself and one that differs."""
    _, three = ranks(3)
    sayings = ("f(M 1)", "f(M 1)", "f(M 2)")

    raised = together(*(lambda a=a, s=s: a.compare(s, 5.0, ignore) for a, s in zip(three, sayings, strict=True)))

    assert all(isinstance(error, RankMismatch) for error in raised)
    assert "rank 0 runs f(M 1); rank 2 runs f(M 2)" in str(raised[0])


def test_a_late_rank_raises_too() -> None:
    """Whoever comes after the others gave up does not go on alone; a reset begins anew."""
    _, both = ranks(2)
    waited: list[int] = []

    began = time.monotonic()
    with pytest.raises(TileTimeout, match=r"rank 0, f\(M 1\): rank 0 waited 0.050 s for rank 1") as first:
        both[0].compare("f(M 1)", 0.05, waited.append)
    took_s = time.monotonic() - began
    with pytest.raises(TileTimeout, match=r"rank 1, f\(M 1\): rank 0 waited 0.050 s for rank 1"):
        both[1].compare("f(M 1)", 5.0, ignore)

    assert took_s >= 0.05
    assert (first.value.peer, first.value.operator, set(waited)) == (1, "f", {1})
    for one in both:
        one.reset()
    assert together(*(lambda a=a: a.compare("f(M 1)", 5.0, ignore) for a in both)) == [None, None]


def test_a_store_that_is_gone_is_said_in_one_sentence() -> None:
    """The process that keeps a TCP store may die first: whoever asks it then is told what has ended, and who it was."""

    class Gone(dist.HashStore):
        """A store whose keeper has died."""

        def set(self, key: str, value: str) -> None:
            """What torch raises then."""
            raise dist.DistNetworkError(f"Failed to recv, got 0 bytes for {key}={value}\nframe #0")

    with pytest.raises(KernelError, match=r"rank 1, f\(M 1\): the group's store is gone.*job's rank 0") as raised:
        Agreement(Gone(), "talk", 1, 2).compare("f(M 1)", 5.0, ignore)

    assert "\n" not in str(raised.value)


def test_what_is_known_is_not_asked_again() -> None:
    """`compare_once` asks the store for the first of each saying only."""
    _, both = ranks(2)

    for _ in range(3):
        together(*(lambda a=a: a.compare_once("f(M 1)", 5.0, ignore) for a in both))

    assert [a.rounds for a in both] == [1, 1]


def test_without_a_store_nothing_is_compared() -> None:
    """A group that was not made by torch's front door works, unchecked."""
    Agreement(None, "talk", 0, 2).compare("f", 0.0, ignore)


# --- graphs --------------------------------------------------------------------------------------------------------


def test_no_driver_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where libcuda is not there, or the stream is not captured, there is no capture to tell apart."""
    monkeypatch.setattr(graph_capture, "_driver_call", lambda: None)

    assert graph_capture.capture_number(0) is None


@pytest.mark.parametrize(("failed", "status", "number"), [(0, 1, 7), (0, 0, None), (1, 1, None)])
def test_the_driver_is_believed(monkeypatch: pytest.MonkeyPatch, failed: int, status: int, number: int | None) -> None:
    """Only an active capture has a number."""

    def call(_stream: object, *outputs: Any) -> int:  # noqa: ANN401 - what ctypes makes of them has no name
        outputs[0]._obj.value, outputs[1]._obj.value = status, 7
        return failed

    monkeypatch.setattr(graph_capture, "_driver_call", lambda: call)

    assert graph_capture.capture_number(1) == number


class Stream:
    """The stream that is current."""

    cuda_stream = 1


def test_every_graph_begins_with_one_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch of a capture meets, the others do not; after a capture every eager launch meets."""
    meetings = []
    workspace = workspaces.Workspace.__new__(workspaces.Workspace)
    workspace.__dict__.update(
        device=torch.device("cuda"), captured=False, _capture=None, compiled={"warm"}, slot=0, launches=0, deadline_s=1
    )
    state = {"number": None}
    monkeypatch.setattr(workspace, "check", lambda *, synchronize: None)  # noqa: ARG005 - it is called by name
    monkeypatch.setattr(workspace, "meet", lambda deadline_s=None: meetings.append(deadline_s))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["number"] is not None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream)
    monkeypatch.setattr(workspaces, "capture_number", lambda _: state["number"])

    counts = []
    for number in (None, 1, 1, 1, 2, 2, None, None):
        state["number"] = number
        before = len(meetings)
        workspace.begin("warm", lambda: None)
        counts.append(len(meetings) - before)

    assert counts == [0, 1, 0, 0, 1, 0, 1, 1]
