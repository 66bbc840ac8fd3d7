# SPDX-License-Identifier: Apache-2.0
"""Under ``run --wrap``: wait until this process shows that it is a rank, and open its black box then.

Every Python process below a wrapped launcher may be one: the launcher itself (Lightning's is rank 0), its children, or
none of them (a data loader's worker, an upload). Two things no other process does. A rank of several calls
``init_process_group`` with its rank; the box is open before the call blocks, so that a rank that never
arrives is seen as missing. A process that trains alone runs a backward pass.

Until then this costs a process two replaced functions of torch, and one that never imports torch nothing.
"""

import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale_ops.recorder.hook_guard import guarded, guarded_plain, step_aside
from megascale_ops.recorder.recording.api import recorder
from megascale_ops.recorder.recording.stack_file import answer_sigusr1
from megascale_ops.recorder.torch_hooks.import_hook import once_imported

if TYPE_CHECKING:
    from megascale_ops.recorder.recording.config import RankSettings

NAME = "finding out the rank"


def await_rank() -> None:
    """Put the hooks into torch and multiprocessing as soon as they are imported; at once where they are."""
    once_imported("torch", _watch_torch)
    once_imported("multiprocessing.process", _watch_children)


def become_by_environment() -> bool:
    """Open the black box of the rank in the launcher's variables, else of rank 0 of 1; return whether it is open."""
    from megascale_ops.recorder.foreign_launch.rank_names import by_environment

    return _become(by_environment(os.environ))


class _Replaced:
    """What stands aside for our first look at the training; None when nothing does."""

    backward: Callable[..., Any] | None = None


def _watch_torch() -> None:
    """See the first backward pass, and the making of the first process group."""
    from torch import autograd, distributed

    plain = autograd.backward
    train = guarded_plain(NAME, _train)

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the function itself
        if _Replaced.backward is not None:
            train()
        # A rank has its own hooks by now in place of these; a script may keep references to these.
        current = autograd.backward
        return (plain if current is backward else current)(*args, **kwargs)

    _Replaced.backward, autograd.backward = plain, backward
    if distributed.is_available():
        from torch.distributed import distributed_c10d as c10d

        original = c10d.init_process_group
        rebind({id(original): (original, _named(original))})


def _train() -> None:
    """Become the rank that trains alone; one that was refused when it made its process group stays out."""
    from torch import distributed

    _give_back()
    if not (distributed.is_available() and distributed.is_initialized()):
        become_by_environment()


def _give_back() -> None:
    """Put torch's own backward pass into its place."""
    if _Replaced.backward is not None:
        from torch import autograd

        autograd.backward, _Replaced.backward = _Replaced.backward, None


def _named(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``init_process_group`` that opens the black box of the rank that calls it."""
    signature = inspect.signature(original)

    def by_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from megascale_ops.recorder.foreign_launch.rank_names import by_process_group

        found = by_process_group(signature.bind(*args, **kwargs).arguments, os.environ)
        if found is not None:
            _become(found)

    def by_group() -> None:
        """Where the backend gave the ranks (MPI), they are known now."""
        from torch import distributed

        from megascale_ops.recorder.recording.config import FoundRank

        rank = distributed.get_rank()
        if rank >= 0:
            _become(FoundRank(rank, -1, distributed.get_world_size(), "store"))

    before, after = guarded(NAME, by_arguments), guarded_plain(NAME, by_group)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the function itself
        before(args, kwargs)
        result = original(*args, **kwargs)
        after()
        return result

    return init_process_group


def _become(found: Any) -> bool:  # noqa: ANN401  a FoundRank, whose module is loaded when there is one
    """Open the black box of rank ``found`` and put the hooks into torch, unless that is done or it is another's."""
    from megascale_ops.recorder.foreign_launch.world_claim import Claim, claim
    from megascale_ops.recorder.recording.start import open_as, opened_recording

    if opened_recording() is not None:
        return True

    def claim_box(settings: "RankSettings", start_ticks: int) -> str:
        me = Claim(settings.rank, os.getpid(), start_ticks)
        return claim(settings.box_dir, settings.node, settings.round, found, me)

    refused = open_as(found, claim_box)
    if refused:
        step_aside("the black box", RuntimeError(refused))
    recording = opened_recording()
    if recording is None:
        return False
    recorder.attach(recording)
    if not _is_caught(signal.SIGUSR1):  # the script has been running, and may have a use of its own for it
        answer_sigusr1(found.rank)
    if "torch" in sys.modules:
        _hook_torch()
    return True


def _is_caught(number: int) -> bool:
    """Return whether this process, Python or not, has a handler for a signal. Source: proc_pid_status(5)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return True


def _hook_torch() -> None:
    """Put all hooks into torch; names that scripts took from it before are led to them."""
    from megascale_ops.recorder.install import install

    _give_back()
    install()
    from torch import distributed

    if not distributed.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    from megascale_ops.recorder.torch_hooks.collectives import FUNCTIONS

    hooked = [getattr(c10d, name) for name in FUNCTIONS if hasattr(c10d, name)]
    rebind({id(one.__wrapped__): (one.__wrapped__, one) for one in hooked if hasattr(one, "__wrapped__")})


def rebind(replaced: dict[int, tuple[Any, Any]]) -> None:
    """Let every module that holds one of the first hold the second of a pair: ``from torch.distributed import ...``.

    ``replaced`` is by identity. 3,000 modules with 200,000 names take 15 ms.
    """
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            pair = replaced.get(id(value))
            if pair is not None and pair[0] is value:
                names[name] = pair[1]


def _watch_children() -> None:
    """See the exception that ends a child of ``multiprocessing``: it is caught there, and no hook of Python's runs."""
    from multiprocessing.process import BaseProcess

    bootstrap = BaseProcess._bootstrap  # type: ignore[attr-defined]  # noqa: SLF001  where every child begins
    note = guarded("the exception of a child", _note)

    @functools.wraps(bootstrap)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the function itself
        run = self.run

        def noted() -> None:
            try:
                run()
            except BaseException as error:
                note(error)
                raise

        self.run = noted
        return bootstrap(self, *args, **kwargs)

    BaseProcess._bootstrap = watched  # type: ignore[attr-defined]  # noqa: SLF001  as above


def _note(error: BaseException) -> None:
    """Write down what ends this child, if it is a rank; ``spawn`` of torch turns it into an exit of its own."""
    from megascale_ops.recorder.recording.start import opened_endings

    endings = opened_endings()
    if endings is None:
        return
    if isinstance(error, SystemExit):
        if error.code in (None, 0) or error.__context__ is None:
            return
        error = error.__context__
    endings.note_main(error)
