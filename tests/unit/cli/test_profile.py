# SPDX-License-Identifier: Apache-2.0
"""``profile`` on the command line: which ranks are meant, and what people see."""

from io import StringIO

import pytest
from rich.console import Console

from megascale_ops.cli.profile import chosen_rows, profile_view, read_ranks, shortened
from megascale_ops.errors import UsageError
from megascale_ops.schema.kernels import ProfileRank, ProfileRow, ProfileView


def shown(view: ProfileView, top: int = 12, width: int = 120) -> str:
    """Return what is printed."""
    out = StringIO()
    Console(file=out, width=width, markup=False, highlight=False, emoji=False).print(profile_view(view, top))
    return out.getvalue()


@pytest.mark.parametrize(
    ("text", "ranks"), [("all", ()), ("3,7", (3, 7)), ("0-2, 5", (0, 1, 2, 5)), ("4,4,3-4", (3, 4)), ("0", (0,))]
)
def test_ranks_are_lists_and_ranges(text: str, ranks: tuple[int, ...]) -> None:
    """Each once, in order."""
    assert read_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "x", "3-", "5-3", "-1", "1,,2", "1;2", "99999999", "²"])
def test_anything_else_is_refused(text: str) -> None:
    """With the words that were given."""
    with pytest.raises(UsageError, match="can't be read: give all, or ranks such as 0,3-5"):
        read_ranks(text)


def test_what_stands_out_comes_first_then_the_longest_kernels() -> None:
    """Of each kernel the rank that is slowest in it, as many as are asked for."""
    rows = (
        ProfileRow(2, "gemm", 10, 1400.0, 14_000.0, 0.14, 1.4, 1000.0, is_slow=True),
        ProfileRow(0, "gemm", 10, 1000.0, 10_000.0, 0.1, 1.0, 1000.0),
        ProfileRow(0, "nccl", 2, 900.0, 1800.0, 0.02, 1.1, 800.0, is_waiting=True),
        ProfileRow(1, "norm", 20, 10.0, 200.0, 0.002, 1.0, 10.0),
        ProfileRow(0, "norm", 20, 11.0, 220.0, 0.002, 1.1, 10.0),
    )
    ranks = tuple(ProfileRank(rank, "a", path=f"/run/profiles/p/rank-{rank}.json", span_s=0.1) for rank in range(3))
    view = ProfileView("job", "p", "done", 2, "gpu", "rank 2 runs gemm slowly", ranks, rows)

    text = shown(view)

    assert [(row.rank, row.kernel) for row in chosen_rows(view, 12)] == [(2, "gemm"), (0, "nccl"), (0, "norm")]
    assert len(chosen_rows(view, 2)) == 2
    assert "job job · profile p · 2 steps of ranks 0-2 in 100 ms" in text
    assert text.index("slow") < text.index("waits")
    assert "rank 2 runs gemm slowly" in text
    assert "kept in /run/profiles/p" in text
    assert max(map(len, shown(view, width=80).splitlines())) <= 80


def test_nobody_has_answered() -> None:
    """No table; why, for the first ranks, and how many more."""
    ranks = tuple(ProfileRank(rank, "a", "its process is gone\x1b[2J") for rank in range(20))

    text = shown(ProfileView("job", "p", "done", 2, "", "no rank has answered", ranks))

    assert "no rank has answered" in text
    assert "rank 7: its process is gone\\x1b[2J" in text
    assert "rank 8:" not in text
    assert "and 12 more ranks without an answer" in text
    assert "median" not in text


def test_long_names_keep_both_ends() -> None:
    """Templates differ at the end."""
    name = "void cutlass::Kernel<" + "a" * 200 + "_tn_align8>"

    assert shortened("aten::mm") == "aten::mm"
    assert shortened(name).startswith("void cutlass::Kernel<")
    assert shortened(name).endswith("_tn_align8>")
    assert len(shortened(name)) == 54
