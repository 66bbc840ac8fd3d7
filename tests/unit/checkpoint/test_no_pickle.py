# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder cannot run code: nothing is unpickled but what the user named."""

import dataclasses
import enum
import logging
import pickle
import pickletools
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from megascale_ops.checkpoint import CheckpointManager, manifest, storage
from megascale_ops.checkpoint.manifest import Manifest
from megascale_ops.errors import CheckpointError, UsageError
from megascale_ops.schema import environment

FORMAT_1 = Path(__file__).parents[2] / "fixtures" / "checkpoints" / "format-1"


class Runs:
    """Unpickled, it makes a file."""

    def __init__(self, wanted: Path) -> None:
        self.wanted = wanted

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.wanted,)


class Opaque:
    """What is no data."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.number == self.number

    def __hash__(self) -> int:
        return self.number


class Pair(NamedTuple):
    """A named tuple of a user's own."""

    left: Any
    right: Any


class Colour(enum.Enum):
    """An enum of a user's own."""

    RED = "red"


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """A dataclass of a user's own, which holds a tensor."""

    mean: Any
    colour: Colour
    pair: Pair


def resealed(folder: Path, **changes: Any) -> None:  # noqa: ANN401  fields of a manifest
    """Give a changed folder a manifest that proves it, as who may write there can."""
    algorithm = "sha256" if changes.get("version", manifest.VERSION) < manifest.VERSION else "xxh3_128"
    paths = [path for path in sorted(folder.iterdir()) if path.name != manifest.FILE_NAME]
    files = tuple(storage.digest(path, algorithm) for path in paths)
    sealed = msgspec.structs.replace(Manifest(1, 1, 0.0, files), **changes)
    (folder / manifest.FILE_NAME).write_bytes(manifest.encode(sealed))


def is_number(dtype: torch.dtype) -> bool:
    """Whether torch knows the size of its elements: of quantized types and mere bits it does not, nor does DCP."""
    if dtype is torch.complex32 or str(dtype).startswith("torch.q"):  # torch warns of these
        return False
    try:
        return dtype is torch.bool or dtype.is_floating_point or dtype.is_complex or bool(torch.iinfo(dtype).bits >= 8)
    except TypeError:
        return False


def is_pickle(data: bytes) -> bool:
    """Whether it reads as one from its first byte to its stop; nothing is run."""
    try:
        return bool(list(pickletools.genops(data)))
    except ValueError:
        return False


def saved(root: Path, **options: Any) -> Path:  # noqa: ANN401  the manager's
    """A checkpoint of one of each; its folder."""
    state = {
        "model": nn.Linear(30, 20),
        "notes": {"epoch": 3},
        "opaque": Opaque(1 << 4000),
    }  # a longer pickle than Runs is
    CheckpointManager(root, pickled=("opaque",), **options).save(1, state)
    return storage.final_folder(root, 1)


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    """But the one of the value that the user named."""
    folder = saved(tmp_path)

    assert sorted(path.name for path in folder.iterdir()) == [
        "__0_0.msgpack", "__0_0.pickle", "__0_0.tensors", "manifest.json", "plan.msgpack",
    ]  # fmt: skip
    assert is_pickle((folder / "__0_0.pickle").read_bytes())
    for name in ("__0_0.msgpack", "__0_0.tensors", "plan.msgpack"):
        assert not is_pickle((folder / name).read_bytes())


