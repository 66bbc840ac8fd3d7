# SPDX-License-Identifier: Apache-2.0
"""What a manager asks of this room: look while saving, conclude together, leave a file beside the tensors.

Importing this costs no torch; the first save that looks does.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from megascale_ops.checkpoint import storage
from megascale_ops.checkpoint.manifest import FileEntry
from megascale_ops.checkpoint.trust import alarms, file_digests
from megascale_ops.checkpoint.trust.alarms import Findings
from megascale_ops.checkpoint.trust.file_digests import Algorithm
from megascale_ops.checkpoint.trust.verdicts import Alarm, Replicas
from megascale_ops.errors import CheckpointError, UsageError
from megascale_ops.whole_file import write_whole

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from megascale_ops.checkpoint.ranks import Ranks
    from megascale_ops.checkpoint.state.variants import Variants
    from megascale_ops.checkpoint.trust.check import Check, Described, Look, Summary
    from megascale_ops.checkpoint.trust.digests import Begun

T = TypeVar("T")

_log = logging.getLogger("megascale_ops.checkpoint")


class Trust:
    """One for each manager; the same on every rank.

    Args:
        replicas: see ``CheckpointManager``.
        replicated: same.
        freshness: same.
        algorithm: by which files are digested.
        mesh: see ``CheckpointManager``.

    Raises:
        UsageError: ``replicas`` or ``algorithm`` is none of its words.
    """

    def __init__(
        self,
        replicas: Replicas,
        replicated: Iterable[str],
        *,
        freshness: bool,
        algorithm: Algorithm = file_digests.DEFAULT,
        mesh: "DeviceMesh | None" = None,
    ) -> None:
        if replicas not in get_args(Replicas):
            raise UsageError(f"replicas={replicas!r} means nothing: it is one of {', '.join(get_args(Replicas))}")
        if algorithm not in get_args(Algorithm):
            raise UsageError(f"digests={algorithm!r} means nothing: it is one of {', '.join(get_args(Algorithm))}")
        self.algorithm = algorithm
        self.alarms: tuple[Alarm, ...] = ()
        self._replicas, self._replicated, self._freshness = replicas, tuple(replicated), freshness
        self._check: Check | None = None
        self._look: Look | None = None
        self._mesh = mesh
        self._variants: Variants | None = None

    def variants(self) -> "Variants":
        """What is known of entries of which ranks hold other parts; importing it costs torch."""
        from megascale_ops.checkpoint.state.variants import Variants

        if self._variants is None:
            self._variants = Variants(self._mesh)
        return self._variants

    def describe(
        self, flat: "Mapping[str, torch.Tensor]", state: Mapping[str, Any], ranks: "Ranks"
    ) -> "Described | None":
        """What this rank is about to save, copying nothing; None where nothing is to be looked at."""
        self._look = None
        if not self._freshness and (self._replicas == "off" or ranks.world_size == 1):
            return None
        from megascale_ops.checkpoint.trust.check import Check
        from megascale_ops.checkpoint.trust.parts import is_optimizer, parts

        if ranks.world_size == 1 and not any(is_optimizer(value) for value in state.values()):
            return None  # nothing would tell that the weights should have moved
        if self._check is None:
            self._check = Check(self._replicas, watches_freshness=self._freshness)
        check, size = self._check, ranks.world_size
        return self._tried(lambda: check.describe(parts(flat, state, self._replicated), state, world_size=size))

    def begin(self, described: "Described | None") -> "Begun | None":
        """Let GPUs begin to digest what was described."""
        check = self._check
        return self._tried(lambda: check.begin(described)) if described is not None and check is not None else None

    def look(
        self,
        described: "Described | None",
        copies: "Mapping[str, torch.Tensor] | None" = None,
        begun: "Begun | None" = None,
    ) -> "Summary | None":
        """Digest what was described, or copies of it by key (of a DTensor its local part)."""
        check = self._check
        if described is None or check is None:
            return None
        self._look = self._tried(lambda: check.look(described, copies, begun))
        return self._look.summary if self._look is not None else None

    def _tried(self, work: Callable[[], T]) -> T | None:
        """Do work; a tensor or optimizer of an unknown kind must not cost a checkpoint, unless it is to be refused."""
        try:
            return work()
        except Exception:  # that is what a user's own kinds may raise
            if self._replicas == "refuse":
                raise
            _log.exception("what is saved could not be looked at, so nothing is compared; the checkpoint is saved")
            return None

    def conclude(self, step: int, summaries: "Sequence[Summary | None]", ranks: "Ranks") -> Findings | None:
        """Judge what all ranks have seen, and tell of what is not well; every rank must call.

        Raises:
            CheckpointError: on every rank, where replicas differ and the save is to be refused for that.
        """
        whole = [summary for summary in summaries if summary is not None]
        if self._check is None or self._look is None or len(whole) < len(summaries):
            return None
        found = self._check.conclude(step, whole, self._look, ranks, self.variants().layouts)
        self.alarms = found.alarms
        alarms.tell(step, self.alarms, leads=ranks.leads)
        if self._replicas == "refuse" and (texts := [one.text for one in self.alarms if one.fault != "stale_weights"]):
            raise CheckpointError(f"saving step {step} is refused: {'; '.join(texts)}")
        return found

    @property
    def looked(self) -> "Look | None":
        """What the last ``look`` has seen."""
        return self._look

    def sealed(self, step: int, look: "Look") -> None:
        """A checkpoint counts: the next one is held against it."""
        if self._check is not None:
            self._check.sealed(step, look)
        self._look = None

    def restored(self) -> None:
        """Another state was loaded."""
        if self._check is not None:
            self._check.forget()


def leave(folder: Path, found: Findings | None, algorithm: str) -> list[FileEntry]:
    """Write what was found into a folder that is about to be sealed; what is to stand in its manifest.

    Raises:
        OSError: it cannot be written.
    """
    if found is None:
        return []
    path = folder / alarms.FILE_NAME
    write_whole(path, alarms.encode(found), durably=True)
    return [storage.digest(path, algorithm)]
