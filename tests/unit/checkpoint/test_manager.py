# SPDX-License-Identifier: Apache-2.0
"""What ``CheckpointManager`` promises to a single process; several ranks are tested with real processes."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from megascale_ops import __version__
from megascale_ops.checkpoint import CheckpointManager, latest, observers, storage
from megascale_ops.checkpoint.manifest import Manifest
from megascale_ops.errors import CheckpointError, UsageError


@pytest.fixture
def heard() -> Iterator[list[tuple[str, int]]]:
    """What an observer is told."""
    events: list[tuple[str, int]] = []

    def observer(event: str, step: int) -> None:
        events.append((event, step))

    observers.append(observer)
    yield events
    observers.remove(observer)


def our_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this package logged; torch logs its own saving and loading."""
    return [record.message for record in caplog.records if record.name == "megascale_ops.checkpoint"]


def damage(folder: Path) -> None:
    """Flip a byte of the first file."""
    shard = folder / "__0_0.msgpack"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def test_modules_optimizers_and_plain_values_come_back(tmp_path: Path) -> None:
    """Objects through their state dicts; tensors in place; other entries replaced; moments into a fresh optimizer."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {"model": model, "optimizer": optimizer, "mean": torch.ones(2), "notes": {"epoch": 3, 1: (None, "x")}}
    CheckpointManager(tmp_path).save(12, saved)
    other, mean = nn.Linear(3, 2), torch.zeros(2)
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": other, "optimizer": other_optimizer, "mean": mean, "notes": {}}

    step = CheckpointManager(tmp_path).restore(state)

    assert step == 12
    assert torch.equal(other.weight, model.weight)
    moments = [opt.state_dict()["state"][0]["exp_avg"] for opt in (optimizer, other_optimizer)]
    assert torch.equal(*moments)
    assert other_optimizer.param_groups[0]["lr"] == 0.5
    assert state["mean"] is mean
    assert mean.tolist() == [1, 1]
    assert state["notes"] == {"epoch": 3, 1: (None, "x")}


def test_a_plain_state_dict_of_a_fresh_optimizer_comes_back_whole(tmp_path: Path) -> None:
    """Nothing that was saved under a name is dropped because the dict did not have it yet."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fresh = optimizer.state_dict()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"optimizer": optimizer.state_dict()})
    state = {"optimizer": fresh}

    manager.restore(state)

    assert sorted(state["optimizer"]["state"]) == [0, 1]


def test_a_part_of_what_was_saved_can_be_restored(tmp_path: Path) -> None:
    """An evaluation needs the model, not the optimizer."""
    manager, target = CheckpointManager(tmp_path), torch.zeros(2)
    manager.save(1, {"a": torch.ones(2), "b": torch.ones(500)})

    assert manager.restore({"a": target}) == 1
    assert target.tolist() == [1, 1]


def test_nothing_saved_yet_is_minus_one(tmp_path: Path, heard: list[tuple[str, int]]) -> None:
    """The state stays as it is and nobody is told of a restore."""
    state = {"a": 5}

    assert CheckpointManager(tmp_path / "new").restore(state) == -1
    assert (state, heard) == ({"a": 5}, [])


def test_a_damaged_newest_is_passed_over_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One sentence in the log, the report in ``skipped``, the older state in the hands of the caller."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"a": 1})
    manager.save(2, {"a": 2})
    damage(storage.final_folder(tmp_path, 2))
    state = {"a": 0}

    with caplog.at_level(logging.WARNING):
        step = manager.restore(state)

    assert (step, state) == (1, {"a": 1})
    assert [report.step for report in manager.skipped] == [2]
    said = our_messages(caplog)
    assert len(said) == 1
    assert said[0].startswith("skipped: checkpoint of step 2 is damaged: __0_0.msgpack digest differs")