@pytest.mark.parametrize("name", ["__0_0.msgpack", "__0_0.pickle", "__0_0.tensors", "plan.msgpack", ".metadata"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_pickle_in_any_file_of_a_folder_runs_nothing(tmp_path: Path, name: str, padded: bool) -> None:
    """In place of each file, also of the same length, sealed with a manifest that proves it."""
    folder, wanted = saved(tmp_path / "checkpoints"), tmp_path / "ran"
    bomb = pickle.dumps(Runs(wanted))
    length = (folder / name).stat().st_size if padded and (folder / name).exists() else 0
    (folder / name).write_bytes(bomb.ljust(length, b"."))  # a pickle ends at its first stop
    resealed(folder)
    state = {"model": nn.Linear(30, 20), "notes": {}} | ({"opaque": None} if name == "__0_0.pickle" else {})

    said = ""
    try:
        CheckpointManager(tmp_path / "checkpoints").restore(state)
    except CheckpointError as exc:
        said = str(exc)

    assert not wanted.exists()
    assert "\n" not in said
    # What is read as numbers, or not read at all, is no reason to refuse; everything else is told.
    harmless = {".metadata", *(("__0_0.tensors",) if padded else ())}
    assert bool(said) == (name not in harmless), said
    pickle.loads(bomb)  # noqa: S301  negative control: it would have run
    assert wanted.exists()


def test_a_pickle_that_passes_for_an_older_version_runs_nothing(tmp_path: Path) -> None:
    """One sentence names the option that would let it."""
    root, wanted = tmp_path / "checkpoints", tmp_path / "ran"
    folder = root / "step-00000001"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(wanted)))
    resealed(folder, version=1)

    with pytest.raises(CheckpointError, match=r"was written by an older version as a pickle.*allow_pickle=True"):
        CheckpointManager(root).restore({"a": 0})
    assert not wanted.exists()

    with pytest.raises(CheckpointError):  # negative control: it runs where the user allows it
        CheckpointManager(root, allow_pickle=True).restore({"a": 0})
    assert wanted.exists()


def test_a_pickled_value_comes_back_only_where_it_is_named_again(tmp_path: Path) -> None:
    """Deep in a state, beside tensors; what else is there can be restored without it."""
    state = {"loader": {"order": Opaque(7), "at": torch.ones(2)}, "tokens": 5}
    CheckpointManager(tmp_path, pickled=("loader.order",)).save(3, state)
    named: dict[str, Any] = {"loader": {"at": torch.zeros(2)}, "tokens": 0}
    without: dict[str, Any] = {"loader": {"at": torch.zeros(2)}, "tokens": 0}

    with pytest.raises(CheckpointError, match=r'loader\.order was pickled.*pickled=\("loader\.order",\)\)'):
        CheckpointManager(tmp_path).restore(without)
    CheckpointManager(tmp_path, pickled=("loader.order",)).restore(named)

    assert named["loader"]["order"] == Opaque(7)
    assert named["loader"]["at"].tolist() == [1, 1]
    assert without["tokens"] == 0
    assert without["loader"]["at"].tolist() == [0, 0]
    alone = {"tokens": 0}
    assert CheckpointManager(tmp_path).restore(alone) == 3
    assert alone == {"tokens": 5}


def test_what_is_no_data_is_refused_with_its_place(tmp_path: Path) -> None:
    """At the save, which leaves nothing behind; the sentence says what to do."""
    manager = CheckpointManager(tmp_path)
    sentence = (
        r"state\['optimizer'\]\['x'\]\[1\]: an object of type Opaque can't be stored as data: store its values, "
        r'or name it in CheckpointManager\(pickled=\("optimizer\.x\.1",\)\)'
    )

    with pytest.raises(CheckpointError, match=sentence):
        manager.save(1, {"optimizer": {"x": [0, Opaque(1)]}})
    with pytest.raises(CheckpointError, match=r"state\['f'\]: an object of type function can't be stored"):
        manager.save(1, {"f": saved})
    with pytest.raises(CheckpointError, match=r"state\['a'\]: an object of type ndarray can't be stored"):
        manager.save(1, {"a": np.array([Opaque(1)])})

    assert storage.candidates(tmp_path) == []
    assert not list(tmp_path.glob("*.partial"))


def test_a_state_that_holds_itself_is_refused(tmp_path: Path) -> None:
    """Instead of being walked for ever."""
    state: dict[str, Any] = {"a": []}
    state["a"].append(state["a"])

    with pytest.raises(CheckpointError, match=r"is nested deeper than 100, or holds itself"):
        CheckpointManager(tmp_path).save(1, state)


