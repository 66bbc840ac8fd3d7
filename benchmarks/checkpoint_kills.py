# SPDX-License-Identifier: Apache-2.0
"""Kill savers and damage what they left, at moments and in ways that are drawn, and restore each time.

    python benchmarks/checkpoint_kills.py --kills 500 --damages 500 > benchmarks/results/checkpoint_kills.txt

torch is imported once; ranks, savers and readers are forks. Every tensor of a state is drawn from its step, so a reader
knows each bit that must be there. After each kill: what is restored is of the newest folder that a listing shows, bit
for bit, and no older than what any rank was told is saved. After each damage: it is the newest checkpoint that was left
alone, or one sentence where none was. A row for each kind; what went wrong is printed below, with the seed that draws
it again, and the exit code is 1.
"""

import argparse
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed.checkpoint  # so that no fork has to import it again
from torch import distributed

from megascale_ops.checkpoint import CheckpointManager, manifest, observers, persist, storage
from megascale_ops.checkpoint.trust import check, trust
from megascale_ops.errors import CheckpointError, MegascaleError

# 1 MB of 16 tensors: a save of two ranks takes 15 ms, of which a kill may hit any.
TENSORS, ELEMENTS = 16, 16_384
STEPS = (1, 2, 3)
# 30 s: a trial takes one; who is not done by then hangs.
DEADLINE_S = 30
# 3 s: for how long a rank waits for one whose storage hangs.
PATIENCE_S = 3
NOBODY = 65_534
BASE = "base"  # the folder of whole checkpoints of which copies are damaged


class Trial(NamedTuple):
    """What came of one; ``problem`` is empty where it is as it must be."""

    kind: str  # "" until the campaign names it
    outcome: str
    problem: str
    took_s: float


def state_of(step: int) -> dict[str, Any]:
    """A state of which every bit is known from its step."""
    generator = torch.Generator().manual_seed(step)
    weights = [torch.randn(ELEMENTS, generator=generator) for _ in range(TENSORS)]
    return {"weights": weights, "step": step, "text": f"of step {step}"}


def empty() -> dict[str, Any]:
    """What a state is restored into."""
    return {"weights": [torch.zeros(ELEMENTS) for _ in range(TENSORS)], "step": -1, "text": ""}


def differs(state: dict[str, Any], step: int) -> str:
    """Why a restored state is not that of a step; "" where it is, in every bit."""
    wanted = state_of(step)
    wrong = sum(not torch.equal(*pair) for pair in zip(state["weights"], wanted["weights"], strict=True))
    rest = [name for name in ("step", "text") if state[name] != wanted[name]]
    return f"{wrong} tensors and {rest} are not of step {step}" if wrong or rest else ""


# -- forks ----------------------------------------------------------------------------------------------------------


def forked(work: Callable[[], Any]) -> int:
    """Do work in a fork; its pid. What it returns or raises is its own matter."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.alarm(DEADLINE_S)
        work()
    except BaseException:  # noqa: BLE001  a forked child must not run the parent's code
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def asked(work: Callable[[], Any]) -> Any:  # noqa: ANN401  what the work returns
    """Do work in a fork and return what it returns, as JSON.

    Raises:
        ChildProcessError: it failed, or hung.
    """
    listening, told = os.pipe()

    def tell() -> None:
        os.write(told, json.dumps(work()).encode())

    pid = forked(tell)
    os.close(told)
    with os.fdopen(listening, "rb") as heard:
        raw = heard.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise ChildProcessError("it hung" if code == -signal.SIGALRM else f"it ended with {code}")
    return json.loads(raw)


def join_group(scratch: Path, rank: int, world_size: int, patience_s: int = DEADLINE_S) -> None:
    """Join the ranks of a trial."""
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{scratch}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=patience_s),
    )


def restored(folder: Path) -> tuple[int, str]:
    """Restore in this process: the step and what is wrong with it; -2 and the sentence where it is refused."""
    logging.disable()
    state = empty()
    try:
        step = CheckpointManager(folder, keep=100).restore(state)
    except MegascaleError as error:
        return -2, str(error)
    except Exception as error:  # noqa: BLE001  not a sentence of ours: it is told, and wrong
        return -3, f"{type(error).__name__}: {error}"
    return step, differs(state, step) if step >= 0 else ""


def saved(folder: Path, step: int) -> str:
    """Save in this process; "" or the sentence that refuses it."""
    logging.disable()
    try:
        CheckpointManager(folder, keep=100).save(step, state_of(step))
    except MegascaleError as error:
        return str(error)
    return ""


def sealed_steps(folder: Path) -> list[int]:
    """The steps that a listing shows as whole, the newest last; of names alone."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


