# SPDX-License-Identifier: Apache-2.0
"""Put the hooks into torch, right after the script has imported it. Each piece stands or falls on its own."""

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

from megascale_ops.blackbox.records import RestoresRecord, SavesRecord
from megascale_ops.recorder.frameworks import table
from megascale_ops.recorder.hook_guard import guarded, guarded_about, guarded_plain, step_aside
from megascale_ops.recorder.recording.api import recorder
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.recording.start import open_recording, opened_monitor, opened_settings
from megascale_ops.recorder.torch_hooks import debugger, evaluation, kernel_profile, mesh, worker_server
from megascale_ops.recorder.torch_hooks.bracket import bracket
from megascale_ops.recorder.torch_hooks.import_hook import once_imported


def install() -> None:
    """Open the box and install every hook; never raises. Called once, when torch has been imported."""
    recording = open_recording()
    if recording is None:
        return
    recorder.attach(recording)
    for name, piece in (
        ("the optimizer hook", _optimizers),
        ("the backward hook", _backward),
        ("the data loader hook", _data_loaders),
        (evaluation.NAME, evaluation.watch),
        ("the hook on checkpoints", _our_checkpoints),
        ("the hook on collectives", _collectives),
        ("the hook on waits", _waits),
        (mesh.NAME, mesh.watch),
        (debugger.NAME, debugger.watch),
        ("the garbage collector's times", _collector),
        ("the GPU timers", _gpu_timers),
        (kernel_profile.NAME, _kernel_profile),
        ("the process group status", _position),
        ("the worker server", _worker_server),
        (table.NAME, table.watch),
    ):
        try:
            piece(recording)
        except Exception as error:  # noqa: BLE001  one hook less, but the script and the other hooks run; reported once
            step_aside(name, error)


def _optimizers(recording: Recording) -> None:
    """See every optimizer's step through torch's global hooks."""
    from torch.optim import optimizer

    begin = guarded_about("the optimizer hook", recording.optimizer_begin)
    end = guarded_about("the optimizer hook", recording.optimizer_end)
    optimizer.register_optimizer_step_pre_hook(begin)
    optimizer.register_optimizer_step_post_hook(end)


