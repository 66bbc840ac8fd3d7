# SPDX-License-Identifier: Apache-2.0
"""See the collectives that go through torch.distributed's Python functions (the monitor thread sees those of C++).

Each function is replaced by one that notes its entry and its end in the box's ring. Only the outermost call is noted
(``all_gather_object`` calls ``all_gather``). A call that dies or hangs stays in the ring without an end; so does an
asynchronous one, whose end only its Work object sees, and each of NCCL's, which returns once it is enqueued.
``seq`` is the group's own sequence number (c10d's, the same as in the flight recorder) that the call takes;
point-to-point calls take none and show the next. ``bytes_moved`` is the size of the first tensor argument.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from time import monotonic_ns
from typing import Any

from megascale_ops.blackbox.writer import collective_name, function_name
from megascale_ops.recorder.hook_guard import step_aside
from megascale_ops.recorder.recording.recording import Recording

FUNCTIONS = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_single",
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single",
    "gather", "scatter", "send", "recv", "isend", "irecv", "barrier", "monitored_barrier",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "all_reduce_coalesced", "all_gather_coalesced",
)  # fmt: skip

# A job has tens of process groups; a script that makes one each step must not make the table grow without bound.
MOST_GROUPS = 1024
_MANY = (list, tuple)  # their union, ``list | tuple``, would be made anew at each call

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Known:
    """What a process group is asked once. No tuple with names: to unpack one costs 50 ns, these three fields 10."""

    group: "weakref.ref[Any]"  # a group must be able to end when the script lets go of it
    communicator: bytes  # its name in the box
    ends: bool  # whether a return is an end


class CollectiveLog:
    """What all wrapped functions share; gives up for good at the first failure."""

    def __init__(self, recording: Recording, default_group: Callable[[], Any]) -> None:
        self.recording = recording
        self.default_group = default_group
        # By identity: a group's name costs 0.15 us. The reference distinguishes a group from a later one at its
        # address.
        self.known: dict[int, Known] = {}
        self.broken = False

    def learn(self, group: Any) -> Known | None:  # noqa: ANN401  a process group
        """Return what is known of a process group and remember it; None for what is none, or none of this rank's."""
        name = getattr(group, "group_name", None)
        if name is None:
            return None
        if len(self.known) >= MOST_GROUPS:
            self.known.clear()
        backend = getattr(group, "name", None)  # torch's ProcessGroup has a method
        ends = not (callable(backend) and backend() == "nccl")
        known = self.known[id(group)] = Known(weakref.ref(group), collective_name(name), ends)
        return known

    def waits(self) -> tuple[float, str]:
        """Return for how many seconds a thread has been inside a call, the longest, and its group; from any thread."""
        found = min(self.recording.calls.copy().values(), default=None)
        return ((monotonic_ns() - found[0]) * 1e-9, found[1].decode("utf-8", "ignore")) if found else (0.0, "")

    def fail(self, thread: int) -> None:
        """Note that the call that ``thread`` is inside of has failed: it has no end, and until now it has waited."""
        try:
            began_ns, _, told = self.recording.calls.pop(thread)
            now_ns = monotonic_ns()
            if told:
                self.recording.waited(thread, (now_ns - began_ns) * 1e-9, now_ns * 1e-9)
        except Exception as error:  # noqa: BLE001  the script's own exception must go on; reported once
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Note nothing any more."""
        self.broken = True
        step_aside("the hook on collectives", error)


def wrap(function: Function, log: CollectiveLog, is_compiling: Callable[[], bool]) -> Function:  # noqa: C901  why: below
    """Return ``function`` with its calls noted in ``log``. While torch.compile traces, it is the function itself.

    In one function: right after a wait the caches are cold, and entering and leaving by methods costs 6 % more.
    """
    name = function_name(function.__name__)
    names = list(inspect.signature(function).parameters)
    group_at = names.index("group") if "group" in names else len(names)
    data_name = names[0]
    whole = "object" not in function.__name__  # those spend their time packing and unpacking, too
    recording, known_groups, default_group = log.recording, log.known, log.default_group
    box, waited = recording.box, recording.waited
    begin, end = box.begin_collective, box.end_collective
    calls = recording.calls

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the function itself
        if is_compiling():
            return function(*args, **kwargs)
        thread = get_ident()
        if thread in calls or log.broken or not recording.live:
            return function(*args, **kwargs)
        try:
            given = args[group_at] if len(args) > group_at else kwargs.get("group")
            group: Any = default_group() if given is None else given
            known = known_groups.get(id(group))
            if known is None or known.group() is not group:
                known = log.learn(group)
            if known is not None:
                communicator, ends = known.communicator, known.ends
                seq = group._get_sequence_number_for_group() + 1  # noqa: SLF001  torch has no public name for it
                bytes_moved = _bytes_of(args[0] if args else kwargs.get(data_name))
                began_ns = monotonic_ns()
                passage = box.passages if thread == recording.thread else 0
                number = begin(communicator, name, seq, bytes_moved, began_ns, began_ns, 0, passage)
                calls[thread] = began_ns, communicator, ends and whole
        except Exception as error:  # noqa: BLE001  the collective itself must go on; reported once
            log.give_up(error)
            known = None
        if known is None:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException:
            log.fail(thread)
            raise
        calls.pop(thread, None)
        # Else it goes on: on the GPU, or in the background with a Work object in the script's hands.
        if ends and (result is None or isinstance(result, int)) and recording.live:
            try:
                ended_ns = monotonic_ns()
                end(number, ended_ns)
                waited(thread, (ended_ns - began_ns) * 1e-9, ended_ns * 1e-9)
            except Exception as error:  # noqa: BLE001  as above
                log.give_up(error)
        return result

    return noted


def _bytes_of(data: Any) -> int:  # noqa: ANN401  whatever the script passed
    """Return the bytes of a tensor or of a list of tensors; 0 for anything else."""
    if hasattr(data, "element_size"):
        try:
            found: int = data.nbytes  # half the price of the two others
        except (AttributeError, RuntimeError):  # a sparse tensor has none
            found = data.numel() * data.element_size()
        return found
    if isinstance(data, _MANY):
        return sum(_bytes_of(item) for item in data if hasattr(item, "element_size"))
    return 0
