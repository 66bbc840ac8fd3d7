# SPDX-License-Identifier: Apache-2.0
"""The explicit API: for scripts that declare more than the hooks can see, or that use no torch at all."""

from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from megascale_ops.recorder.hook_guard import guarded, guarded_about, guarded_plain

if TYPE_CHECKING:
    from types import TracebackType

    from megascale_ops.recorder.recording.recording import Recording


class Phase(Protocol):
    """What ``recorder.phase`` returns, to be used in a ``with`` statement."""

    def __enter__(self) -> None:
        """Begin the phase."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        """End it, and let any exception pass."""


class _Phase:
    """A declared phase of a rank that is being recorded."""

    __slots__ = ("_begin", "_end", "_name")

    def __init__(self, name: str, begin: Callable[..., None], end: Callable[..., None]) -> None:
        self._name = name
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._begin(self._name)

    def __exit__(self, *_: object) -> None:
        self._end()


class _NoPhase:
    """A declared phase in a process that is not recorded."""

    __slots__ = ()

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


_NO_PHASE = _NoPhase()


class Recorder:
    """The rank's recorder. Outside of a MegaScale run, and in child processes of a rank, it does nothing."""

    def __init__(self) -> None:
        self._open_first: Callable[[bool], bool] = lambda _: True
        self._asked = False
        self._step: Callable[..., None] | None = None
        self._begin: Callable[..., None] | None = None
        self._end: Callable[..., None] | None = None
        self._loss: Callable[..., None] | None = None
        self._place: Callable[..., None] | None = None
        self._waited: Callable[..., None] | None = None

    def step(self, step: int | None = None) -> None:
        """Record the end of a training step; its number is ``step``, by default one more than the last.

        From the first call on only these calls count steps, not those of the optimizer.
        """
        if self._step is not None or self._open(trains=True):
            self._step(step)  # type: ignore[misc]  # set by _open

    def loss(self, value: object) -> None:
        """Record the step's loss, a number or a tensor of one element; a loss that is not finite or jumps is reported.

        Never waits for a GPU: a tensor there is copied in the background and read a step later.
        """
        if self._loss is not None or self._open():
            self._loss(value)  # type: ignore[misc]  # set by _open

    def mesh(self, *, tp: int = -1, pp: int = -1, dp: int = -1, ep: int = -1) -> None:
        """Declare this rank's place in tensor, pipeline, data and expert parallelism, so that equal ranks are compared.

        Not needed where the script makes a ``DeviceMesh`` with names for its dimensions; -1 leaves an axis unknown.
        """
        if self._place is not None or self._open():
            known = {"tp": tp, "pp": pp, "dp": dp, "ep": ep}
            self._place({axis: at for axis, at in known.items() if at >= 0})  # type: ignore[misc]  # set by _open

    def waited(self, seconds: float) -> None:
        """Record that the rank has waited for other ranks for so long, until now; it is no work of its own.

        Not needed where a collective of torch's was waited for: the hooks see that.
        """
        if self._waited is not None or self._open():
            self._waited(get_ident(), float(seconds), monotonic())  # type: ignore[misc]  # set by _open

    def phase(self, name: str) -> Phase:
        """Declare what the rank does: ``with recorder.phase("eval"): ...``. Phases nest; names have up to 31 bytes.

        In "eval" and "checkpoint" the controller is patient, and nothing counts as a step.
        """
        if self._begin is not None or self._open():
            return _Phase(str(name), self._begin, self._end)  # type: ignore[arg-type]  # set by _open
        return _NO_PHASE

    def attach(self, recording: "Recording") -> None:
        """Write into ``recording`` from now on; called when a recording is opened."""
        self._asked = True
        self._step = guarded_about("recorder.step", recording.step)
        self._loss = guarded_about("recorder.loss", recording.take_loss)
        self._place = guarded("recorder.mesh", recording.place)
        self._waited = guarded("recorder.waited", recording.waited)
        self._begin = guarded_about("recorder.phase", recording.phase_begin)
        self._end = guarded_plain("recorder.phase", recording.phase_end)

    def open_with(self, open_first: Callable[[bool], bool]) -> None:
        """Set the function that opens the recording on first use; :mod:`megascale_ops.recorder` sets it when imported.

        ``open_first`` gets whether this process trains; it opens the recording and attaches it if this process is a
        rank, and returns whether the question is answered for good.
        """
        self._open_first = open_first

    def _open(self, *, trains: bool = False) -> bool:
        """Open the box on first use, if this process is a rank; return whether there is one."""
        if self._asked:
            return False
        self._asked = True  # set first: a nested call must not open it again
        answered = self._open_first(trains)
        self._asked = answered or self._step is not None
        return self._step is not None


recorder = Recorder()
