# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold other parts under one name: each variant is stored, and a restore gives a rank what it has."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from megascale_ops.checkpoint import contents
from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.checkpoint.manifest import Manifest
from megascale_ops.checkpoint.state.variants import Variants, keys_here, of_rank, put_together
from megascale_ops.checkpoint.value_kinds import Slot
from megascale_ops.errors import CheckpointError

PLAIN = Allowed()


class Group:
    """The ranks of a job as one of them sees them: what all would send is known."""

    def __init__(self, rank: int, sent: Sequence[Any] = ()) -> None:
        self.rank, self.gathers, self._sent = rank, 0, sent

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401  as that of ranks
        """What all ranks send."""
        self.gathers += 1
        return [value if at == self.rank else sent for at, sent in enumerate(self._sent)]


def settled(
    states: Sequence[dict[str, Any]], all_variants: Sequence[Variants] | None = None
) -> list[tuple[set[str], bool]]:
    """Let each rank take its state apart, and settle: the keys of its structures, and whether all had guessed them."""
    known = all_variants or [Variants() for _ in states]
    flats: list[dict[str, torch.Tensor]] = [{} for _ in states]
    told = [each.take_apart(state, PLAIN, flat) for each, state, flat in zip(known, states, flats, strict=True)]
    sent = [each._described for each in known]
    found = []
    for rank, (each, flat) in enumerate(zip(known, flats, strict=True)):
        guessed = each.settle("saving", told, flat, Group(rank, sent))  # type: ignore[arg-type]  # a fake
        found.append(({key for key in flat if key.endswith(contents.STRUCTURE)}, guessed))
    return found


def stage(*layers: int) -> dict[str, torch.Tensor]:
    """The layers of a pipeline stage."""
    return {f"layers.{number}": torch.full((2,), float(number)) for number in layers}


def test_ranks_that_hold_the_same_store_one_structure_and_send_nothing_more() -> None:
    """Other values are no variant, nor is another order of keys."""
    states = [
        {"model": {"a": torch.ones(1), "b": torch.ones(1)}, "lr": 0.1},
        {"model": {"b": torch.zeros(1), "a": torch.ones(1)}, "lr": 0.2},
    ]

    assert settled(states) == [({"model::structure", "lr::structure"}, True)] * 2


def test_each_variant_is_stored_under_a_name_of_its_own_and_guessed_the_next_time() -> None:
    """So that a plan can be used again."""
    states = [{"model": stage(0, 1)}, {"model": stage(0, 1)}, {"model": stage(2)}, {"model": stage(3)}]
    known = [Variants() for _ in states]
    keys = [{"model::structure"}, {"model::structure"}, {"model::variant1::structure"}, {"model::variant2::structure"}]

    first, second = settled(states, known), settled(states, known)

    assert first == [(key, False) for key in keys]
    assert second == [(key, True) for key in keys]
    assert contents.names_in(key for found, _ in second for key in found) == ["model"]


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        (stage(2), {"layers.2"}),
        (stage(1, 2), {"layers.1", "layers.2"}),
        (stage(0, 1, 2, 3), {"layers.0", "layers.1", "layers.2", "layers.3"}),
        ({}, {"layers.0", "layers.1", "layers.2", "layers.3"}),
        (None, {"layers.0", "layers.1", "layers.2", "layers.3"}),
    ],
)
def test_a_rank_gets_the_keys_that_it_has_whatever_the_stages_were(here: object, expected: set[str]) -> None:
    """Cut into other stages, or none at all."""
    assert put_together([stage(0, 1), stage(2, 3)], here, PLAIN).keys() == expected


def test_a_dict_that_all_ranks_held_alike_comes_back_whole() -> None:
    """What a fresh object lacks of it is what it is to get."""
    saved = [{"parts": stage(0), "moments": {"a": 1, "b": 2}}, {"parts": stage(1), "moments": {"a": 1, "b": 2}}]

    assert put_together(saved, {"parts": stage(1), "moments": {"a": 0}}, PLAIN) == {
        "parts": {"layers.1": saved[1]["parts"]["layers.1"]},
        "moments": {"a": 1, "b": 2},
    }


def test_a_rank_of_the_same_stage_gets_its_dict_in_its_order() -> None:
    """As the rank had saved it, whoever came first."""
    saved = [{"r0": 1, "all": 2}, {"r1": 1, "all": 2}]

    assert list(put_together(saved, {"all": 0, "r1": 0}, PLAIN)) == ["r1", "all"]


@pytest.mark.parametrize(
    ("have", "own", "expected"),
    [
        ({"all": 0}, 1, {"all": 2, "b": 1}),  # a fresh object that has not come to "b" yet
        ({}, 1, {"all": 2, "b": 1}),
        ({"all": 0, "a": 0}, 1, {"all": 2, "a": 1}),  # another stage than the rank had
        ({"all": 0}, None, {"all": 2}),  # of another job: what it has
        ({}, None, {"all": 2, "a": 1, "b": 1}),
        ({"all": 0}, 7, {"all": 2}),
    ],
)
def test_a_rank_of_the_same_job_gets_what_it_had_saved(
    have: dict[str, int], own: int | None, expected: dict[str, int]
) -> None:
    """Also what it does not have yet, unless it has become another rank."""
    saved = [{"all": 2, "a": 1}, {"all": 2, "b": 1}]

    assert of_rank(saved, have, have, own, PLAIN) == expected