# -- kills ----------------------------------------------------------------------------------------------------------


def save_on(folder: Path, scratch: Path, rank: int, world_size: int, told: int) -> None:
    """Restore, then save without end; says on ``told`` when a save begins, ends, and has returned."""
    logging.disable()
    join_group(scratch, rank, world_size)
    manager, state = CheckpointManager(folder, keep=3), empty()
    step = manager.restore(state)
    if step >= 0 and (problem := differs(state, step)):
        os.write(told, f"mixed {problem}\n".encode())
        os._exit(3)
    observers.append(lambda event, at: os.write(told, f"{event} {at} {rank}\n".encode()))  # type: ignore[arg-type, func-returns-value]
    try:
        while True:
            step += 1
            manager.save(step, state_of(step))
            os.write(told, f"saved {step} {rank}\n".encode())
    except (CheckpointError, RuntimeError) as error:  # of ours, or of the process group that has lost a rank
        os.write(told, f"refused {type(error).__name__}\n".encode())


def kill(folder: Path, dice: random.Random, kind: str, world_size: int) -> Trial:
    """Kill all ranks at once, or one of them, at a drawn moment of saving; the others end by themselves."""
    began_s, last = time.monotonic(), max(sealed_steps(folder), default=-1)
    listening, told = os.pipe()
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    pids = [forked(lambda r=rank: save_on(folder, scratch, r, world_size, told)) for rank in range(world_size)]  # type: ignore[misc]
    os.close(told)
    lines: list[str] = []
    with os.fdopen(listening, "r") as heard:
        for line in heard:  # the first saves, whose length tells how long one is
            lines.append(line)
            if sum(each.startswith("saved") for each in lines) >= world_size * dice.randint(1, 3):
                break
        begun_s = time.monotonic()
        while not heard.readline().startswith("save_end"):
            pass
        time.sleep(dice.uniform(0, 2 * (time.monotonic() - begun_s)))
        victims = pids if kind == "all ranks" else [dice.choice(pids)]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        lines += heard.readlines()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    shutil.rmtree(scratch)
    confirmed = max((int(line.split()[1]) for line in lines if line.startswith("saved")), default=last)
    step, problem = asked(lambda: restored(folder))
    listed = max(sealed_steps(folder), default=-1)
    problem = problem or next((line for line in lines if line.startswith("mixed")), "")
    if step != listed or step < max(confirmed, last):
        problem = problem or f"restored {step}; listed {listed}, told as saved {confirmed}, before {last}"
    hung = [code for pid, code in zip(pids, codes, strict=True) if pid not in victims and code != 0]
    if hung:
        problem = problem or f"a rank that was not killed ended with {hung}"
    is_open = any(path.name.endswith(".partial") for path in folder.iterdir())
    return Trial("", "in a save" if is_open else "between two", problem, time.monotonic() - began_s)


# -- damages --------------------------------------------------------------------------------------------------------


def flip(path: Path, dice: random.Random) -> None:
    """Flip bits of one to sixteen bytes."""
    data = bytearray(path.read_bytes())
    for _ in range(dice.randint(1, 16)):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    if bytes(data) == path.read_bytes():  # two flips of one bit
        data[0] ^= 1
    path.write_bytes(data)


def truncate(path: Path, dice: random.Random) -> None:
    """Cut off the end, or all."""
    os.truncate(path, dice.randrange(path.stat().st_size))


