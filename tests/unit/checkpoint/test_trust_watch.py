# SPDX-License-Identifier: Apache-2.0
"""One call of ``save`` is looked at once, and what is restored reminds of what was found; a damaged file does not."""

import logging
from pathlib import Path

import pytest
import torch

from megascale_ops.checkpoint import CheckpointManager, latest
from megascale_ops.checkpoint.manifest import Manifest
from megascale_ops.checkpoint.ranks import Ranks
from megascale_ops.checkpoint.trust import alarms
from megascale_ops.checkpoint.trust.trust import Trust
from megascale_ops.checkpoint.trust.watch import Watch
from megascale_ops.errors import UsageError


def test_a_save_to_two_tiers_is_looked_at_once() -> None:
    """The second tier gets what the first one saw, though the weights have changed meanwhile."""
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    watch = Watch(Trust("check", (), freshness=True), 1, state, Ranks())
    flat = {f"model.{name}": value for name, value in model.state_dict().items()}

    first = watch.look(flat)
    found = watch.conclude([first])
    with torch.no_grad():
        model.weight.add_(1)

    assert first is not None
    assert watch.look(flat) is first
    assert watch.conclude([first]) is found


def stale_checkpoint(folder: Path) -> tuple[Path, Manifest]:
    """A checkpoint whose weights did not move though the optimizer did."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    manager, state = CheckpointManager(folder), {"model": model, "optimizer": optimizer}
    for step in (1, 2, 3):
        before = [each.detach().clone() for each in model.parameters()]
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for each, old in zip(model.parameters(), before, strict=True):
                each.copy_(old)
        manager.save(step, state)
    sealed = latest.read_manifest(folder / "step-00000003")
    assert isinstance(sealed, Manifest)
    return folder / "step-00000003", sealed


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_restore_reminds_of_what_was_found_where_it_can_be_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_damaged: bool
) -> None:
    """A damaged file of findings costs no checkpoint, and says nothing but that it is damaged."""
    folder, sealed = stale_checkpoint(tmp_path)
    raw = bytearray((folder / alarms.FILE_NAME).read_bytes())
    assert alarms.FILE_NAME in [entry.name for entry in sealed.files]
    raw[-2] ^= is_damaged
    (folder / alarms.FILE_NAME).write_bytes(raw)
    caplog.clear()

    with caplog.at_level(logging.WARNING):
        assert CheckpointManager(tmp_path).restore({"model": torch.nn.Linear(2, 2)}) == 3

    assert ("no parameter of 'optimizer' has changed" in caplog.text) is not is_damaged
    assert ("trust.json is damaged" in caplog.text) is is_damaged


@pytest.mark.parametrize("mode", ["async", "overlapped"])
def test_saves_in_the_background_to_the_memory_of_one_process_are_refused(mode: str) -> None:
    """In one sentence, with what to do: no writer process would see them."""
    with pytest.raises(UsageError, match="what is at memory://run7 only this one sees: leave mode out"):
        CheckpointManager("memory://run7", mode=mode)  # type: ignore[arg-type]  # one of its words
