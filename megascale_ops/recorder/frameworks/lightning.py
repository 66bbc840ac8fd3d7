# SPDX-License-Identifier: Apache-2.0
"""Lightning and Fabric: validation, test, sanity check, prediction, checkpoints, and ``trainer.global_step``.

The same code is installed under two names, ``lightning`` and ``pytorch_lightning``. The loops have a run of their own:
it is inside ``Trainer.validate`` and ``Trainer.fit`` alike.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megascale_ops.recorder.frameworks.library import Hook, Library


def _trainer(trainer: ModuleType, library: Library) -> None:
    """Declare what the trainer does beside training."""
    library.declare(trainer.Trainer, "eval", "validate", "test", "predict")
    library.declare(trainer.Trainer, "checkpoint", "save_checkpoint")


def _evaluation(loop: ModuleType, library: Library) -> None:
    """Declare validation, test and sanity check."""
    library.declare(loop._EvaluationLoop, "eval", "run")  # noqa: SLF001  of this name since Lightning 2.0


def _prediction(loop: ModuleType, library: Library) -> None:
    """Declare prediction."""
    library.declare(loop._PredictionLoop, "eval", "run")  # noqa: SLF001  as above


def _steps(loop: ModuleType, library: Library) -> None:
    """Take the step number before and after each batch."""

    def wrap(advance: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(advance)
        def told(self: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401  as the function itself
            library.count(self, "global_step")
            result = advance(self, *args, **named)
            library.count(self, "global_step")
            return result

        return told

    library.replace(loop._TrainingEpochLoop, "advance", wrap)  # noqa: SLF001  as above


def _fabric(fabric: ModuleType, library: Library) -> None:
    """Declare Fabric's checkpoints; its step number is the optimizer's own."""
    library.declare(fabric.Fabric, "checkpoint", "save")


HOOKS: dict[str, Hook] = {
    f"{package}.{module}": hook
    for package, fabric in (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
    for module, hook in (
        ("trainer.trainer", _trainer),
        ("loops.evaluation_loop", _evaluation),
        ("loops.prediction_loop", _prediction),
        ("loops.training_epoch_loop", _steps),
    )
} | {"lightning.fabric.fabric": _fabric, "lightning_fabric.fabric": _fabric}