def remove(path: Path, dice: random.Random) -> None:
    """Take the file away."""
    del dice
    path.unlink()


def exchange(path: Path, dice: random.Random) -> None:
    """Put the file of another step there, whole as it is: an older copy, a lost write."""
    whole = path.parent.parent.with_name(BASE)  # of the damaged copy another one may have been exchanged already
    others = [each for each in sorted(whole.glob(f"step-*/{path.name}")) if each.parent.name != path.parent.name]
    shutil.copy(dice.choice(others), path)


def zero(path: Path, dice: random.Random) -> None:
    """Fill a page with zeros, as a lost block is; a page that has none anyway is not chosen."""
    data = bytearray(path.read_bytes())
    start = dice.randrange(len(data))
    stop = min(len(data), start + 4096)
    data[start:stop] = bytes(stop - start) if any(data[start:stop]) else b"\x01" * (stop - start)
    path.write_bytes(data)


def fifo(path: Path, dice: random.Random) -> None:
    """A file that gives nothing for ever: opened plainly, it would hang the reader."""
    del dice
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "flipped bytes": flip, "truncated": truncate, "missing": remove, "of another step": exchange, "zeros": zero,
    "hangs (FIFO)": fifo,
}  # fmt: skip


def damage(folder: Path, dice: random.Random, kind: str) -> Trial:
    """Damage a drawn file of one, two or all checkpoints; the newest that was left alone has to come."""
    began_s = time.monotonic()
    steps = sealed_steps(folder)
    doomed = set(steps[-dice.choice([1, 1, 1, 2, len(steps)]) :])
    for step in doomed:
        files = sorted(path for path in storage.final_folder(folder, step).iterdir() if path.stat().st_size)
        if kind == "of another step":  # an equal file is no damage
            files = [path for path in files if path.suffix == ".tensors" or path.name == manifest.FILE_NAME]
        DAMAGES[kind](dice.choice(files), dice)
    wanted = max(set(steps) - doomed, default=-2)
    step, problem = asked(lambda: restored(folder))
    if step == -2 and wanted == -2 and "To start from step 0, move that folder away" in problem:
        return Trial("", "refused, told", "", time.monotonic() - began_s)
    if step != wanted:
        problem = problem or f"restored {step} instead of {wanted}"
    return Trial("", "fell back", problem, time.monotonic() - began_s)


def newer(folder: Path, dice: random.Random) -> Trial:
    """The newest is of a later format, whole: told, and no step is lost in silence."""
    began_s = time.monotonic()
    path = storage.final_folder(folder, STEPS[-1]) / manifest.FILE_NAME
    sealed = manifest.decode(path.read_bytes())
    path.write_bytes(manifest.encode(msgspec.structs.replace(sealed, version=manifest.VERSION + dice.randint(1, 9))))
    step, said = asked(lambda: restored(folder))
    fine = step == -2 and "is of a later version" in said
    return Trial("", "refused, told", "" if fine else f"{step}: {said}", time.monotonic() - began_s)


def read_only(folder: Path, dice: random.Random) -> Trial:
    """A folder without the right to write: saving is refused in a sentence, and all that was there is restored."""
    del dice
    began_s = time.monotonic()
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    def try_both() -> tuple[str, int]:
        if os.getuid() == 0:  # root may write anywhere
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        said = saved(folder, 9)
        return said, len(list(folder.iterdir()))

    before = len(list(folder.iterdir()))
    said, after = asked(try_both)
    step, problem = asked(lambda: restored(folder))
    if "Permission denied" not in said or after != before or step != STEPS[-1]:
        problem = problem or f"said {said!r}, {before} entries became {after}, restored {step}"
    return Trial("", "refused, told", problem, time.monotonic() - began_s)


def limited(folder: Path, dice: random.Random) -> Trial:
    """No file may grow beyond a drawn size while saving: told, nothing is left of it, what was before is restored."""
    began_s, most = time.monotonic(), dice.randrange(1, 3 * ELEMENTS * TENSORS)

    def save() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        return saved(folder, 9)

    said = asked(save)
    return _after_no_room(folder, said, began_s)


