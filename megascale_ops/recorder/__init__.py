# SPDX-License-Identifier: Apache-2.0
"""In the training process: write down what the rank is doing, without any change to the script, and by hand.

By hand: ``from megascale_ops.recorder import recorder``, then ``with recorder.phase("eval"): ...`` and
``recorder.step()``. Outside of a MegaScale run both do nothing. Importing this room imports neither torch nor a box.
"""

from megascale_ops.recorder.first_use import open_first
from megascale_ops.recorder.recording.api import recorder

recorder.open_with(open_first)

__all__ = ["recorder"]