def test_named_types_come_back_as_they_were(tmp_path: Path) -> None:
    """Dataclasses, named tuples and enums, with tensors in them; who has not named them is told which."""
    state = {"config": Config(torch.ones(2), Colour.RED, Pair(1, torch.zeros(3)))}
    CheckpointManager(tmp_path, types=(Config, Colour, Pair)).save(1, state)
    there = torch.zeros(2)
    into: dict[str, Any] = {"config": Config(there, Colour.RED, Pair(0, None))}

    with pytest.raises(CheckpointError, match=r"'config' can't be read: it holds a \w+: name that type in Check"):
        CheckpointManager(tmp_path).restore(dict(into))
    CheckpointManager(tmp_path, types=(Config, Colour, Pair)).restore(into)

    config = into["config"]
    assert (type(config), config.colour, type(config.pair), config.pair.left) == (Config, Colour.RED, Pair, 1)
    assert config.mean is there
    assert there.tolist() == [1, 1]
    assert config.pair.right.tolist() == [0, 0, 0]


def test_types_that_were_not_named_are_refused_with_what_to_write(tmp_path: Path) -> None:
    """The sentence is the line to add."""
    with pytest.raises(
        CheckpointError, match=r"state\['a'\]: a Pair can't be stored .* CheckpointManager\(types=\(Pair,"
    ):
        CheckpointManager(tmp_path).save(1, {"a": Pair(1, 2)})
    with pytest.raises(UsageError, match=r"types takes named tuples, dataclasses and enums"):
        CheckpointManager(tmp_path, types=(Opaque,))
    with pytest.raises(UsageError, match=r"pickled is a list of names, not one string: pickled=\('a',\)"):
        CheckpointManager(tmp_path, pickled="a")


def test_a_field_that_was_added_since_takes_its_default(tmp_path: Path) -> None:
    """A dataclass may grow between a save and a restore; what it lost is told."""
    old = dataclasses.make_dataclass("Settings", [("lr", float), ("warm", int)])
    new = dataclasses.make_dataclass("Settings", [("lr", float), ("warm", int), ("clip", float, 1.0)])
    smaller = dataclasses.make_dataclass("Settings", [("lr", float)])
    CheckpointManager(tmp_path, types=(old,)).save(1, {"a": old(0.5, 3)})
    state: dict[str, Any] = {"a": None}

    CheckpointManager(tmp_path, types=(new,)).restore(state)

    assert state["a"] == new(0.5, 3, 1.0)
    with pytest.raises(CheckpointError, match="Settings has no field warm"):
        CheckpointManager(tmp_path, types=(smaller,)).restore(state)


def test_every_type_of_element_and_every_layout_comes_back(tmp_path: Path) -> None:
    """Bytes in, bytes out: also of types that torch can hardly compute with, transposed, conjugated, empty, scalar."""
    dtypes = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
    raw = torch.arange(64, dtype=torch.uint8)
    state: dict[str, Any] = {str(dtype): raw.clone().view(dtype) for dtype in dtypes if is_number(dtype)}
    state |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "transposed": torch.arange(6).reshape(2, 3).t()}
    state |= {"conjugate": torch.tensor([1 + 2j]).conj(), "every second": torch.arange(10)[::2]}
    state |= {"one of many": torch.arange(10.0)[::10]}
    CheckpointManager(tmp_path).save(1, state)
    back: dict[str, Any] = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    strided = torch.zeros(10, dtype=torch.int64)
    back["every second"] = strided[::2]
    back["one of many"] = torch.zeros(10)[::10]
    back["conjugate"] = torch.zeros(1, dtype=torch.complex64).conj()

    CheckpointManager(tmp_path).restore(back)

    plain = torch.contiguous_format
    assert len(state) > 20
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype
        left, right = (each.resolve_conj().reshape(-1).clone(memory_format=plain) for each in (tensor, back[name]))
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), name
    assert strided.tolist() == [0, 0, 2, 0, 4, 0, 6, 0, 8, 0]