def test_when_none_verifies_training_does_not_start_over_in_silence(tmp_path: Path) -> None:
    """Weeks of work may lie there: a person decides, and is told how."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"a": 1})
    damage(storage.final_folder(tmp_path, 1))

    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints .* To start from step 0, move that folder"):
        manager.restore({"a": 0})


def test_a_damaged_checkpoint_does_not_push_a_good_one_out(tmp_path: Path) -> None:
    """With ``keep=1`` the good one stays until a better one stands."""
    manager = CheckpointManager(tmp_path, keep=2)
    for step in (1, 2, 3):
        manager.save(step, {"a": step})
    damage(storage.final_folder(tmp_path, 3))
    again = CheckpointManager(tmp_path, keep=1)

    assert again.restore({"a": 0}) == 2
    again.save(3, {"a": 33})
    state = {"a": 0}

    assert CheckpointManager(tmp_path).restore(state) == 3
    assert state == {"a": 33}
    assert [path.name for path in storage.candidates(tmp_path)] == ["step-00000003"]


def test_only_the_newest_few_stay(tmp_path: Path) -> None:
    """``keep`` bounds the disk."""
    manager = CheckpointManager(tmp_path, keep=2)

    for step in range(5):
        manager.save(step, {"a": step})

    assert [path.name for path in storage.candidates(tmp_path)] == ["step-00000004", "step-00000003"]


def test_observers_hear_of_every_save_and_restore(tmp_path: Path, heard: list[tuple[str, int]]) -> None:
    """Also of a save that fails, so that nobody stays in the phase "checkpoint" for ever."""
    manager = CheckpointManager(tmp_path)
    manager.save(4, {"a": 1})
    manager.restore({"a": 0})

    class Broken:
        def state_dict(self) -> dict[str, object]:
            raise ValueError("no state today")

        def load_state_dict(self, _: object) -> None: ...

    with pytest.raises(CheckpointError, match=r"saving step 5 to .* failed: ValueError: no state today"):
        manager.save(5, {"a": Broken()})

    assert heard == [("save_begin", 4), ("save_end", 4), ("restored", 4), ("save_begin", 5), ("save_end", 5)]


def test_a_failing_observer_costs_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is told of once and not called again."""

    def broken(_event: str, _step: int) -> None:
        raise RuntimeError("a listener's mistake")

    observers.append(broken)
    manager = CheckpointManager(tmp_path)

    with caplog.at_level(logging.ERROR):
        manager.save(1, {"a": 1})

    assert broken not in observers
    assert manager.restore({"a": 0}) == 1
    assert [message.split(" at ")[0] for message in our_messages(caplog)] == ["a checkpoint observer failed"]


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"b": 1}, "it holds a but not b"),
        ({"a": nn.Linear(1, 1)}, r"'a' does not fit: the checkpoint does not hold weight"),
    ],
)
def test_a_state_that_does_not_fit_is_named(tmp_path: Path, state: dict[str, Any], sentence: str) -> None:
    """A changed model is the user's business: no fallback, a clear sentence."""
    manager = CheckpointManager(tmp_path)
    manager.save(3, {"a": torch.ones(1)})

    with pytest.raises(CheckpointError, match=sentence):
        manager.restore(state)


def test_mistakes_are_refused_at_once(tmp_path: Path) -> None:
    """Before anything is written."""
    with pytest.raises(UsageError, match="keep is 0"):
        CheckpointManager(tmp_path, keep=0)
    with pytest.raises(UsageError, match="step -1"):
        CheckpointManager(tmp_path).save(-1, {"a": 1})
    with pytest.raises(UsageError, match="empty state"):
        CheckpointManager(tmp_path).save(1, {})


def test_the_folder_comes_from_the_environment_when_the_runner_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner's folder first, the script's own otherwise."""
    monkeypatch.setenv("MEGASCALE_CHECKPOINT_DIR", str(tmp_path / "from runner"))
    named = CheckpointManager.from_environment(tmp_path / "own")
    monkeypatch.delenv("MEGASCALE_CHECKPOINT_DIR")
    own = CheckpointManager.from_environment(tmp_path / "own")

    assert named.path == tmp_path / "from runner"
    assert own.path == tmp_path / "own"


def test_the_name_in_the_environment_is_the_schemas() -> None:
    """Two rooms of one floor repeat the literal; this keeps them the same."""
    from megascale_ops.checkpoint import manager
    from megascale_ops.schema import environment

    assert manager._DIR_VARIABLE == environment.CHECKPOINT_DIR


def test_the_best_and_every_so_many_steps_stay_beside_the_newest(tmp_path: Path) -> None:
    """By the metric that was given with each save; one that is no number makes no best one."""
    manager = CheckpointManager(tmp_path, keep=1, keep_every=4, keep_best=1)

    for step, loss in enumerate([3.0, 1.0, 2.0, float("nan"), 4.0, 3.5, 3.6], start=1):
        manager.save(step, {"a": step}, metric=loss)

    assert [storage.step_of(path) for path in storage.candidates(tmp_path)] == [7, 4, 2]


def test_a_manifest_without_a_metric_is_the_one_that_it_always_was(tmp_path: Path) -> None:
    """Older programs read it, and theirs are read; with one it says so."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"a": 1})
    manager.save(2, {"a": 1}, metric=0.5)
    texts = [(storage.final_folder(tmp_path, step) / "manifest.json").read_text() for step in (1, 2)]

    assert ["metric" in text for text in texts] == [False, True]
    assert CheckpointManager(tmp_path).restore({"a": 0}) == 2


