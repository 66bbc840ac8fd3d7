# SPDX-License-Identifier: Apache-2.0
"""What a state may hold: it comes back as it was, or is refused in one sentence that says where it stands."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megascale_ops.checkpoint import CheckpointManager, contents
from megascale_ops.checkpoint.state.capture import overlaps_itself
from megascale_ops.errors import CheckpointError

DTYPES = [
    each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and (each.is_floating_point or each.is_complex)
]


class Marked(torch.Tensor):
    """A user's own kind of tensor."""


class Owner:
    """A user's own object, which copies what it is given into its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        return {"tensor": self.tensor}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keep the kind."""
        self.tensor = saved["tensor"].as_subclass(Marked)


class Broken(Owner):
    """One whose methods fail, in several lines."""

    def state_dict(self) -> dict[str, Any]:
        """Raise."""
        raise RuntimeError("not\nnow")


def fake() -> torch.Tensor:
    """What stands for a tensor where code is traced."""
    with FakeTensorMode():
        return torch.empty(3)


def freed() -> torch.Tensor:
    """A parameter as FSDP leaves it between two forward passes."""
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), "a sparse_coo tensor can't be stored as it is"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor can't be stored"),
        (lambda: torch.ones(3).to_mkldnn(), "a _mkldnn tensor can't be stored"),
        (lambda: torch.empty(8, dtype=torch.uint8).view(torch.bits8), "a bits8 tensor can't be stored"),
        (lambda: torch.empty(8, dtype=torch.uint8).view(torch.uint4), "a uint4 tensor can't be stored"),
        (lambda: torch.ones(2).as_subclass(Marked), "a Marked tensor can't be stored"),
        (fake, "a FakeTensor tensor can't be stored"),
        (nn.UninitializedParameter, "is not initialized yet: let a batch through the module first"),
        (freed, "has no memory: it was freed, or it is of a kind that has none"),
        (lambda: nn.Linear, "an object of type type can't be stored as data"),
    ],
)
def test_what_cannot_come_back_as_it_is_is_refused_by_its_place(make: Any, sentence: str) -> None:  # noqa: ANN401  any maker
    """Before anything is written."""
    with pytest.raises(CheckpointError) as caught:
        contents.take_apart({"a": {"b/c": make()}})

    assert str(caught.value).startswith("state['a']['b/c']")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (7, r"state\[7\]: the entries of a state have names, and int is none: give a str"),
        (None, r"state\[None\]: the entries of a state have names, and NoneType is none"),
        ("\ud800", "its name has half a character, which UTF-8 can't spell"),
    ],
)
def test_an_entry_without_a_name_is_refused(name: Any, sentence: str) -> None:  # noqa: ANN401  what is no name
    """Nothing could be looked up under it."""
    with pytest.raises(CheckpointError, match=sentence):
        contents.take_apart({name: 1})


def test_an_object_that_fails_is_named() -> None:
    """With what it raised, in one line."""
    with pytest.raises(CheckpointError, match=r"^state\['loader'\].state_dict\(\) failed: RuntimeError: not now$"):
        contents.take_apart({"loader": Broken(torch.ones(1))})


def test_a_place_is_told_on_one_line_as_it_is_to_be_written() -> None:
    """Also where its name has line breaks."""
    with pytest.raises(CheckpointError, match=r'CheckpointManager\(pickled=\("a\\nb.0",\)\)$'):
        contents.take_apart({"a\nb": [object()]})


def test_an_object_that_does_not_take_what_was_saved_is_named(tmp_path: Path) -> None:
    """All that torch says of a module that lacks a layer is in one sentence."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"model": nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))})

    with pytest.raises(
        CheckpointError, match=r"'model' did not take what was saved: RuntimeError: .*Unexpected key.*1.weight"
    ):
        manager.restore({"model": nn.Sequential(nn.Linear(1, 1))})


def odd_state() -> dict[str, Any]:
    """Tensors of every type and of every way to lie in memory, under names of every kind."""
    whole = torch.arange(24.0).reshape(2, 3, 4)
    tied = nn.Linear(3, 3)
    return {
        "types": {str(dtype): torch.arange(64, dtype=torch.uint8).view(dtype) for dtype in DTYPES},
        "memory": {
            "0-d": torch.tensor(float("nan")),
            "empty": torch.empty(0, 3, dtype=torch.int8),
            "turned": whole.transpose(0, 2),
            "every second": whole[:, :, ::2],
            "expanded": torch.ones(3, 1).expand(3, 4),
            "windows": torch.arange(5.0).unfold(0, 3, 1),
            "channels last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
            "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
            "shared": [whole, whole[1]],
            "inferred": _inferred(),
            "needs a gradient": torch.ones(2, requires_grad=True) * 2,
        },
        "names": {
            key: torch.tensor(float(at))
            for at, key in enumerate(
                ("a.b", "a/b", "", "\ud800", "é", 0, -1, None, (1, "x"), float("nan"), "x::structure", 2**70)
            )
        },
        "tied": nn.ModuleDict({"a": tied, "b": tied}),
    }


def _inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(3.0)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements, in their order."""
    whole = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_of_every_kind_come_back_to_the_bit(tmp_path: Path) -> None:
    """Into nothing, and into a state that has the same, where elements that share memory can't be filled."""
    saved = odd_state()
    with CheckpointManagerClosed(tmp_path) as manager:
        manager.save(1, saved)
        for into in ({"types": None, "memory": None, "names": None, "tied": odd_state()["tied"]}, odd_state()):
            assert manager.restore(into) == 1
            got, expected = contents.take_apart(into), contents.take_apart(saved)
            assert got.keys() == expected.keys()
            for key, tensor in expected.items():
                assert (got[key].dtype, got[key].shape, bits(got[key])) == (tensor.dtype, tensor.shape, bits(tensor)), (
                    key
                )
            assert into["tied"]["a"].weight is into["tied"]["b"].weight


def test_an_object_of_the_users_keeps_the_kind_of_its_tensors(tmp_path: Path) -> None:
    """It copies elements into what it has, so nothing of the kind is lost."""
    owner = Owner(torch.arange(3.0).as_subclass(Marked))
    with CheckpointManagerClosed(tmp_path) as manager:
        manager.save(1, {"owner": owner})
        fresh = Owner(torch.zeros(3).as_subclass(Marked))
        manager.restore({"owner": fresh})

    assert isinstance(fresh.tensor, Marked)
    assert fresh.tensor.tolist() == [0.0, 1.0, 2.0]


class CheckpointManagerClosed:
    """A manager that gives its folder back."""

    def __init__(self, path: Path) -> None:
        self._manager = CheckpointManager(path)

    def __enter__(self) -> CheckpointManager:
        return self._manager

    def __exit__(self, *_: object) -> None:
        self._manager.close()


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.ones(2, 3).T, False),
        (torch.ones(4, 6)[::2, ::3], False),
        (torch.ones(1).expand(1, 1), False),
        (torch.empty(0, 3).expand(2, 0, 3), False),
        (torch.ones(1).expand(2), True),
        (torch.ones(5).unfold(0, 3, 1), True),
        (torch.ones(6).unfold(0, 3, 3), False),
    ],
)
def test_elements_that_share_memory_are_known(tensor: torch.Tensor, expected: bool) -> None:
    """By the strides alone."""
    assert overlaps_itself(tensor) is expected