def test_states_of_torchs_own_schedulers_and_generators_are_data(tmp_path: Path) -> None:
    """What a training script puts into a state needs no option."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedules = torch.optim.lr_scheduler
    warm = schedules.LinearLR(optimizer)
    state = {
        "steps": schedules.MultiStepLR(optimizer, [1, 3]),
        "chain": schedules.SequentialLR(optimizer, [warm, schedules.CosineAnnealingLR(optimizer, 10)], [2]),
        "plateau": schedules.ReduceLROnPlateau(optimizer),
        "cycle": schedules.OneCycleLR(optimizer, 0.1, total_steps=10),
        "lambda": schedules.LambdaLR(optimizer, lambda _: 1.0),
        "averaged": torch.optim.swa_utils.AveragedModel(model),
        "scaler": torch.amp.GradScaler("cpu"),
        "torch": torch.get_rng_state(),
        "numpy": np.random.default_rng(3).bit_generator.state,
        "old numpy": np.random.RandomState(3).get_state(),
        "python": random.getstate(),
        "none": None,
    }
    CheckpointManager(tmp_path).save(1, state)
    before = random.getstate()
    random.seed(1)

    assert CheckpointManager(tmp_path).restore(state) == 1
    assert state["python"] == before
    assert state["numpy"] == np.random.default_rng(3).bit_generator.state


# -- other versions -------------------------------------------------------------------------------------------------


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A folder of checkpoints that the program before this format wrote: a model, its optimizer, a tensor, notes."""
    return Path(shutil.copytree(FORMAT_1, tmp_path / "older"))


def older_state() -> dict[str, Any]:
    """What it is restored into."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "mean": torch.zeros(2), "notes": {}}


@pytest.mark.parametrize("how", ["option", "setting"])
def test_an_older_folder_loads_with_a_warning_where_it_is_allowed(
    older: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights, moments, settings and notes; what is saved next is data."""
    if how == "setting":
        monkeypatch.setenv(environment.CHECKPOINT_ALLOW_PICKLE, "1")
    state = older_state()
    manager = CheckpointManager(older, allow_pickle=True if how == "option" else None)

    with caplog.at_level(logging.WARNING, "megascale_ops.checkpoint"):
        step = manager.restore(state)

    assert step == 12
    assert torch.allclose(state["model"].bias, torch.tensor([-0.8382, -0.3502]), atol=1e-4)
    assert state["optimizer"].param_groups[0]["lr"] == 0.5
    assert state["optimizer"].state_dict()["state"][0]["step"] == 1
    assert state["mean"].tolist() == [1, 1]
    assert state["notes"] == {"epoch": 3, 1: (None, "x")}
    ours = [record.message for record in caplog.records if record.name == "megascale_ops.checkpoint"]
    assert ours == [f"unpickling {older}/step-00000012, which an older version wrote: that runs what its writer wanted"]
    manager.save(13, state)
    monkeypatch.delenv(environment.CHECKPOINT_ALLOW_PICKLE, raising=False)
    assert CheckpointManager(older).restore(older_state()) == 13


def test_an_older_folder_verifies_and_is_refused_where_it_is_not_allowed(older: Path) -> None:
    """No fallback to what is older still: the sentence names the option and the setting, and the state stays."""
    state = older_state() | {"notes": {"mine": 1}}

    with pytest.raises(CheckpointError, match=r"allow_pickle=True\) or MEGASCALE_CHECKPOINT_ALLOW_PICKLE=1") as caught:
        CheckpointManager(older).restore(state)

    assert "\n" not in str(caught.value)
    assert state["notes"] == {"mine": 1}
    assert manifest.ALLOW_VARIABLE == environment.CHECKPOINT_ALLOW_PICKLE


def test_a_folder_of_a_later_version_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    """Going back to an older checkpoint without a word would lose what the later program did."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"a": 1})
    manager.save(2, {"a": 2})
    resealed(storage.final_folder(tmp_path, 2), step=2, version=4)
    state = {"a": 0}

    with pytest.raises(
        CheckpointError, match=r"of step 2, is of a later version \(its format is 4, this program reads up to 3\)"
    ):
        CheckpointManager(tmp_path).restore(state)
    assert state == {"a": 0}


def test_a_damaged_version_number_is_damage(tmp_path: Path) -> None:
    """A flipped bit in it is passed over like any other."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"a": 1})
    manager.save(2, {"a": 2})
    path = storage.final_folder(tmp_path, 2) / manifest.FILE_NAME
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"version": 3', b'"version": 4'))
    state = {"a": 0}

    assert CheckpointManager(tmp_path).restore(state) == 1
    assert state == {"a": 1}
