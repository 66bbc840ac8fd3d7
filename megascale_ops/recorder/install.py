# SPDX-License-Identifier: Apache-2.0
"""Put the hooks into torch, right after the script has imported it. Each piece stands or falls on its own."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from megascale_ops.recorder import worker_server
from megascale_ops.recorder.aside import guarded, step_aside
from megascale_ops.recorder.import_hook import after_import
from megascale_ops.recorder.opening import open_recording, opened_beat, opened_settings
from megascale_ops.recorder.recording import Recording

Event = Callable[[], None]


def install() -> None:
    """Open the box and install every hook; never raises. Called once, when torch has been imported."""
    recording = open_recording()
    if recording is None:
        return
    for name, piece in (
        ("the optimizer hook", _optimizers),
        ("the backward hook", _backward),
        ("the data loader hook", _data_loaders),
        ("the torch.save hook", _saves),
        ("the hook on distributed checkpoints", _distributed_checkpoints),
        ("the hook on checkpoints", _our_checkpoints),
        ("the hook on collectives", _collectives),
        ("the process group status", _position),
        ("the worker server", _worker_server),
    ):
        try:
            piece(recording)
        except Exception as error:  # noqa: BLE001  one hook less, but the script and the other hooks run; said once
            step_aside(name, error)


def bracket(function: Callable[..., Any], begin: Event, end: Event, failed: Event | None = None) -> Callable[..., Any]:
    """Return ``function`` with ``begin`` before it, and after it ``end``, or ``failed`` when it raises.

    torch.compile traces the function itself.
    """
    from torch.compiler import is_compiling

    if_raised = failed or end

    @functools.wraps(function)
    def bracketed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the function itself
        if is_compiling():
            return function(*args, **kwargs)
        begin()
        try:
            result = function(*args, **kwargs)
        except BaseException:
            if_raised()
            raise
        end()
        return result

    return bracketed


def _optimizers(recording: Recording) -> None:
    """See every optimizer's step through torch's global hooks."""
    from torch.optim import optimizer

    begin = guarded("the optimizer hook", recording.optimizer_begin)
    end = guarded("the optimizer hook", recording.optimizer_end)
    optimizer.register_optimizer_step_pre_hook(begin)
    optimizer.register_optimizer_step_post_hook(end)


def _backward(recording: Recording) -> None:
    """See the backward pass: ``Tensor.backward`` looks this function up at each call."""
    from torch import autograd

    name = "the backward hook"
    begin, end = guarded(name, recording.backward_begin), guarded(name, recording.backward_end)
    autograd.backward = bracket(autograd.backward, begin, end)


def _data_loaders(recording: Recording) -> None:
    """See the wait for a batch, of every kind of DataLoader."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    name = "the data loader hook"
    begin, end = guarded(name, recording.data_begin), guarded(name, recording.data_end)
    patched = bracket(_BaseDataLoaderIter.__next__, begin, end, guarded(name, recording.data_none))
    _BaseDataLoaderIter.__next__ = patched  # type: ignore[method-assign]  # that is the point


def _checkpoint_phase(name: str, recording: Recording) -> tuple[Event, Event]:
    """Return the two events around a save."""
    begin = guarded(name, recording.phase_begin)
    return lambda: begin("checkpoint"), guarded(name, recording.phase_end)


def _saves(recording: Recording) -> None:
    """See ``torch.save`` under both its names."""
    import torch
    from torch import serialization

    saved = bracket(serialization.save, *_checkpoint_phase("the torch.save hook", recording))
    serialization.save = saved
    torch.save = saved


def _distributed_checkpoints(recording: Recording) -> None:
    """See distributed checkpoints, once the script imports them (half a second that is not ours to spend)."""
    module = "torch.distributed.checkpoint.state_dict_saver"
    events = _checkpoint_phase("the hook on distributed checkpoints", recording)

    def patch() -> None:
        saver = sys.modules[module]
        # In a warm worker the package is imported already and holds the same functions under its own name.
        package = sys.modules.get("torch.distributed.checkpoint")
        for name in ("save", "async_save"):
            seen = bracket(getattr(saver, name), *events)
            setattr(saver, name, seen)
            if hasattr(package, name):
                setattr(package, name, seen)

    if module in sys.modules:
        patch()
    else:
        after_import(module, patch)


def _our_checkpoints(recording: Recording) -> None:
    """Listen to our own checkpoints, once the script imports them: they know the script's step number."""
    module = "megascale_ops.checkpoint.notify"
    told = guarded("the hook on checkpoints", recording.checkpoint)

    def listen() -> None:
        sys.modules[module].observers.append(told)

    if module in sys.modules:
        listen()
    else:
        after_import(module, listen)


def _collectives(recording: Recording) -> None:
    """Put a note around each collective function, under both its names."""
    from torch import distributed
    from torch.compiler import is_compiling

    if not distributed.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    from megascale_ops.recorder.collectives import FUNCTIONS, CollectiveLog, wrap

    log = CollectiveLog(recording, lambda: c10d.GroupMember.WORLD)
    for name in FUNCTIONS:
        if hasattr(c10d, name):
            noted = wrap(getattr(c10d, name), log, is_compiling)
            setattr(c10d, name, noted)
            setattr(distributed, name, noted)


def _position(_: Recording) -> None:
    """Let the beat follow torch's process group status, where this torch has it."""
    from torch import _C

    dump = getattr(getattr(_C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    beat = opened_beat()
    if dump is not None and beat is not None:
        beat.follow(lambda: dump(includeCollectives=False))


def _worker_server(recording: Recording) -> None:
    """Let the agent ask for stacks and the flight recorder, also while the GIL is held."""
    settings = opened_settings()
    if settings is not None:
        worker_server.start(recording, settings)
