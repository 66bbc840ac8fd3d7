# SPDX-License-Identifier: Apache-2.0
"""What the checks of GPUs say of numbers that were drawn; measuring itself is in ``tests/gpu``."""

import random
from statistics import median

import pytest

from megascale_ops.diagnostics import expected
from megascale_ops.diagnostics.check import Reading
from megascale_ops.diagnostics.figures import KINDS
from megascale_ops.diagnostics.gpu import agreement, fabric_manager, gemm, hbm, hbm_pattern, health, nvlink
from megascale_ops.diagnostics.judgement import result_of
from megascale_ops.diagnostics.report import CheckFinding, Fact, Figure

H100 = "NVIDIA H100 80GB HBM3"


def rates(name: str, values: list[float], model: str = H100) -> Reading:
    """Return one figure of each GPU, with repetitions that vary by 0.1 %."""
    draw = random.Random(len(values))  # noqa: S311  nothing of it is a secret
    figures = []
    for number, value in enumerate(values):
        samples = tuple(value * draw.gauss(1, 0.001) for _ in range(10))
        figures.append(Figure(name, f"GPU {number}", median(samples), samples, model))
    return Reading(tuple(figures))


def named(findings: list[CheckFinding], severity: str = "bad") -> list[str]:
    """Return what findings of a severity are of."""
    return [one.of for one in findings if one.severity == severity]


def test_a_gpu_five_percent_slow_is_named_among_eight() -> None:
    """With its number, its equals' and the bar; the seven others are not."""
    found = result_of(gemm.CHECK, rates("gemm_bf16", [700e12] * 7 + [664e12]), gemm.judge, 1.0)

    assert named(list(found.findings)) == ["GPU 7"]
    assert found.findings[0].text.startswith(
        "GPU 7: bf16 matrix products 664 TFLOP/s, 5.2% less than the median of the "
    )
    assert "7 others, 700 TFLOP/s (named from 4.0% on)" in found.findings[0].text
    assert found.status == "bad"


def test_all_slow_alike_are_a_warning_by_their_model() -> None:
    """No equal differs, so the model's figure is asked: 60 % of it is a warning with its source, 40 % is bad."""
    sixty = result_of(hbm.CHECK, rates("hbm_copy", [0.6 * 2.9e12] * 8), hbm.judge, 1.0)
    forty = result_of(hbm.CHECK, rates("hbm_copy", [0.4 * 2.9e12] * 8), hbm.judge, 1.0)

    assert (sixty.status, len(sixty.findings)) == ("warn", 8)
    assert "60% of the 2.9 TB/s of H100 SXM (device-to-device copy, VoltagePark)" in sixty.findings[0].text
    assert forty.status == "bad"


def test_a_model_without_a_table_is_judged_by_its_equals_alone() -> None:
    """Nothing is expected of it."""
    found = result_of(hbm.CHECK, rates("hbm_copy", [1e9] * 8, "Some GPU"), hbm.judge, 1.0)

    assert found.status == "good"


def test_tables_of_models_are_whole() -> None:
    """Each figure is one that is measured, with a source, and a floor that can be passed and failed."""
    assert {model.title for model in expected.models()} >= {"H100 SXM", "H200 SXM", "A100 SXM 80 GB", "B200"}
    for model in expected.models():
        assert model.names
        for name, row in model.figures.items():
            assert KINDS[name].bar
            assert 0.5 < row.floor < 1
            assert len(row.source) > 5
            good = Figure(name, "GPU 0", row.value, peers=f"{model.names[0]}, {row.gpus} GPUs")
            assert expected.judge(good) is None
            assert expected.judge(Figure(name, "GPU 0", row.value * 0.49, peers=good.peers)) is not None


def test_a_collective_of_two_gpus_is_not_held_against_eight() -> None:
    """Its figure is expected of eight GPUs only."""
    slow = Figure("all_reduce", "node", 1e9, peers=f"{H100}, 2 GPUs")

    assert expected.judge(slow) is None
    assert expected.judge(Figure("all_reduce", "node", 1e9, peers=f"{H100}, 8 GPUs")) is not None


def test_clocks_that_were_lowered_are_told_with_their_reason() -> None:
    """A tenth of the load's time by heat; less, and the power limit, is how GPUs run."""

    def told(share: float) -> list[CheckFinding]:
        figures = (Figure("throttled", "GPU 1", share), Figure("gpu_clock", "GPU 1", 1.1e9))
        return gemm.judge(Reading(figures, (Fact("clock_reasons", "GPU 1", "hw_thermal 40%"),)))

    assert told(0.05) == []
    assert "40% of the load's time (hw_thermal 40%), 1100 MHz" in told(0.4)[0].text


def digests(*values: str) -> Reading:
    """Return the digests of one product on as many GPUs."""
    return Reading((), tuple(Fact("product_digest", f"GPU {at}", value, H100) for at, value in enumerate(values)))


