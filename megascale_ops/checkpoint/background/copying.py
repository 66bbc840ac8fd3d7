# SPDX-License-Identifier: Apache-2.0
"""Copy tensors into the host buffer: those of GPUs on streams of their own, all others at once.

A copy begins when the work is done that its device was given before the save, and runs beside what it is given after.
Two kinds of tensors: what only an optimizer step overwrites may still be copied when the training goes on (overlapped),
everything else is waited for. Nothing waits on the host for the first kind: before an optimizer step, the stream that
will overwrite it is told to wait for the copy's event.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Copy(NamedTuple):
    """One tensor, and the bytes it is copied to."""

    source: torch.Tensor
    target: torch.Tensor


class Started(NamedTuple):
    """Copies that run, by the events that end them, one for each device: what is waited for, and all."""

    waited: dict[torch.device, torch.cuda.Event]
    ends: dict[torch.device, torch.cuda.Event]


class Copier:
    """Copies of one rank; a stream for each of its devices.

    Args:
        overlapped: let what only an optimizer overwrites be copied while the training goes on.
    """

    def __init__(self, *, overlapped: bool) -> None:
        self.pending: dict[torch.device, torch.cuda.Event] = {}  # ends of copies that still run
        self._overlapped = overlapped
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._hook = register_optimizer_step_pre_hook(self._before_step) if overlapped else None

    def start(self, copies: Iterable[Copy], overwritten_by_steps: frozenset[int]) -> Started:
        """Start copies from GPUs.

        Args:
            copies: what, and where to.
            overwritten_by_steps: addresses of the storages that only optimizer steps write to.
        """
        shares: dict[torch.device, tuple[list[Copy], list[Copy]]] = {}
        for each in copies:
            may_wait = self._overlapped and each.source.untyped_storage().data_ptr() in overwritten_by_steps
            shares.setdefault(each.source.device, ([], []))[may_wait].append(each)
        waited = {device: self._enqueue(device, share[0]) for device, share in shares.items() if share[0]}
        ends = {
            device: self._enqueue(device, share[1]) if share[1] else waited[device] for device, share in shares.items()
        }
        return Started(waited, ends)

    def finish(self, started: Started) -> None:
        """Return when everything is copied but what only optimizer steps overwrite; that is ``pending``."""
        for event in started.waited.values():
            event.synchronize()
        self.pending = started.ends if self._overlapped else {}

    def end(self, started: Started) -> None:
        """Return when everything is copied."""
        for event in started.ends.values():
            event.synchronize()

    def copy_now(self, copies: Iterable[Copy]) -> None:
        """Copy, from wherever; when this returns it is done."""
        _copy_all(copies, non_blocking=False)

    def wait_copied(self) -> None:
        """Make the current streams wait for the copies; the host does not."""
        for device, end in self.pending.items():
            torch.cuda.current_stream(device).wait_event(end)

    def close(self) -> None:
        """End the copies and take the hook away."""
        for end in self.pending.values():
            end.synchronize()
        self.pending = {}
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _before_step(self, _optimizer: object, _args: object, _kwargs: object) -> None:
        # A step that is captured overwrites nothing yet.
        if self.pending and not torch.cuda.is_current_stream_capturing():
            self.wait_copied()

    def _enqueue(self, device: torch.device, share: list[Copy]) -> torch.cuda.Event:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no type
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            _copy_all(share, non_blocking=True)
            for each in share:
                each.source.record_stream(stream)  # its memory is not given out anew before it is copied
            # blocking: the thread that waits for it sleeps
            end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch gives it no type
            end.record(stream)
        return end


@torch.no_grad()
def _copy_all(share: Iterable[Copy], *, non_blocking: bool) -> None:
    for source, target in share:
        if source.numel():
            # What is to be read as conjugate or negative is made so on its device: torch copies the bytes and turns
            # them on the host, where it does not wait for a copy that does not block, which may come after that.
            plain = source.resolve_conj().resolve_neg()
            target.view(source.dtype).view(source.shape).copy_(plain, non_blocking=non_blocking)


def written_by_steps(state: Mapping[str, Any]) -> frozenset[int]:
    """The addresses of all storages that an optimizer of this state holds: parameters, moments, counters.

    Args:
        state: as given to ``CheckpointManager.save``.
    """
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    return frozenset(
        local.untyped_storage().data_ptr()
        for optimizer in optimizers
        for tensor in _tensors_of(optimizer)
        for local in (_local(tensor),)
        if local.device.type == "cuda"
    )


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for held in optimizer.state.values():
        yield from (value for value in held.values() if isinstance(value, torch.Tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's block of a sharded tensor; a plain one as it is."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()
