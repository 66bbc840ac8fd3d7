# SPDX-License-Identifier: Apache-2.0
"""The order to profile: ask each rank's recorder for kernel timings, and keep what it answers.

    <box root>/<job>/<rank>.profile.json    the request, written here
    <box root>/<job>/<rank>.kernels.json    the recorder's answer; removed once it is read
    <run folder>/profiles/<id>/rank-<rank>.json    where it is kept

No signal and no socket: a rank that hangs, is stopped or holds the lock of its interpreter simply does not answer, and
its state is reported instead. With 0 steps nothing is profiled: what the rank has sampled last by itself is read.
"""

import asyncio
import time
from pathlib import Path

import msgspec

from megascale_agents.evidence.dumps import TEXT_CHARACTERS, state_of
from megascale_agents.evidence.incident_folder import ProfileFolder
from megascale_agents.ownership import files
from megascale_agents.ownership.rights import Owner
from megascale_agents.ranks.rank_watch import RankWatch
from megascale_agents.ranks.rounds import RoundWatch
from megascale_ops.foreign import UNREADABLE
from megascale_ops.schema.kernels import (
    MOST_DEADLINE_S,
    REQUEST_SUFFIX,
    RESULT_SUFFIX,
    SAMPLED_SUFFIX,
    ProfileRequest,
    RankKernels,
)
from megascale_ops.schema.messages import EvidenceItem, Order

KIND = "profile"
_POLL_S = 0.1
# 1 s: an answer has 10 KB; a run folder on a disk that hangs must not cost it.
_KEEP_S = 1.0
_MOST_BYTES = 1 << 20
# The recorder gives up this much before the agent does, so that its answer still comes in time.
_MARGIN_S = 0.5


def bounded(deadline_s: float) -> float:
    """Return an order's deadline, within reason: steps may be long, a profiler that stays on must not be."""
    return min(MOST_DEADLINE_S, max(1.0, deadline_s))


async def of_rank(order: Order, watch: RoundWatch, rank: RankWatch) -> EvidenceItem:
    """Get one rank's kernel timings before the order's deadline; what it does not answer is said."""
    began_s = time.monotonic()
    owner, stem = watch.bounds.owner, Path(watch.folder, str(rank.rank))
    why = _unable(rank)
    if why:
        return _item(rank, began_s, error=why)
    if order.steps:
        found = await _ask(order, stem, rank, began_s + bounded(order.deadline_s))
    else:
        nothing = RankKernels(error="nothing was sampled: start the job with --profile-every 1000")
        found = _read(Path(f"{stem}{SAMPLED_SUFFIX}"), owner) or nothing
    if found.error:
        return _item(rank, began_s, error=found.error)
    path, said = await _keep(order, watch, rank.rank, found)
    item = _item(rank, began_s, error=said)
    return msgspec.structs.replace(item, ok=True, path=path, kernels=found)


def _unable(rank: RankWatch) -> str:
    """Return why a rank can't be asked, "" when it can."""
    state = state_of(rank)
    if not state:
        return "its process is gone"
    if state == "T":
        return "no answer: its process is stopped"
    if rank.box is None:
        return "it has no black box: its script has not imported torch, or does not run under the recorder"
    if rank.box.progress().state == "exited":
        return "its script has ended"
    return ""


async def _ask(order: Order, stem: Path, rank: RankWatch, until_s: float) -> RankKernels:
    """Write the request, wait for the answer, and leave neither behind."""
    owner = rank.bounds.owner
    request, answer = Path(f"{stem}{REQUEST_SUFFIX}"), Path(f"{stem}{RESULT_SUFFIX}")
    try:
        files.remove(answer, owner)  # of an order before
        wanted = ProfileRequest(order.id, order.steps, until_s - _MARGIN_S)
        files.write_whole(request.parent, (), request.name, msgspec.json.encode(wanted), owner)
        while time.monotonic() < until_s:
            found = _read(answer, owner)
            if found is not None and found.id == order.id:
                return found
            if not state_of(rank):
                return RankKernels(error="its process ended meanwhile")
            await asyncio.sleep(_POLL_S)
    except OSError as error:
        return RankKernels(error=f"{request.parent}: {error.strerror or error}")
    finally:
        files.remove(request, owner)
        files.remove(answer, owner)
    return RankKernels(error=_silence(order, rank))


def _silence(order: Order, rank: RankWatch) -> str:
    """Return a sentence on a rank that has not answered: what it does."""
    text = f"no answer in {bounded(order.deadline_s):g} s"
    if state_of(rank) == "T":
        return f"{text}: its process is stopped"
    if rank.box is None:
        return text
    progress = rank.box.progress()
    where = f"after step {progress.step}" if progress.step >= 0 else "before its first step"
    still_s = time.monotonic() - progress.moved_mono_s
    return f"{text}: it is in phase {progress.phase} {where}, and last moved {still_s:.1f} s ago"


def _read(path: Path, owner: Owner) -> RankKernels | None:
    """Return an answer that is there and whole."""
    try:
        return msgspec.json.decode(files.read_small(path, owner, _MOST_BYTES), type=RankKernels)
    except (OSError, *UNREADABLE):
        return None


async def _keep(order: Order, watch: RoundWatch, rank: int, found: RankKernels) -> tuple[str, str]:
    """Write an answer into the run folder; return its path, and a note when that failed."""
    data = msgspec.json.format(msgspec.json.encode(found))
    try:
        folder = ProfileFolder(watch.file.run_dir, watch.bounds.owner, _folder_name(order.id))
        written = asyncio.to_thread(folder.write, f"rank-{rank}.json", data)
        return str(await asyncio.wait_for(written, _KEEP_S)), ""
    except TimeoutError:
        return "", f"not kept: {watch.file.run_dir} took nothing in {_KEEP_S:g} s"
    except (OSError, ValueError) as error:
        return "", f"not kept: {error}"


def _folder_name(order_id: str) -> str:
    """Return the profile's name; an order's is ``<profile>:<node>``."""
    return order_id.partition(":")[0]


def _item(rank: RankWatch, began_s: float, *, error: str) -> EvidenceItem:
    took_s = round(time.monotonic() - began_s, 4)
    return EvidenceItem(kind=KIND, ok=False, rank=rank.rank, text=error[:TEXT_CHARACTERS], took_s=took_s)
