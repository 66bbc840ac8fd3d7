# SPDX-License-Identifier: Apache-2.0
"""See the collectives that go through torch.distributed's Python functions (what C++ starts, the beat sees).

Each function is replaced by one that notes its entry and its end in the box's ring. Only the outermost call is noted
(``all_gather_object`` calls ``all_gather``). A call that dies or hangs stays in the ring without an end; so does an
asynchronous one, whose end only its Work object sees, and each of NCCL's, which returns when the GPU has been told.
``seq`` is the group's own sequence number (c10d's, the same as in the flight recorder) that the call takes;
point-to-point calls take none and show the next. ``bytes_moved`` is the size of the first tensor argument.
"""

import functools
import inspect
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import Any

from megascale_ops.blackbox.writer import collective_name, function_name
from megascale_ops.recorder.aside import step_aside
from megascale_ops.recorder.recording import Recording

FUNCTIONS = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_single",
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single",
    "gather", "scatter", "send", "recv", "isend", "irecv", "barrier", "monitored_barrier",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "all_reduce_coalesced", "all_gather_coalesced",
)  # fmt: skip

# A job has tens of process groups; a script that makes one each step may not make the table grow for ever.
MOST_NAMES = 1024

_NO_END = -1
Function = Callable[..., Any]


class CollectiveLog:
    """Notes entries and ends; gives up for good at its first failure."""

    def __init__(self, recording: Recording, default_group: Callable[[], Any]) -> None:
        self._recording = recording
        box = recording.box
        self._begin, self._end, self._waited = box.begin_collective, box.end_collective, recording.waited
        self._names: dict[str, tuple[bytes, bool]] = {}  # in the box; whether a return is an end
        self._default_group = default_group
        self._inside: dict[int, tuple[int, bytes]] = {}  # thread -> when it entered, and the group
        self.broken = False

    def enter(self, function: bytes, group: Any, data: Any) -> tuple[int, int, int] | None:  # noqa: ANN401  whatever the script passed
        """Note that this thread enters a collective; return what :meth:`leave` needs, or None when it is not noted."""
        thread = get_ident()
        if thread in self._inside or self.broken or not self._recording.live:
            return None
        try:
            if group is None:
                group = self._default_group()
            name = getattr(group, "group_name", None)
            if name is None:  # no group yet, or one that this rank is no member of
                return None
            seq = group._get_sequence_number_for_group() + 1  # noqa: SLF001  torch has no public name for it
            communicator, ends = self._names.get(name) or self._learn(name, group)
            bytes_moved = _bytes_of(data)
            now_ns = monotonic_ns()
            number = self._begin(communicator, function, seq, bytes_moved, now_ns, now_ns)
        except Exception as error:  # noqa: BLE001  the collective itself must go on; said once
            self._give_up(error)
            return None
        self._inside[thread] = now_ns, communicator
        return thread, number if ends else _NO_END, now_ns

    def leave(self, entry: tuple[int, int, int], ended: bool) -> None:
        """Note that it has returned; ``ended`` unless it goes on in the background or has failed."""
        thread, number, started_ns = entry
        self._inside.pop(thread, None)
        if not ended or number == _NO_END or not self._recording.live:
            return
        try:
            now_ns = monotonic_ns()
            self._end(number, now_ns)
            self._waited(thread, (now_ns - started_ns) * 1e-9)
        except Exception as error:  # noqa: BLE001  as above
            self._give_up(error)

    def waits(self) -> tuple[float, str]:
        """Return for how many seconds a thread has been inside a call, the longest, and its group; from any thread."""
        found = min(self._inside.copy().values(), default=None)
        return ((monotonic_ns() - found[0]) * 1e-9, found[1].decode("utf-8", "ignore")) if found else (0.0, "")

    def _learn(self, name: str, group: Any) -> tuple[bytes, bool]:  # noqa: ANN401  a process group
        """Return a process group's name as the box holds it and whether its calls wait, and remember both."""
        if len(self._names) >= MOST_NAMES:
            self._names.clear()
        backend = getattr(group, "name", None)  # torch's ProcessGroup has a method
        known = self._names[name] = collective_name(name), not (callable(backend) and backend() == "nccl")
        return known

    def _give_up(self, error: Exception) -> None:
        """Note nothing any more."""
        self.broken = True
        step_aside("the hook on collectives", error)


def wrap(function: Function, log: CollectiveLog, is_compiling: Callable[[], bool]) -> Function:
    """Return ``function`` with its calls noted in ``log``. While torch.compile traces, it is the function itself."""
    name = function_name(function.__name__)
    names = list(inspect.signature(function).parameters)
    group_at = names.index("group") if "group" in names else len(names)
    data_name = names[0]

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the function itself
        if is_compiling():
            return function(*args, **kwargs)
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        entry = log.enter(name, group, args[0] if args else kwargs.get(data_name))
        if entry is None:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException:
            log.leave(entry, ended=False)
            raise
        log.leave(entry, ended=result is None or isinstance(result, int))
        return result

    return noted


def _bytes_of(data: Any) -> int:  # noqa: ANN401  whatever the script passed
    """Return the bytes of a tensor or of a list of tensors; 0 for anything else."""
    if hasattr(data, "element_size"):
        return int(data.numel() * data.element_size())
    if isinstance(data, list | tuple):
        return sum(int(item.numel() * item.element_size()) for item in data if hasattr(item, "element_size"))
    return 0
