# SPDX-License-Identifier: Apache-2.0
"""The loss, for the detectors: taken as the script has it, read without ever waiting for a GPU.

A number is a number. A scalar on the CPU is read at once. One on a GPU is copied in the background into pinned memory,
and read when the copy has ended, usually a step later: asking for it now would make the host wait for all that the
script has launched. While such a copy is under way further values are passed over, so at most one is ever waiting.
"""

from typing import Any


class LossKeeper:
    """The last loss that is known."""

    __slots__ = ("_copied", "_copy", "_value")

    def __init__(self) -> None:
        self._value: float | None = None
        self._copy: Any = None
        self._copied: Any = None

    def keep(self, value: Any) -> None:  # noqa: ANN401  a number or a tensor; torch is not imported here
        """Keep a loss until it is read.

        Raises:
            TypeError, ValueError: it is neither a number nor a tensor with one element.
        """
        # An array of numpy has a device, too: the word "cpu".
        if getattr(getattr(value, "device", None), "type", "cpu") == "cpu":
            # An array or tensor of more than one element raises by itself.
            self._value = float(value.detach()) if hasattr(value, "detach") else float(value)
        elif self._copy is None or self._arrived():
            self._begin_copy(value)

    def keep_root(self, root: Any) -> None:  # noqa: ANN401  whatever a backward pass begins with
        """Keep what a backward pass begins with, if that is one scalar on the CPU: the loss of most scripts."""
        if getattr(root, "is_cpu", False) and root.numel() == 1:
            self._value = root.item()

    def read(self) -> float | None:
        """Return the last loss known and forget it; None when none came since the last call."""
        if self._copy is not None:
            self._arrived()
        value, self._value = self._value, None
        return value

    def _begin_copy(self, value: Any) -> None:  # noqa: ANN401  as above
        import torch

        copy = torch.empty((), dtype=torch.float32, pin_memory=True)
        copy.copy_(value.detach().reshape(()), non_blocking=True)
        copied = torch.Event(device=value.device)
        copied.record()
        self._copy, self._copied = copy, copied

    def _arrived(self) -> bool:
        """Take over a copy that has ended; return whether it has."""
        if not self._copied.query():
            return False
        self._value, self._copy = float(self._copy), None
        return True
