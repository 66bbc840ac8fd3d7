# SPDX-License-Identifier: Apache-2.0
"""Load one checkpoint into the states of all ranks, each byte read once and verified as it passes.

Collective. One rank reads the manifest and the plan and gives them to all; then, each in one exchange: the
structures that a rank's state needs, values that the user let be pickled, tensors. Nothing is decoded or unpickled
before its file's digest was right, and no tensor is touched before all of that fits. Tensors are filled while their
files are digested: where a digest is wrong in the end the state holds parts of a damaged checkpoint, and the caller
loads another one over it, or fails.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from megascale_ops.checkpoint import contents, persist, plan, values
from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.checkpoint.dcp_storage import Planned, decoded_plan, load_alone
from megascale_ops.checkpoint.loading.exchange import Exchange, RankFault
from megascale_ops.checkpoint.loading.landing import Landing
from megascale_ops.checkpoint.loading.progress import ProgressMeter
from megascale_ops.checkpoint.loading.sources import Source
from megascale_ops.checkpoint.loading.traffic import Traffic
from megascale_ops.checkpoint.manifest import CheckpointReport, Fault, FileSeen, Manifest, ManifestError
from megascale_ops.checkpoint.notify import tell_progress
from megascale_ops.checkpoint.ranks import Ranks
from megascale_ops.checkpoint.state.capture import capture_all
from megascale_ops.checkpoint.state.variants import of_rank
from megascale_ops.checkpoint.storage import describe
from megascale_ops.checkpoint.trust.file_digests import digest_of
from megascale_ops.checkpoint.value_kinds import dtype_named
from megascale_ops.errors import CheckpointError

_log = logging.getLogger("megascale_ops.checkpoint")

Landings = dict[str, list[Landing]]


class DamagedError(Exception):
    """Files of this checkpoint are not as they were sealed; every rank raises it alike."""

    def __init__(self, found: Iterable[RankFault]) -> None:
        super().__init__()
        self.found = tuple(found)


class Restore:
    """One checkpoint being loaded.

    Args:
        source: where this rank finds its files.
        step: of which it is.
        ranks: who takes part.
        held: which of the files this rank can open; None: all, on every rank.
        giver: the rank that reads manifest and plan for all.
    """

    def __init__(
        self,
        source: Source,
        step: int,
        ranks: Ranks,
        *,
        held: frozenset[str] | None = None,
        giver: int = 0,
    ) -> None:
        self._source, self._step, self._ranks, self._held, self._giver = source, step, ranks, held, giver
        self._doing = f"restoring step {step} from {source.said}"
        self._meter = ProgressMeter(step, time.monotonic())
        self.traffic = Traffic()
        self.found: tuple[RankFault, ...] = ()
        """What was wrong in the last ``load``, and which rank saw it."""

    def manifest(self) -> Manifest | Fault:
        """The manifest, read by one rank and given to all."""

        def read() -> bytes | Fault:
            try:
                return self._source.read(manifests.FILE_NAME, manifests.MOST_BYTES)
            except FileNotFoundError:
                return Fault(manifests.FILE_NAME, "missing")
            except OSError as exc:
                return Fault(manifests.FILE_NAME, "unreadable", describe(exc))

        raw = self._ranks.lead(self._doing, read, rank=self._giver)
        if isinstance(raw, Fault):
            return raw
        try:
            sealed = manifests.decode(raw)
        except ManifestError as exc:
            return exc.fault
        return manifests.judge_step(sealed, self._step) or sealed

    def sizes(self, sealed: Manifest) -> list[Fault]:
        """Files that are missing or of another size; each rank looks at a share. Costs no reading."""
        share = sealed.files[self._ranks.rank :: self._ranks.world_size]

        def look() -> list[Fault]:
            with ThreadPoolExecutor(8, "checkpoint-look") as executor:  # on a network each look is a round trip
                sizes = list(executor.map(lambda entry: self._source.size_of(entry.name), share))
            found = [
                manifests.judge_file(entry, FileSeen(entry.name, None if size < 0 else size, entry.digest))
                for entry, size in zip(share, sizes, strict=True)
            ]
            return [fault for fault in found if fault]

        return [fault for each in self._ranks.agree(self._doing, look) for fault in each]

    def load(self, sealed: Manifest, state: dict[str, Any], allowed: Allowed) -> CheckpointReport:
        """Load it into a state.

        Returns:
            What is wrong with the files that were needed: with no fault the state is loaded, else it may hold parts.

        Raises:
            CheckpointError: on every rank, when the state does not fit, or it asks for more than is allowed. Then the
                state is as it was.
        """
        self.found = ()
        try:
            self._load(sealed, state, allowed)
        except DamagedError as exc:
            self.found = exc.found
            faults = {(each.fault.file, each.fault.kind): each.fault for each in exc.found}
            return CheckpointReport(self._source.said, self._step, tuple(faults[key] for key in sorted(faults)), sealed)
        finally:
            tell_progress(self._meter.now())
        return CheckpointReport(self._source.said, self._step, (), sealed)

    def _load(self, sealed: Manifest, state: dict[str, Any], allowed: Allowed) -> None:
        stored = self._plan(sealed)
        reader = _Collecting(stored)
        folder = _PlannedFolder(stored)

        def look() -> list[str]:
            persist.require_known(state, folder.keys)
            return [key for name in state for key in contents.structure_keys(name, folder.keys)]

        raws = self._read_bytes(sealed, reader, self._ranks.agree(self._doing, look)[self._ranks.rank])
        structures: dict[str, contents.Structure] = {}

        def decode() -> list[str]:
            for name, value in state.items():
                own = manifests.variant_of(sealed, name, self._ranks.rank, self._ranks.world_size)
                structures[name] = _structure(name, value, raws, own, allowed)
            return persist.pickled_keys(structures, allowed)

        pickled = self._ranks.agree(self._doing, decode)
        mine = pickled[self._ranks.rank]
        raws = self._read_bytes(sealed, reader, mine) if any(pickled) else {}
        loaded: dict[str, Any] = {}

        def fit() -> None:
            unpickled = {key: persist.unpickled(key, raws[key]) for key in mine}
            loaded.update(persist.targets_of(state, structures, folder.stored, allowed))
            load_alone(loaded, reader, DefaultLoadPlanner(flatten_state_dict=False))
            loaded.update(unpickled)

        self._ranks.agree(self._doing, fit)
        self._exchange(sealed, reader.landings)
        self._ranks.agree(self._doing, lambda: persist.hand_over(state, structures, loaded, allowed))

    def _plan(self, sealed: Manifest) -> plan.Plan:
        entry = next((each for each in sealed.files if each.name == plan.FILE_NAME), None)

        def read() -> bytes | Fault:
            if entry is None:
                raise CheckpointError(f"{plan.FILE_NAME} is not among its files")
            try:
                raw = self._source.read(entry.name, entry.size_bytes)
            except OSError as exc:
                return Fault(entry.name, "unreadable", describe(exc))
            seen = FileSeen(entry.name, len(raw), digest_of(raw, entry.digest))
            return manifests.judge_file(entry, seen) or raw

        raw = self._ranks.lead(self._doing, read, rank=self._giver)
        if isinstance(raw, Fault):
            raise DamagedError([RankFault(self._giver, raw)])

        decoded: list[plan.Plan] = []

        def decode() -> None:
            try:
                decoded.append(decoded_plan(raw, {each.name: each.size_bytes for each in sealed.files}))
            except ValueError as exc:
                raise CheckpointError(str(exc)) from exc

        self._ranks.agree(self._doing, decode)
        return decoded[0]

    def _read_bytes(self, sealed: Manifest, reader: "_Collecting", keys: Iterable[str]) -> dict[str, bytes]:
        """What was stored as bytes under these keys; collective."""
        found: dict[str, torch.Tensor] = {}
        landings: Landings = defaultdict(list)

        def prepare() -> None:
            for key in keys:
                file, landing, found[key] = reader.bytes_landing(key)
                landings[file].append(landing)

        self._ranks.agree(self._doing, prepare)
        self._exchange(sealed, landings)
        return {key: tensor.numpy().tobytes() for key, tensor in found.items()}

    def _exchange(self, sealed: Manifest, landings: Mapping[str, list[Landing]]) -> None:
        exchange = Exchange(
            self._source,
            sealed.files,
            self._ranks,
            held=self._held,
            traffic=self.traffic,
            told=self._told,
            expect=self._meter.expect,
        )
        try:
            found = exchange.run(landings)
        except RuntimeError as exc:  # the process group: a peer died, or its time was over
            raise CheckpointError(f"{self._doing} failed: the ranks lost each other: {exc}") from exc
        late = next((each for each in found if each.is_late), None)
        if late is not None:
            # Not damage, after which another one would be loaded: a read that hangs may still fill these tensors.
            raise CheckpointError(f"{self._doing} failed on rank {late.rank}: {late.fault.sentence()}")
        if found:
            raise DamagedError(found)

    def _told(self, count_bytes: int) -> None:
        progress, line = self._meter.add(count_bytes, time.monotonic())
        if progress is not None:
            tell_progress(progress)
        if line and self._ranks.leads:
            _log.info("%s", line)


class _PlannedFolder:
    """What a plan says of tensors."""

    def __init__(self, stored: plan.Plan) -> None:
        self._plan = stored
        self.keys = frozenset(stored.tensors)

    def stored(self, key: str) -> contents.Stored:
        return persist.stored_by(self._plan, key)


class _Collecting(Planned):
    """Notes where DCP's planner wants what, instead of reading it."""

    def __init__(self, stored: plan.Plan) -> None:
        super().__init__(stored)
        self.landings: Landings = defaultdict(list)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Note it."""
        for item in plan.items:
            chunk, target = self.chunk_of(item), planner.resolve_tensor(item).detach()
            dtype = dtype_named(self.plan.tensors[item.storage_index.fqn].dtype)
            landing = Landing(chunk, dtype, item.storage_offsets, item.lengths, target)
            self.landings[self.plan.files[chunk.file]].append(landing)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def bytes_landing(self, key: str) -> tuple[str, Landing, torch.Tensor]:
        """Where what is stored as bytes under a key lies, and what it is read into.

        Raises:
            CheckpointError: the key is of something else.
        """
        described = self.plan.tensors.get(key)
        if described is None or described.dtype != str(torch.uint8) or len(described.chunks) != 1:
            raise CheckpointError(f"{ascii(key)[:80]} is not stored as bytes")
        (chunk,) = described.chunks
        into = torch.empty(chunk.length, dtype=torch.uint8)
        landing = Landing(chunk, torch.uint8, tuple(0 for _ in chunk.sizes), chunk.sizes, into.reshape(chunk.sizes))
        return self.plan.files[chunk.file], landing, into


def _structure(
    name: str, value: object, raws: Mapping[str, bytes], own: int | None, allowed: Allowed
) -> contents.Structure:
    try:
        found = [values.decode(raws[key], allowed) for key in contents.structure_keys(name, raws)]
    except (ValueError, CheckpointError) as exc:
        raise CheckpointError(f"{name!r} can't be read: {exc}") from exc
    if len(found) == 1:
        return contents.Structure(found[0])
    return contents.Structure(of_rank(found, value, capture_all({name: value})[name], own, allowed))
