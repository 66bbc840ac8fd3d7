# SPDX-License-Identifier: Apache-2.0
"""Lightning's ``Trainer`` saves and restores by ``CheckpointManager``: a ``Callback``.

    from megascale_ops.checkpoint.adapters.lightning import LightningCheckpoints

    trainer = Trainer(..., enable_checkpointing=False, callbacks=[LightningCheckpoints(every=500)])
    trainer.fit(module, loader)

When a fit begins, the newest checkpoint that verifies is restored: module, optimizers, schedulers, Lightning's own
loops (so its steps, epochs and the number of the batch), other callbacks, the precision's scaler and random generators.
Where in the data a fit goes on is as with Lightning's own checkpoints: a loader that has a ``state_dict`` goes on where
it was, any other one begins anew with as many batches as were left.

``on_save_checkpoint`` of a module is not asked: what it adds, a ``state_dict`` of the module's should.
"""

import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from megascale_ops.checkpoint.adapters import random_states
from megascale_ops.checkpoint.manager import CheckpointManager

_log = logging.getLogger("megascale_ops.checkpoint")


class LightningCheckpoints(Callback):
    """Saves every so many steps and at the end; restores at the beginning.

    Args:
        checkpoints: where to; None: the folder that ``megascale-ops run`` names, else ``checkpoints``.
        every: optimizer steps between two saves.
        at_end: save once more when a fit ends, where the last step was not saved.
        metric: name of a logged metric (``"val_loss"``) that is saved with a checkpoint, for ``keep_best`` of the
            manager: its newest value.
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
        self.restored = -1  # the step that was restored when the fit began; -1: none
        self._saved = -1
        self._is_due = False
        self._generators: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore; optimizers are made, and no loop has begun."""
        saved = _objects(trainer, pl_module) | {"loops": {}, "callbacks": {}, "precision": {}, "random": []}
        self.restored = self._saved = self.checkpoints.restore(saved)
        if self.restored < 0:
            return
        trainer.fit_loop.load_state_dict(saved["loops"])
        for other in trainer.callbacks:  # type: ignore[attr-defined]  # set by the trainer
            if other.state_key in saved["callbacks"]:
                other.load_state_dict(saved["callbacks"][other.state_key])
        trainer.precision_plugin.load_state_dict(saved["precision"])
        self._generators = saved["random"]
        _log.info("training goes on after step %d", self.restored)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:  # noqa: ANN401  as Lightning calls it
        """Save the step before; or put the generators back, from which loaders and sanity checks have drawn."""
        del batch, batch_idx
        if self._is_due:
            self._save(trainer, pl_module)
        if self._generators:
            random_states.put_back(self._generators)
            self._generators = []

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401  same
        batch: Any,  # noqa: ANN401  same
        batch_idx: int,
    ) -> None:
        """See whether it is time to save: after the validation, if there is one now, else before the next batch.

        A validation draws from the generators, and has the metric. A batch that is only accumulated is no step.
        """
        del pl_module, outputs, batch, batch_idx
        step = trainer.global_step
        self._is_due = step > self._saved and step % self.every == 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what waited for the validation."""
        if self._is_due and not trainer.sanity_checking:
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step."""
        if self.at_end and trainer.global_step > self._saved:
            self._save(trainer, pl_module)

    def _save(self, trainer: Trainer, module: LightningModule) -> None:
        step, metric = trainer.global_step, trainer.callback_metrics.get(self.metric)
        others = {each.state_key: each.state_dict() for each in trainer.callbacks if each is not self}  # type: ignore[attr-defined]  # same
        saved = _objects(trainer, module) | {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": {key: state for key, state in others.items() if state},
            "precision": trainer.precision_plugin.state_dict(),
            "random": random_states.gathered(),
        }
        self.checkpoints.save(step, saved, metric=None if metric is None else float(metric))
        self._saved, self._is_due = step, False


def _objects(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """What is saved by its own state."""
    optimizers = {f"optimizer{number}": each for number, each in enumerate(trainer.optimizers)}
    schedulers = {f"scheduler{number}": each.scheduler for number, each in enumerate(trainer.lr_scheduler_configs)}
    return {"model": module} | optimizers | schedulers
