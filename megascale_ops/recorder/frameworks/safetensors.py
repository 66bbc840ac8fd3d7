# SPDX-License-Identifier: Apache-2.0
"""safetensors: what a script saves with it by itself."""

from types import ModuleType

from megascale_ops.recorder.frameworks.library import Hook, Library


def _files(module: ModuleType, library: Library) -> None:
    """Declare the writing of a file."""
    library.declare(module, "checkpoint", "save_file", also=("save_model",))


HOOKS: dict[str, Hook] = {"safetensors.torch": _files}