def _backward(recording: Recording) -> None:
    """See the backward pass: ``Tensor.backward`` looks this function up at each call."""
    from torch import autograd
    from torch.compiler import is_compiling
    from torch.nn.parallel import DistributedDataParallel

    from megascale_ops.recorder.torch_hooks.waits import BackwardWatch, wrap_making

    name = "the backward hook"
    begin, end = guarded_plain(name, recording.backward_begin), guarded_plain(name, recording.backward_end)
    watch = BackwardWatch(recording, _default_group())
    look = guarded_about("the hook on the loss and on waits", watch.begin)
    backward = autograd.backward
    DistributedDataParallel.__init__ = wrap_making(DistributedDataParallel.__init__, watch)  # type: ignore[method-assign]  # as all hooks do

    # As ``bracket``, in one function: two of them pass all arguments on twice and query torch.compile twice.
    @functools.wraps(backward)
    def watched(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the function itself
        if is_compiling():
            return backward(*args, **kwargs)
        look(args[0] if args else kwargs.get("tensors"))
        begin()
        try:
            result = backward(*args, **kwargs)
        finally:
            end()
        return result

    autograd.backward = watched


def _default_group() -> Callable[[], Any]:
    """Return what returns the process group of all ranks, None while there is none."""
    from torch import distributed

    if not distributed.is_available():
        return lambda: None
    from torch.distributed import distributed_c10d as c10d

    if hasattr(c10d, "_world"):
        return lambda: c10d._world.default_pg  # noqa: SLF001  where GroupMember looks: one property instead of two
    return lambda: c10d.GroupMember.WORLD


def _data_loaders(recording: Recording) -> None:
    """See the wait for a batch, of every kind of DataLoader."""
    from torch import is_grad_enabled
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    name = "the data loader hook"
    asked, end = guarded_about(name, recording.data_begin), guarded_plain(name, recording.data_end)

    def begin() -> None:
        asked(not is_grad_enabled())

    patched = bracket(_BaseDataLoaderIter.__next__, begin, end, guarded_plain(name, recording.data_none))
    _BaseDataLoaderIter.__next__ = patched  # type: ignore[method-assign]  # as all hooks do  # that is the point


def _our_checkpoints(recording: Recording) -> None:
    """Listen to our own checkpoints, once the script imports them: they know the script's step number."""
    module = "megascale_ops.checkpoint.notify"
    told = guarded("the hook on checkpoints", recording.checkpoint)

    def take(saves: Any) -> None:  # noqa: ANN401  a struct of a room that must not be imported for it
        recording.saves(SavesRecord(*(getattr(saves, name) for name in SavesRecord.__struct_fields__)))

    def take_restores(restores: Any) -> None:  # noqa: ANN401  likewise
        recording.restores(RestoresRecord(*(getattr(restores, name) for name in RestoresRecord.__struct_fields__)))

    known = guarded("the hook on saves", take)
    known_of_restores = guarded("the hook on restores", take_restores)

    def listen() -> None:
        sys.modules[module].observers.append(told)
        sys.modules[module].saves_observers.append(known)
        sys.modules[module].restores_observers.append(known_of_restores)

    once_imported(module, listen)
    alarms = "megascale_ops.checkpoint.trust.alarms"
    found = guarded("the hook on what checkpoints find", recording.found)

    def listen_to_alarms() -> None:
        sys.modules[alarms].listeners.append(found)

    once_imported(alarms, listen_to_alarms)


def _collectives(recording: Recording) -> None:
    """Put a note around each collective function, under both its names."""
    from torch import distributed
    from torch.compiler import is_compiling

    if not distributed.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    from megascale_ops.recorder.torch_hooks.collectives import FUNCTIONS, CollectiveLog, wrap

    log = CollectiveLog(recording, _default_group())
    if (beat := opened_monitor()) is not None:
        beat.follow_calls(log.waits)
    for name in FUNCTIONS:
        if hasattr(c10d, name):
            noted = wrap(getattr(c10d, name), log, is_compiling)
            setattr(c10d, name, noted)
            setattr(distributed, name, noted)


def _waits(recording: Recording) -> None:
    """Time the waits that no collective function shows."""
    from torch import distributed

    if not distributed.is_available():
        return
    from megascale_ops.recorder.torch_hooks.waits import wrap_wait

    distributed.Work.wait = wrap_wait(distributed.Work.wait, recording)  # type: ignore[method-assign]  # as all hooks do
    if hasattr(distributed, "_broadcast_coalesced"):
        distributed._broadcast_coalesced = wrap_wait(distributed._broadcast_coalesced, recording)  # noqa: SLF001  DDP's own


def _collector(recording: Recording) -> None:
    """Time the garbage collector."""
    recording.collector.start()


def _gpu_timers(recording: Recording) -> None:
    """Time phases on the GPU, where this torch knows CUDA; whether the script uses it shows later."""
    from torch import cuda, version

    settings = opened_settings()
    if version.cuda is None or settings is None or not settings.gpu_timers:
        return
    from megascale_ops.recorder.torch_hooks.cuda_timers import Cuda, CudaTimers

    recording.time_gpu(CudaTimers(cast("Cuda", cuda), recording.box.add_gpu_step))


def _kernel_profile(recording: Recording) -> None:
    """Profile kernels when the agent asks for it, and now and then where that is wanted."""
    settings, beat = opened_settings(), opened_monitor()
    if settings is not None and beat is not None:
        kernel_profile.watch(recording, settings.box_dir / str(settings.rank), settings.profile_every, beat.also)


def _position(_: Recording) -> None:
    """Let the heartbeat include the process groups' position, where this torch can read it."""
    from torch import _C

    c10d = getattr(_C, "_distributed_c10d", None)
    # Two recorders: what NCCL does stands in the one, what every other backend does in the other.
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    dumps = [getattr(c10d, name) for name in names if hasattr(c10d, name)]
    beat = opened_monitor()
    if dumps and beat is not None:
        beat.follow(*(functools.partial(dump, includeCollectives=False) for dump in dumps))


def _worker_server(recording: Recording) -> None:
    """Let the agent ask for stacks and the flight recorder, also while the GIL is held."""
    settings = opened_settings()
    if settings is not None:
        worker_server.start(recording, settings)
