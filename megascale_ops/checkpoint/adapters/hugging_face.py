# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's ``Trainer`` saves and restores by ``CheckpointManager``: a ``TrainerCallback``.

    from megascale_ops.checkpoint.adapters.hugging_face import TrainerCheckpoints

    trainer = Trainer(..., args=TrainingArguments(..., save_strategy="no"), callbacks=[TrainerCheckpoints(every=500)])
    trainer.train()

When training begins, the newest checkpoint that verifies is restored: model, optimizer, scheduler, scaler, the
trainer's own state (steps, logs, best metric) and random generators. The data goes on where it was: in the order of the
epoch (as accelerate's samplers draw it by seed and epoch), behind the batches that were trained on, which are read and
dropped. ``ignore_data_skip`` of the trainer's arguments leaves that out.

A callback can't change what the loop has in its own variables. So the loop counts its epochs from the restart, and this
counts them right for the data and in ``state.epoch``; and where an epoch's batches are no multiple of
``gradient_accumulation_steps``, the last of them in the epoch of the restart are not trained on before the next epoch
begins: that is logged.
"""

import logging
import math
from functools import partial
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from megascale_ops.checkpoint.adapters import random_states
from megascale_ops.checkpoint.manager import CheckpointManager

# Of ``TrainerState``: what has changed since training began, and is data.
_FIELDS = (
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)

_log = logging.getLogger("megascale_ops.checkpoint")


class TrainerCheckpoints(TrainerCallback):
    """Saves every so many steps and at the end; restores at the beginning.

    Args:
        checkpoints: where to; None: the folder that ``megascale-ops run`` names, else ``checkpoints``.
        every: steps between two saves.
        at_end: save once more when training ends, where the last step was not saved.
        metric: name of an evaluation's metric (``"eval_loss"``) that is saved with a checkpoint, for ``keep_best`` of
            the manager. A step that is evaluated is saved after its evaluation.
    """

    def __init__(
        self,
        checkpoints: CheckpointManager | None = None,
        *,
        every: int = 500,
        at_end: bool = True,
        metric: str = "",
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} steps can't be: 1 at least")
        self.checkpoints = checkpoints if checkpoints is not None else CheckpointManager.from_environment()
        self.every, self.at_end, self.metric = every, at_end, metric
        self.restored = -1  # the step that was restored when training began; -1: none
        self._saved = -1
        self._is_due = False
        self._metrics: dict[str, float] = {}
        self._place = _Place()
        self._generators: list[dict[str, Any]] = []

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,  # noqa: ANN401  as it is called
    ) -> None:
        """Restore; the loop has made the optimizer, and not begun."""
        del control
        saved = _state(state, given) | {"random": []}
        self._place = _Place()
        self.restored = self._saved = self.checkpoints.restore(saved)
        if self.restored < 0:
            return
        for name, value in saved["trainer"].items():
            setattr(state, name, value)
        state.global_step = self.restored
        self._generators = saved["random"]
        self._place = _go_on(given["train_dataloader"], args, state)
        _log.info("training goes on after step %d", self.restored)

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,  # noqa: ANN401  as it is called
    ) -> None:
        """The loop is about to tell its loader the number of the epoch."""
        del args, state, control, given
        self._place.is_next_the_loops = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:  # noqa: ANN401  as it is called
        """Later epochs are read from their beginning."""
        del args, state, control
        if self._place.skipped:
            given["train_dataloader"].skip_batches = self._place.skipped = 0

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,  # noqa: ANN401  as it is called
    ) -> None:
        """Put the generators back as late as this: a loader that begins has drawn from them."""
        del args, state, control, given
        if self._generators:
            random_states.put_back(self._generators)
            self._generators = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:  # noqa: ANN401  as it is called
        """Save if it is time; where this step is evaluated, afterwards."""
        del args
        if state.epoch is not None:
            state.epoch += self._place.epochs + self._place.skipped / max(1, self._place.batches)
        self._is_due = state.global_step % self.every == 0
        if self._is_due and not control.should_evaluate:  # an evaluation draws from the generators, and has the metric
            self._save(state, given)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:  # noqa: ANN401  as it is called
        """Note the metric, and save what waited for it."""
        del args, control
        self._metrics = given.get("metrics") or {}
        if self._is_due:
            self._save(state, given)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:  # noqa: ANN401  as it is called
        """The first loss after a restart is a sum over the steps since then, which the loop divides by all."""
        del args, control
        logs, counted = given.get("logs") or {}, state.global_step - self.restored
        if self._place.is_first_log and "loss" in logs and counted > 0:
            self._place.is_first_log = False
            logs["loss"] = logs["loss"] * state.global_step / counted
            if state.log_history and "loss" in state.log_history[-1]:
                state.log_history[-1]["loss"] = logs["loss"]

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:  # noqa: ANN401  as it is called
        """Save the last step."""
        del args, control
        if self.at_end and state.global_step > self._saved:
            self._save(state, given)

    def _save(self, state: TrainerState, given: dict[str, Any]) -> None:
        self._is_due = False
        if self._saved == state.global_step:
            return
        saved = _state(state, given) | {"random": random_states.gathered()}
        self.checkpoints.save(state.global_step, saved, metric=self._metrics.get(self.metric))
        self._saved = state.global_step


class _Place:
    """Where in the data the loop was when training began."""

    def __init__(self, epochs: int = 0, skipped: int = 0, batches: int = 0, *, is_restored: bool = False) -> None:
        self.epochs = epochs  # that the loop does not know of
        self.skipped = skipped  # batches of the first one
        self.batches = batches  # of an epoch
        self.is_first_log = is_restored
        self.is_next_the_loops = False  # the next number of an epoch that the loader hears is the loop's


def _state(state: TrainerState, given: dict[str, Any]) -> dict[str, Any]:
    """All that is saved but the generators; objects of accelerate that wrap torch's are opened."""
    optimizer = given["optimizer"]
    held = {
        "model": given["model"],
        "optimizer": getattr(optimizer, "optimizer", optimizer),
        "scheduler": given["lr_scheduler"],
        "trainer": {name: getattr(state, name) for name in _FIELDS if hasattr(state, name)},
    }
    scaler = getattr(optimizer, "scaler", None)
    return held if scaler is None else held | {"scaler": scaler}


def _go_on(loader: Any, args: TrainingArguments, state: TrainerState) -> _Place:  # noqa: ANN401  of accelerate's kinds
    """Let a loader begin where training was; at the end of all training, with nothing."""
    place = _Place(is_restored=True)
    if not hasattr(loader, "set_epoch") or not hasattr(loader, "skip_batches"):
        if state.global_step and not args.ignore_data_skip:
            _log.warning("this data loader can't go on where it was: the data begins anew")
        return place
    try:
        place.batches = len(loader)
    except TypeError:  # without a length there are no epochs to count
        place.batches = 0
    accumulated = args.gradient_accumulation_steps
    updates = math.ceil(place.batches / accumulated)
    if updates and not args.ignore_data_skip:
        place.epochs, place.skipped = state.global_step // updates, state.global_step % updates * accumulated
        if place.skipped and place.batches % accumulated:
            _log.warning(
                "%d batches at the end of this epoch are not trained on before the next: its %d are no multiple of "
                "gradient_accumulation_steps=%d",
                *(place.batches % accumulated, place.batches, accumulated),
            )
    elif not args.ignore_data_skip:
        place.skipped = state.global_step * accumulated
    loader.skip_batches = place.skipped
    if state.max_steps > 0 and state.global_step >= state.max_steps:
        loader.skip_batches = place.skipped = place.batches or state.global_step * accumulated * 2
    loader.set_epoch = partial(_set_epoch, loader.set_epoch, place)
    return place


def _set_epoch(set_epoch: Any, place: _Place, epoch: int) -> None:  # noqa: ANN401  a method of accelerate's
    """Number an epoch of the loop as it would be without a restart; the loader's own calls are right already."""
    set_epoch(epoch + place.epochs if place.is_next_the_loops else epoch)
    place.is_next_the_loops = False
