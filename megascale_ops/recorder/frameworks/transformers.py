# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: what ``Trainer`` evaluates, predicts and saves, and its ``state.global_step``.

Evaluation is seen twice, by its public name and by the loop inside of it, for trainers that override the one.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megascale_ops.recorder.frameworks.library import Hook, Library


def _trainer(trainer: ModuleType, library: Library) -> None:
    """Declare what the trainer does beside training."""
    owner = trainer.Trainer
    library.declare(owner, "eval", "evaluate", "predict", also=("evaluation_loop", "prediction_loop"))
    library.declare(owner, "checkpoint", "save_model", also=("_save_checkpoint",))
    library.declare(owner, "upload", also=("push_to_hub",))


def _steps(trainer_callback: ModuleType, library: Library) -> None:
    """Take the step number where the trainer passes it to its callbacks: before training, and after each step."""

    def wrap(event: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(event)
        def told(self: Any, args: Any, state: Any, *others: Any, **named: Any) -> Any:  # noqa: ANN401  as the event itself
            library.count(state, "global_step")
            return event(self, args, state, *others, **named)

        return told

    for name in ("on_train_begin", "on_step_end"):
        library.replace(trainer_callback.CallbackHandler, name, wrap)


def _models(modeling_utils: ModuleType, library: Library) -> None:
    """Declare the saving of a model by itself."""
    library.declare(modeling_utils.PreTrainedModel, "checkpoint", "save_pretrained")


HOOKS: dict[str, Hook] = {
    "transformers.trainer": _trainer,
    "transformers.trainer_callback": _steps,
    "transformers.modeling_utils": _models,
}