def full(folder: Path, dice: random.Random) -> Trial:
    """A file system that is full at a drawn byte of the save: the same."""
    began_s, used = time.monotonic(), sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    room = dice.randrange(64_000, 5 * ELEMENTS * TENSORS)
    disk = folder.with_name(f"{folder.name}-disk")
    with small_disk(disk, used + room + 4096 * 20) as is_mounted:
        if not is_mounted:
            return Trial("", "not possible here", "", 0.0)
        shutil.copytree(folder, disk, dirs_exist_ok=True)
        said = asked(lambda: saved(disk, 9))
        return _after_no_room(disk, said, began_s)


def _after_no_room(folder: Path, said: str, began_s: float) -> Trial:
    step, problem = asked(lambda: restored(folder))
    partial = [path.name for path in folder.iterdir() if path.name.endswith(".partial")]
    if not said:  # it had room after all
        if step != 9:
            problem = problem or f"restored {step} after a save that was told as done"
        return Trial("", "had room", problem, time.monotonic() - began_s)
    told = any(words in said for words in ("No space left", "File too large"))
    if step != STEPS[-1] or partial or not told:
        problem = problem or f"restored {step}, left {partial}, said {said!r}"
    return Trial("", "refused, told", problem, time.monotonic() - began_s)


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[bool]:
    """Let a folder be a file system of so many bytes; false where we may not mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    is_mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=True, timeout=30)
        folder.rmdir()


def hanging(folder: Path, dice: random.Random) -> Trial:
    """The storage of one rank of two does not answer: the other is told within its process group's time-out."""
    began_s = time.monotonic()
    scratch, victim = Path(tempfile.mkdtemp(dir=folder.parent)), dice.randrange(2)

    def save(rank: int, told: int) -> None:
        logging.disable()
        join_group(scratch, rank, 2, PATIENCE_S)
        manager = CheckpointManager(folder, keep=100)
        if rank == victim:
            os.fsync = lambda _: time.sleep(DEADLINE_S + 10)  # type: ignore[assignment]  # as a lost NFS server
        try:
            manager.save(9, state_of(9))
            os.write(told, b"saved")
        except Exception as error:  # noqa: BLE001  whatever the group raises: that it does is asked
            os.write(told, f"{type(error).__name__}: {error}".encode())

    listening, told = os.pipe()
    pids = [forked(lambda r=rank: save(r, told)) for rank in range(2)]  # type: ignore[misc]
    os.close(told)
    with os.fdopen(listening, "rb") as heard:
        said = os.read(heard.fileno(), 4096).decode()
        took_s = time.monotonic() - began_s
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    shutil.rmtree(scratch)
    step, problem = asked(lambda: restored(folder))
    if step != STEPS[-1] or not said or said == "saved":
        problem = problem or f"restored {step}, said {said!r}"
    return Trial("", "told in time", problem, took_s)


def other_size(folder: Path, dice: random.Random) -> Trial:
    """Restored by another number of ranks than saved it: every rank has every bit."""
    began_s, size = time.monotonic(), dice.choice([1, 3])
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))

    def load(rank: int, told: int) -> None:
        join_group(scratch, rank, size)
        os.write(told, json.dumps(restored(folder)).encode() + b"\n")
        distributed.barrier()

    listening, told = os.pipe()
    pids = [forked(lambda r=rank: load(r, told)) for rank in range(size)]  # type: ignore[misc]
    os.close(told)
    with os.fdopen(listening, "rb") as heard:
        answers = [json.loads(line) for line in heard]
    for pid in pids:
        os.waitpid(pid, 0)
    shutil.rmtree(scratch)
    problem = "" if answers == [[STEPS[-1], ""]] * size else f"on {size} ranks: {answers}"
    return Trial("", "restored", problem, time.monotonic() - began_s)