def test_a_checkpoint_that_is_saved_again_while_it_is_read_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was verified is not what was read, so nothing is trusted."""
    from megascale_ops.checkpoint import latest

    manager = CheckpointManager(tmp_path)
    manager.save(1, {"a": 1})
    compare = latest.require_unchanged

    def overtaken(*given: Any) -> None:  # noqa: ANN401 (passed on)
        manager.save(1, {"a": 2})
        compare(*given)

    monkeypatch.setattr(latest, "require_unchanged", overtaken)

    with pytest.raises(CheckpointError, match="it was saved again while it was read: restore once more"):
        CheckpointManager(tmp_path).restore({"a": 0})


def test_checkpoints_that_go_while_they_are_looked_for_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job saves on beside a restore: what was listed is gone, so it looks again."""
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, {"a": 1})
    listed, looks = storage.candidates, []

    def late(root: Path) -> list[Path]:
        found = listed(root)
        looks.append(len(looks))
        if looks == [0]:
            manager.save(2, {"a": 2})
        return found

    state = {"a": 0}
    with monkeypatch.context() as patched:
        patched.setattr(storage, "candidates", late)
        assert CheckpointManager(tmp_path).restore(state) == 2

    assert state == {"a": 2}


def test_a_bad_checkpoint_is_passed_over_at_the_first_restore_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The runner names a step: earlier ones are preferred; what this process saves afterwards is its own."""
    CheckpointManager(tmp_path).save(1, {"a": 1})
    CheckpointManager(tmp_path).save(2, {"a": 2})
    monkeypatch.setenv("MEGASCALE_RESTORE_BEFORE", "2")
    manager, state = CheckpointManager(tmp_path), {"a": 0}

    first = manager.restore(state)
    manager.save(2, {"a": 22})
    second = manager.restore(state)

    assert (first, second, state["a"]) == (1, 2, 22)
    assert any("checkpoints of step 2 and later are passed over" in line for line in our_messages(caplog))


@pytest.mark.parametrize("told", ["1", "nonsense", "-3", "9" * 40, ""])
def test_where_nothing_earlier_is_there_the_newest_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    """Training never starts over in silence because of a limit, nor by what is no step."""
    CheckpointManager(tmp_path).save(1, {"a": 1})
    monkeypatch.setenv("MEGASCALE_RESTORE_BEFORE", told)

    assert CheckpointManager(tmp_path).restore({"a": 0}) == 1


def test_a_manifest_says_which_program_saved_and_what_it_goes_on_from(tmp_path: Path) -> None:
    """The first of a training has no parent; one after a restore has what was restored."""
    manager = CheckpointManager(tmp_path, keep=9)
    for step in (1, 2):
        manager.save(step, {"a": torch.ones(2)})
    manager.close()
    again = CheckpointManager(tmp_path, keep=9)
    assert again.restore({"a": torch.zeros(2)}) == 2
    again.save(7, {"a": torch.ones(2)})
    again.close()

    found = [latest.read_manifest(folder) for folder in reversed(storage.candidates(tmp_path))]
    assert all(isinstance(one, Manifest) for one in found)
    assert {one.code for one in found if isinstance(one, Manifest)} == {__version__}
    assert [one.parent for one in found if isinstance(one, Manifest)] == [msgspec.UNSET, 1, 2]
