# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own: saves, distributed checkpoints, exports and compilations.

Loading an optimizer's state the distributed way makes an empty step first, to have something to load into; inside
"checkpoint" nothing counts as a step.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from megascale_ops.recorder.frameworks.library import Hook, Library


def _saves(serialization: ModuleType, library: Library) -> None:
    """See ``torch.save`` under both its names."""
    library.declare(serialization, "checkpoint", "save")
    sys.modules["torch"].save = serialization.save  # type: ignore[attr-defined]  # that is the other one


def _distributed_saves(saver: ModuleType, library: Library) -> None:
    """See distributed checkpoints under both their names."""
    library.declare(saver, "checkpoint", "save", "async_save", also=("save_state_dict",))
    # In a warm worker the package is imported already and holds the same functions under its own name.
    package = sys.modules.get("torch.distributed.checkpoint")
    for name in ("save", "async_save", "save_state_dict"):
        if hasattr(package, name):
            setattr(package, name, getattr(saver, name))


def _distributed_states(state_dict: ModuleType, library: Library) -> None:
    """See states being gathered and spread."""
    whats = ("state_dict", "optimizer_state_dict", "model_state_dict")
    library.declare(state_dict, "checkpoint", *(f"{verb}_{what}" for verb in ("get", "set") for what in whats))


def _exports(export: ModuleType, library: Library) -> None:
    """See ``torch.export`` and ``torch.onnx``, whose work takes minutes for a large model."""
    library.declare(export, "export", "export", also=("draft_export",))


def _compilations(callback: ModuleType, library: Library) -> None:
    """See every compilation of ``torch.compile``, also those that begin in the midst of training.

    Not by the callbacks that this module offers: of two threads that compile at a time the one begins and the other
    ends, and a phase belongs to its thread.
    """
    handler: Any = callback.callback_handler
    install = handler.install_callbacks

    @contextmanager
    def seen(*args: Any, **kwargs: Any) -> Generator[None, Any, Any]:  # noqa: ANN401  as the function itself
        library.begin("compile")
        try:
            with install(*args, **kwargs):
                yield
        finally:
            library.end()

    handler.install_callbacks = seen


HOOKS: dict[str, Hook] = {
    "torch.serialization": _saves,
    "torch.distributed.checkpoint.state_dict_saver": _distributed_saves,
    "torch.distributed.checkpoint.state_dict": _distributed_states,
    "torch.export": _exports,
    "torch.onnx": _exports,
    "torch._dynamo.callback": _compilations,
}
