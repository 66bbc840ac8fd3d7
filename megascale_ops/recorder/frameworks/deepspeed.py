# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: what an engine saves and evaluates, and its ``global_steps``."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megascale_ops.recorder.frameworks.library import Hook, Library


def _engine(engine: ModuleType, library: Library) -> None:
    """Declare saving, and take the step number around each step of the optimizer.

    The place is the one that pipelines have in common with all others: there ``step`` is not for callers.
    """

    def wrap(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def told(self: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401  as the function itself
            library.count(self, "global_steps")
            result = step(self, *args, **named)
            library.count(self, "global_steps")
            return result

        return told

    library.declare(engine.DeepSpeedEngine, "checkpoint", "save_checkpoint", also=("save_16bit_model",))
    library.replace(engine.DeepSpeedEngine, "_take_model_step", wrap)


def _pipeline(engine: ModuleType, library: Library) -> None:
    """Declare a pipeline's evaluation."""
    library.declare(engine.PipelineEngine, "eval", "eval_batch")


HOOKS: dict[str, Hook] = {
    "deepspeed.runtime.engine": _engine,
    "deepspeed.runtime.pipe.engine": _pipeline,
}
