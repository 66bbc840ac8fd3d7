# SPDX-License-Identifier: Apache-2.0
"""Who of several copies is wrong, and what is said where nobody can tell."""

from megascale_ops.checkpoint.trust.verdicts import Bucket, differing, judge, odd_ones, told_others


def held(*digests: str, key: str = "model.w") -> list[dict[tuple[str, str], bytes]]:
    """One tensor's digest on each rank; "" where a rank has no such part."""
    return [{(f"{key} layout", key): digest.encode()} if digest else {} for digest in digests]


def test_equal_copies_are_no_news() -> None:
    """Neither in the summaries nor one by one."""
    summaries = [[Bucket(b"l", b"c", 3)], [Bucket(b"l", b"c", 3)], [Bucket(b"other", b"d", 1)]]

    assert not differing(summaries)
    assert not odd_ones(held("a", "a", "a"))


def test_another_content_of_one_layout_is_in_doubt() -> None:
    """Layouts that differ hold different things and are not compared."""
    summaries = [[Bucket(b"l", b"c", 3), Bucket(b"m", b"x", 1)], [Bucket(b"l", b"d", 3)], [Bucket(b"n", b"y", 1)]]

    assert differing(summaries) == {b"l"}


def test_the_minority_is_named() -> None:
    """Of three, of five with two wrong ones, of those that hold it."""
    (of_three,) = odd_ones(held("a", "b", "a"))
    (of_five,) = odd_ones(held("a", "b", "a", "a", "c"))
    (of_some,) = odd_ones(held("", "a", "", "a", "b"))

    assert (of_three.ranks, of_three.has_majority, of_three.against) == ((1,), True, 0)
    assert (of_five.ranks, of_five.has_majority) == ((1, 4), True)
    assert (of_some.ranks, of_some.of) == ((4,), (1, 3, 4))


def test_without_a_majority_all_are_named() -> None:
    """A pair; two against two; each its own. Exactly a half is none."""
    assert [odd_ones(held(*digests))[0].ranks for digests in ("ab", "abab", "abc", "aabc")] == [
        (0, 1),
        (0, 1, 2, 3),
        (0, 1, 2),
        (0, 1, 2, 3),
    ]
    assert not any(odd_ones(held(*digests))[0].has_majority for digests in ("ab", "abab", "abc", "aabc"))
    assert odd_ones(held(*"aabb"))[0].against == 2


def test_a_rank_is_named_by_its_number_in_the_whole_job() -> None:
    """With the tensors, at most four of them, and what is known of the difference."""
    odd = [one for number in range(6) for one in odd_ones(held("a", "b", "a", key=f"w{number}"))]

    (alarm,) = judge(odd, {"w0": "1 of 9 elements differs"}, 40, [4, 5, 6])

    assert (alarm.fault, alarm.ranks) == ("silent_corruption", (5,))
    assert alarm.text == (
        "rank 5 holds other values than the 2 other replicas in 6 of 40 tensors: w0 (1 of 9 elements differs), w1, w2, "
        "w3 and 2 more"
    )


def test_a_pair_that_disagrees_is_told_as_that() -> None:
    """Both are named, and that nothing tells which is right."""
    (alarm,) = judge(odd_ones(held("a", "b")), {}, 1, [0, 1])

    assert (alarm.fault, alarm.ranks) == ("replicas_differ", (0, 1))
    assert "no majority tells which of them is right" in alarm.text


def test_both_kinds_at_once_are_two_alarms() -> None:
    """One tensor with a majority and one without."""
    odd = odd_ones(held("a", "b", "a")) + odd_ones(held("a", "b", "c", key="model.v"))

    assert [alarm.fault for alarm in judge(odd, {}, 2, [0, 1, 2])] == ["silent_corruption", "replicas_differ"]
    assert not judge([], {}, 2, [0, 1, 2])


def test_what_may_differ_is_told_as_what_it_is() -> None:
    """With its names and what can be done; nothing where nothing differs."""
    told = told_others(
        odd_ones(held("a", "b", key="model.bn.running_mean")) + odd_ones(held("a", "b", key="rng::structure"))
    )

    assert "under model.bn.running_mean, rng, which are neither parameters nor" in told
    assert not told_others([])
