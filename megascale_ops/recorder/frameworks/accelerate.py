# SPDX-License-Identifier: Apache-2.0
"""Hugging Face accelerate: what an ``Accelerator`` saves. Its step number is the optimizer's own."""

from types import ModuleType

from megascale_ops.recorder.frameworks.library import Hook, Library


def _accelerator(accelerator: ModuleType, library: Library) -> None:
    """Declare saving, whole and of a model."""
    library.declare(accelerator.Accelerator, "checkpoint", "save_state", also=("save_model", "save"))


HOOKS: dict[str, Hook] = {"accelerate.accelerator": _accelerator}