def test_a_gpu_that_computes_otherwise_is_named() -> None:
    """By the majority; two that disagree are told as that; a GPU that differs from itself is named alone."""
    assert agreement.judge(digests(*"aaaaaaaa")) == []
    assert named(agreement.judge(digests(*"aaabaaaa"))) == ["GPU 3"]
    split = agreement.judge(digests("a", "b"))
    assert len(split) == 1
    assert "GPU 0, GPU 1 disagree" in split[0].text
    wrong = Reading((Figure("products", "GPU 2", 101), Figure("products_wrong", "GPU 2", 1)))
    assert named(agreement.judge(wrong)) == ["GPU 2"]


def test_one_wrong_word_of_memory_is_bad() -> None:
    """And none is good."""

    def told(wrong: float) -> list[CheckFinding]:
        return hbm_pattern.judge(Reading((Figure("hbm_tested", "GPU 0", 2 << 30), Figure("hbm_wrong", "GPU 0", wrong))))

    assert told(0) == []
    assert named(told(1)) == ["GPU 0"]


def test_patterns_come_back_and_damage_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that torch has everywhere: memory that is well has no wrong word; one that flips a bit has some."""
    torch = pytest.importorskip("torch")
    assert hbm_pattern.wrong_words(3, "cpu", 1000) == 0

    real = torch.count_nonzero
    seen = []

    def flipped(differs: object) -> object:
        seen.append(differs)
        count = real(differs)
        return count + 1 if len(seen) == 7 else count

    monkeypatch.setattr(torch, "count_nonzero", flipped)

    assert hbm_pattern.wrong_words(3, "cpu", 1000) == 1
    assert len(seen) == 3 * 2 * 5  # pieces, readings, patterns


def test_pieces_that_lie_on_each_other_are_found() -> None:
    """The control of addresses: two pieces of one memory, as with an address line that is stuck."""
    torch = pytest.importorskip("torch")
    real, first = torch.empty, []

    def aliased(size: int, **options: object) -> object:
        made = real(size, **options)
        first.append(made)
        return first[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", aliased)
        assert hbm_pattern.wrong_words(2, "cpu", 1000) >= 2000


def test_pairs_without_peer_access_are_told_where_others_have_it() -> None:
    """A machine without any has none to lose."""
    both = (
        Fact("pair_path", "GPU 0 and GPU 1", "peer access"),
        Fact("pair_path", "GPU 0 and GPU 2", "through the host"),
    )

    assert named(nvlink.judge(Reading((), both))) == ["GPU 0 and GPU 2"]
    assert nvlink.judge(Reading((), both[1:])) == []
    assert nvlink.judge(Reading((), both[:1])) == []


def test_a_slow_link_is_named_by_its_pair() -> None:
    """One of 28 pairs of eight GPUs, at 90 %."""
    figures = [Figure("nvlink_both_ways", f"GPU {a} and GPU {b}", 672e9, (672e9,) * 10, f"{H100}, peer access")
               for a in range(8) for b in range(a)]  # fmt: skip
    figures[5] = Figure(*("nvlink_both_ways", "GPU 3 and GPU 2", 605e9), (605e9,) * 10, f"{H100}, peer access")

    found = result_of(nvlink.CHECK, Reading(tuple(figures)), nvlink.judge, 1.0)

    assert named(list(found.findings)) == ["GPU 3 and GPU 2"]


def test_what_gpus_tell_of_themselves() -> None:
    """Narrow PCIe links, NVLinks that are down, what the agent's table says, versions that are not the majority's."""
    figures = [Figure("gpu_processes", "GPU 3", 2)]
    figures += [Figure(name, f"GPU {at}", value) for at in range(4) for name, value in (
        ("pcie_width", 8 if at == 1 else 16), ("pcie_width_most", 16), ("nvlinks", 18),
        ("nvlinks_active", 16 if at == 2 else 18),
    )]  # fmt: skip
    facts = [Fact("vbios", f"GPU {at}", "96.00.61" if at == 3 else "96.00.74", "GPU") for at in range(4)]
    facts += [Fact("told_fail", "GPU 0", "does not answer any more: it is lost"), Fact("uuid", "GPU 0", "GPU-1")]

    found = health.judge(Reading(tuple(figures), tuple(facts)))

    assert named(found) == ["GPU 0", "GPU 1", "GPU 2"]
    assert named(found, "warn") == ["GPU 3"]
    assert "8 of 16 lanes" in found[1].text
    assert "16 of 18 NVLinks are up, 18 on the others" in found[2].text
    assert [one.text for one in found if one.severity == "note"] == [
        "GPU 3: 2 processes are on it, and may slow what is measured",
    ]
    assert "vbios 96.00.61, where 3 of 4 have 96.00.74" in found[4].text
    assert health.judge(Reading(tuple(figures[1:5]), tuple(facts[:1]))) == []


def test_the_fabric_manager_is_missed_where_there_are_switches() -> None:
    """GPUs that have not joined the fabric are bad; a process that can't be seen is a warning, unless they have."""

    def told(*facts: Fact) -> list[CheckFinding]:
        return fabric_manager.judge(Reading((), facts))

    gone = Fact("fabric_manager", "node", "not seen")
    assert named(told(gone, Fact("fabric_state", "GPU 0", "not started"))) == ["GPU 0"]
    assert named(told(gone), "warn") == ["node"]
    assert told(gone, Fact("fabric_state", "GPU 0", "completed")) == []
    assert told(Fact("fabric_manager", "node", "lives")) == []