OTHERS: dict[str, tuple[Callable[[Path, random.Random], Trial], int]] = {
    "a later format": (newer, 1),
    "read-only folder": (read_only, 1),
    "file size limit": (limited, 1),
    "full disk (tmpfs)": (full, 1),
    "storage of one rank hangs": (hanging, 20),  # one in twenty: each waits for a time-out
    "another number of ranks": (other_size, 1),
}


# -- the campaign ---------------------------------------------------------------------------------------------------


def save_base(folder: Path) -> None:
    """Three checkpoints of two ranks, which damages are done to copies of."""
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))

    def save(rank: int) -> None:
        join_group(scratch, rank, 2)
        manager = CheckpointManager(folder, keep=100)
        for step in STEPS:
            manager.save(step, state_of(step))
        manager.close()

    pids = [forked(lambda r=rank: save(r)) for rank in range(2)]  # type: ignore[misc]
    assert {os.waitpid(pid, 0)[1] for pid in pids} == {0}
    shutil.rmtree(scratch)


def tried(kind: str, work: Callable[[], Trial]) -> Trial:
    """One trial; one whose reader fails or hangs is wrong."""
    try:
        return work()._replace(kind=kind)
    except ChildProcessError as error:
        return Trial(kind, "no answer", str(error), 0.0)


def campaign(root: Path, kills: int, damages: int, seed: int) -> Iterator[Trial]:
    """Yield all trials; each draws from the seed and its own number."""
    for kind, world_size in (("all ranks", 2), ("one rank", 2), ("all ranks", 1)):
        folder = root / f"killed-{kind.replace(' ', '-')}-{world_size}"
        folder.mkdir()
        for number in range(kills):
            dice = random.Random(f"{seed} {kind} {world_size} {number}")
            yield tried(f"kill {kind} of {world_size}", lambda: kill(folder, dice, kind, world_size))  # noqa: B023
    base = root / BASE
    save_base(base)
    works = [(kind, lambda folder, dice, kind=kind: damage(folder, dice, kind), 1) for kind in DAMAGES]
    works += [(kind, work, each) for kind, (work, each) in OTHERS.items()]
    for kind, work, each in works:
        for number in range(max(1, damages // len(works) // each)):
            folder = shutil.copytree(base, root / "damaged")
            dice = random.Random(f"{seed} {kind} {number}")
            yield tried(kind, lambda: work(folder, dice))  # noqa: B023  called at once
            for path in (folder, *folder.rglob("*")):
                path.chmod(0o755)
            shutil.rmtree(folder)


def table(trials: list[Trial]) -> Iterator[str]:
    """A row for each kind and outcome."""
    yield f"{'kind':<28}{'outcome':<20}{'trials':>8}{'wrong':>8}{'longest s':>11}"
    for kind, outcome in dict.fromkeys((one.kind, one.outcome) for one in trials):
        mine = [one for one in trials if (one.kind, one.outcome) == (kind, outcome)]
        wrong = sum(bool(one.problem) for one in mine)
        yield f"{kind:<28}{outcome:<20}{len(mine):>8}{wrong:>8}{max(one.took_s for one in mine):>11.2f}"


def main() -> int:
    """Run it and print the table; 1 where anything was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, help="of each kind")
    parser.add_argument("--damages", type=int, default=500, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)))
    parser.add_argument("--root", type=Path, default=None, help="a folder on the file system that is asked about")
    options = parser.parse_args()
    os.environ["MEGASCALE_RECORDER"] = "0"
    torch.set_num_threads(1)
    assert all(module.__name__ in sys.modules for module in (persist, check, trust))
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.root) as root:
        Path(root).chmod(0o755)
        trials = list(campaign(Path(root), options.kills, options.damages, options.seed))
    wrong = [one for one in trials if one.problem]
    print(f"$ python benchmarks/checkpoint_kills.py --kills {options.kills} --damages {options.damages} "
          f"--seed {options.seed}")  # fmt: skip
    print(f"{len(trials)} trials in {time.monotonic() - began_s:.0f} s, {len(wrong)} not as they must be\n")
    print(*table(trials), sep="\n")
    for one in wrong[:20]:
        print(f"\n{one.kind}: {one.problem}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
