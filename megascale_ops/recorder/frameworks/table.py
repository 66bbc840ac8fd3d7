# SPDX-License-Identifier: Apache-2.0
"""All libraries whose phases and steps are seen, by the modules that are hooked once the script has imported them.

Nothing is imported for their sake: a script that uses none of them pays for some names in a dictionary.
"""

import functools
import sys

from megascale_ops.recorder.frameworks import accelerate, deepspeed, lightning, pytorch, safetensors, transformers
from megascale_ops.recorder.frameworks.library import Hook, Library
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.torch_hooks.import_hook import once_imported

NAME = "the hooks on frameworks"
HOOKS: dict[str, Hook] = {
    **pytorch.HOOKS,
    **transformers.HOOKS,
    **accelerate.HOOKS,
    **safetensors.HOOKS,
    **lightning.HOOKS,
    **deepspeed.HOOKS,
}


def watch(recording: Recording) -> None:
    """Put each hook in place as soon as its module is there."""
    for module, hook in HOOKS.items():
        once_imported(module, functools.partial(_put, module, hook, recording))


def _put(module: str, hook: Hook, recording: Recording) -> None:
    hook(sys.modules[module], Library(module.partition(".")[0], recording))