@pytest.mark.parametrize(("here", "expected"), [((0,), (0,)), ((0, 1), (0, 1)), ((1, 2), (1, 2)), ((), (0, 1))])
def test_stages_that_were_cut_elsewhere_for_as_many_ranks_get_their_layers(
    here: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """A layer less is another stage; a dict that has none is a fresh one."""
    saved = [
        {"model": {key: Slot(key) for key in stage(0, 1)}, "seen": 1},
        {"model": {key: Slot(key) for key in stage(2)}, "seen": 1},
    ]
    have = {"model": stage(*here), "seen": 0}

    assert of_rank(saved, have, have, 0, PLAIN)["model"].keys() == stage(*expected).keys()


def test_a_manifest_tells_whose_variant_is_which() -> None:
    """Only of entries of which there are several, and to a job of as many ranks."""
    states: list[dict[str, Any]] = [{"model": stage(0), "lr": 1}, {"model": stage(1), "lr": 1}, {"lr": 1}]
    known = [Variants() for _ in states]
    settled(states, known)

    sealed = Manifest(7, 3, 0.0, (), **known[0].world.told())

    assert [dict(each.world.variants) for each in known] == [{"model": (0, 1, -1)}] * 3
    assert manifests.decode(manifests.encode(sealed)) == sealed
    assert [manifests.variant_of(sealed, "model", rank, 3) for rank in range(3)] == [0, 1, None]
    assert manifests.variant_of(sealed, "model", 0, 2) is None
    assert manifests.variant_of(sealed, "lr", 0, 3) is None


def test_one_variant_is_taken_as_it_is() -> None:
    """No key is looked up in the state: that is the way of every job without stages."""
    saved = {"a": 1}

    assert put_together([saved], {"b": 2}, PLAIN) is saved


def test_names_of_parameters_and_versions_of_modules_come_from_all_stages() -> None:
    """Torch looks for its own names in the groups of an optimizer, and for a module's version beside its tensors."""
    groups = [{"param_groups": [{"params": ["a", "b"], "lr": 0.1}]}, {"param_groups": [{"params": ["c"], "lr": 0.1}]}]
    first, second = nn.Sequential(OrderedDict(x=nn.BatchNorm1d(1))), nn.Sequential(OrderedDict(y=nn.BatchNorm1d(1)))

    (group,) = put_together(groups, groups[1], PLAIN)["param_groups"]
    model = put_together([first.state_dict(), second.state_dict()], second.state_dict(), PLAIN)

    assert group == {"params": ["a", "b", "c"], "lr": 0.1}
    assert list(model) == ["y.weight", "y.bias", "y.running_mean", "y.running_var", "y.num_batches_tracked"]
    assert model._metadata["y"] == {"version": 2}


def test_a_fresh_optimizer_gets_the_moments_of_its_parameters() -> None:
    """It has none yet, so that it holds no key of them."""
    parameter = nn.Parameter(torch.ones(1))
    fresh = torch.optim.Adam([parameter])
    saved = [
        {"state": {0: {"step": 1}, 1: {"step": 1}}, "param_groups": []},
        {"state": {0: {"step": 1}}, "param_groups": []},
    ]

    assert put_together(saved, keys_here(fresh, fresh.state_dict()), PLAIN)["state"] == {0: {"step": 1}}


@pytest.mark.parametrize(
    ("states", "sentence"),
    [
        (
            [{"x": torch.ones(2)}, {"x": torch.ones(3)}],
            r"x is float32\[2\] on rank 0 and float32\[3\] on rank 1: what differs between ranks needs a name for each",
        ),
        (
            [{"x": [torch.ones(2)]}, {"x": [torch.ones(2, dtype=torch.int8)]}],
            r"x.0 is float32\[2\] on rank 0 and int8\[2\] on rank 1",
        ),
    ],
)
def test_a_name_that_is_two_tensors_is_refused_on_every_rank(states: list[dict[str, Any]], sentence: str) -> None:
    """One of them would be lost."""
    with pytest.raises(CheckpointError, match=f"saving failed: {sentence}"):
        settled(states)


def test_an_optimizer_whose_numbers_mean_other_parameters_is_refused() -> None:
    """The moments of one stage would stand in place of the other's; what helps is told."""
    states = []
    for number in range(2):
        model = nn.Sequential(OrderedDict([(f"layer{number}", nn.Linear(2, 2))]))
        states.append({"model": model, "optimizer": torch.optim.Adam(model.parameters())})

    with pytest.raises(
        CheckpointError,
        match=r"'optimizer' numbers its parameters, and number 0 is model.layer0.weight on rank 0 and "
        r"model.layer1.weight on rank 1: save what torch's get_optimizer_state_dict",
    ):
        settled(states)


def test_names_that_ours_end_in_are_refused() -> None:
    """No entry passes for a variant of another one."""
    with pytest.raises(CheckpointError, match="names that end so are ours"):
        contents.take_apart({"model::variant1": 1})
