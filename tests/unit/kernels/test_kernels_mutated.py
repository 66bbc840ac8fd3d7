# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN201, ARG001
# (kernels: their types are Triton's to infer; who stands for another takes its arguments)
"""What our kernels would be without a fence, a barrier, a release, a wait or a slot: the race detector says so.

Each line of `signals.py` that orders something is taken away, and each time the emulator finds it, in our kernels and
not in toys. Where a kernel does not need the line, nothing is found: the detector does not cry wolf.
"""

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402
from megascale_kernels.device import primitives, signals  # noqa: E402
from megascale_kernels.emulate import NARROW, RACE, UNDRAINED, UNFENCED, UNSYNCED  # noqa: E402
from megascale_kernels.planning.config import Config  # noqa: E402

from tests.fakes.launched import launched  # noqa: E402
from tests.fakes.products import Case  # noqa: E402

GRAPH = ("ag_gemm", Case(2, 16, 32, 32, counted=True))
BY_SM = ("ag_gemm", Case(2, 16, 32, 32, config=Config(16, 32, 32, group_m=2, carrier="sm", comm_ctas=1)))
BY_TMA = ("gemm_rs", Case(2, 16, 32, 32))
BY_STORES = ("gemm_rs", Case(2, 16, 32, 32, config=Config(16, 32, 32, group_m=2, push_tma=False)))
TO_ALL = ("gemm_ar", Case(2, 16, 32, 32))
RUNS = {"copied": GRAPH, "pushed": BY_SM, "by TMA": BY_TMA, "by stores": BY_STORES, "to all": TO_ALL}


@triton.jit
def publish_relaxed(channel, flag_ptr):
    """`signals.publish` without the release."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, channel.stamp, sem="relaxed", scope="sys")


@triton.jit
def publish_to_gpu(channel, flag_ptr):
    """`signals.publish` for this GPU alone."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, channel.stamp, sem="release", scope="gpu")


@triton.jit
def publish_without_barrier(channel, flag_ptr):
    """`signals.publish` by a thread that has not waited for the others."""
    tl.atomic_xchg(flag_ptr, channel.stamp, sem="release", scope="sys")


@triton.jit
def do_not_wait(channel, flag_ptr, role, tile, peer, index):
    """`signals.wait_for` that looks, and goes on whatever it saw."""
    tl.atomic_add(flag_ptr, 0, sem="relaxed", scope="sys")
    return 0


def kinds(run: str, **options: object) -> set[str]:
    """The kinds of findings in two launches of an operator."""
    operator, case = RUNS[run]
    done = launched(operator, case, launches=2, seed=2, **options)
    return {finding.kind for finding in done.ranks.world.findings}


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Replace parts of the primitives."""
    yield monkeypatch
    monkeypatch.undo()


@pytest.mark.parametrize("run", list(RUNS))
def test_unchanged_kernels_are_clean(run: str) -> None:
    """The control: the same runs, nothing taken away, nothing found."""
    assert kinds(run) == set()


@pytest.mark.parametrize("run", list(RUNS))
def test_a_relaxed_notify_is_found(run: str, silent: pytest.MonkeyPatch) -> None:
    """Without the release, what the flag announces is in no order with those who read it."""
    silent.setattr(primitives, "publish", publish_relaxed)

    assert kinds(run) == {RACE}


@pytest.mark.parametrize("run", list(RUNS))
def test_a_release_for_one_gpu_is_found(run: str, silent: pytest.MonkeyPatch) -> None:
    """The scope must be the system: a peer reads."""
    silent.setattr(primitives, "publish", publish_to_gpu)

    assert kinds(run) == {NARROW, RACE}


@pytest.mark.parametrize("run", ["pushed", "by stores", "to all"])
def test_a_missing_barrier_is_found(run: str, silent: pytest.MonkeyPatch) -> None:
    """The thread that releases must have met those that stored."""
    silent.setattr(primitives, "publish", publish_without_barrier)

    assert kinds(run) == {UNSYNCED}


@pytest.mark.parametrize("run", list(RUNS))
def test_a_missing_wait_is_found(run: str, silent: pytest.MonkeyPatch) -> None:
    """Whoever does not wait reads what may not be there yet, also when it was."""
    silent.setattr(primitives, "wait_for", do_not_wait)

    assert RACE in kinds(run)


@pytest.mark.parametrize(("run", "expected"), [("by TMA", {UNDRAINED}), ("by stores", set()), ("copied", set())])
def test_a_missing_drain_is_found(run: str, expected: set[str]) -> None:
    """TMA stores are announced before they are written, unless they are drained; other stores do not need it."""
    undrained = {signals.ASM_BULK_WAIT.value: lambda _: 0}

    assert kinds(run, assembly=undrained) == expected


@pytest.mark.parametrize(
    ("run", "expected"), [("copied", {UNFENCED}), ("pushed", {UNFENCED}), ("by TMA", set()), ("to all", set())]
)
def test_a_missing_proxy_fence_is_found(run: str, expected: set[str]) -> None:
    """TMA loads of what was acquired need the fence; the reductions read by ordinary loads and do not."""
    unfenced = {signals.ASM_FENCE_PROXY.value: lambda _: 0}

    assert kinds(run, assembly=unfenced) == expected


@pytest.mark.parametrize("run", list(RUNS))
def test_one_slot_is_too_few(run: str) -> None:
    """Always the same slot: a rank that is a launch ahead overwrites what a peer still reads (write after read)."""
    operator, case = RUNS[run]
    findings = []
    for seed in (0, 2):
        done = launched(operator, case, launches=4, slots=1, seed=seed, ctas=2 if run == "pushed" else 1)
        findings += done.ranks.world.findings

    hits = [one for one in findings if one.place.split(": ")[1].startswith("data slot")]
    assert {finding.kind for finding in hits} == {RACE}
    reads = ("load", "TMA load")
    assert any(one.first.operation in reads and one.second.operation not in reads for one in hits)
