# SPDX-License-Identifier: Apache-2.0
"""A plan is one of the files that are there, or refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.checkpoint import plan
from megascale_ops.checkpoint.plan import Chunk, Plan, Tensor

WIDTHS = {"torch.float32": 4, "torch.uint8": 1}
SIZES = {"__0_0.tensors": 64, "__1_0.tensors": 64}
FIRST, SECOND = Chunk((0, 0), (2, 3), 0, 0, 24), Chunk((2, 0), (1, 3), 1, 8, 12)
WHOLE = Plan(tuple(SIZES), {"w": Tensor("torch.float32", (3, 3), (FIRST, SECOND))})


def read(written: Plan) -> Plan:
    """What a reader makes of it."""
    return plan.decode(plan.encode(written), SIZES, WIDTHS.__getitem__)


def changed(**fields: object) -> Plan:
    """The plan with another second chunk."""
    chunks = (FIRST, msgspec.structs.replace(SECOND, **fields))
    return Plan(tuple(SIZES), {"w": Tensor("torch.float32", (3, 3), chunks)})


def test_a_plan_comes_back_as_it_was() -> None:
    """Also of a tensor without dimensions and one without elements."""
    more = {
        "scalar": Tensor("torch.uint8", (), (Chunk((), (), 0, 63, 1),)),
        "empty": Tensor("torch.uint8", (0, 4), (Chunk((0, 0), (0, 4), 0, 64, 0),)),
    }
    written = Plan(WHOLE.files, WHOLE.tensors | more)

    assert read(written) == written


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (changed(offsets=(3, 0)), "does not fit its tensor"),
        (changed(offsets=(-1, 0)), "does not fit its tensor"),
        (changed(offsets=(2,)), "does not fit its tensor"),
        (changed(sizes=(1, 2)), "does not fit its tensor"),
        (changed(length=13), "does not fit its tensor"),
        (changed(start=60), "lies outside its file"),
        (changed(start=-1), "lies outside its file"),
        (changed(file=2), "is in no file"),
        (changed(file=-1), "is in no file"),
        (Plan(WHOLE.files, {"w": Tensor("torch.float32", (3, 3), (FIRST,))}), "do not fill it"),
        (Plan(("other", "files"), WHOLE.tensors), "speaks of 'other', which is not here"),
        (Plan(WHOLE.files, {"w": Tensor("os.system", (0,), ())}), "speaks of 'os.system', which is not here"),
        (
            Plan(WHOLE.files, {name: Tensor("torch.uint8", (40,), (Chunk((0,), (40,), 0, 0, 40),)) for name in "ab"}),
            "more lies in '__0_0.tensors' than it has bytes",
        ),
    ],
)
def test_a_plan_that_cannot_be_of_these_files_is_refused(wrong: Plan, reason: str) -> None:
    """So that a reader never reads past a file, makes a tensor that no file fills, or leaves part of one as it was."""
    with pytest.raises(ValueError, match=reason):
        read(wrong)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_one_sentence(raw: bytes) -> None:
    """Never another exception."""
    with pytest.raises(ValueError, match=r"plan\.msgpack is not a plan as this program writes it"):
        plan.decode(raw, SIZES, WIDTHS.__getitem__)
