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
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint  # so that no fork has to import it again
from checkpoint_damages import BASE, DAMAGES, OTHERS, damage, save_base
from checkpoint_trials import Trial, asked, differs, empty, forked, join_group, restored, sealed_steps, state_of

from megascale_ops.checkpoint import CheckpointManager, observers, persist
from megascale_ops.checkpoint.trust import check, trust
from megascale_ops.errors import CheckpointError


def save_on(folder: Path, scratch: Path, rank: int, world_size: int, told: int) -> None:
    """Restore, then save without end; says on ``told`` when a save begins, ends, and has returned."""
    logging.disable()
    join_group(scratch, rank, world_size)
    manager, state = CheckpointManager(folder, keep=3), empty()
    step = manager.restore(state)
    if step >= 0 and (problem := differs(state, step)):
        os.write(told, f"mixed {problem}\n".encode())
        os._exit(3)
    observers.append(lambda event, at: os.write(told, f"{event} {at} {rank}\n".encode()))
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
    pids = [forked(partial(save_on, folder, scratch, rank, world_size, told)) for rank in range(world_size)]
    os.close(told)
    lines: list[str] = []
    with os.fdopen(listening, "r") as heard:
        for line in heard:  # the first saves, whose length tells how long one is
            lines.append(line)
            if sum(each.startswith("saved") for each in lines) >= world_size * dice.randint(1, 3):
                break
        begun_s = time.monotonic()
        for line in heard:
            lines.append(line)
            if line.startswith("save_end"):
                break
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
    ends = [-signal.SIGKILL if pid in victims else 0 for pid in pids]
    if codes != ends:  # one that was not killed hung or fell, or one that was had fallen before
        problem = problem or f"ranks ended with {codes} instead of {ends}"
    if not any(line.startswith("saved") for line in lines):
        problem = problem or "no save was done before the kill"
    is_open = any(path.name.endswith(".partial") for path in folder.iterdir())
    return Trial("", "in a save" if is_open else "between two", problem, time.monotonic() - began_s)


def tried(kind: str, work: Callable[[Path, random.Random], Trial], folder: Path, dice: random.Random) -> Trial:
    """One trial; one whose reader fails or hangs is wrong."""
    try:
        return work(folder, dice)._replace(kind=kind)
    except ChildProcessError as error:
        return Trial(kind, "no answer", str(error), 0.0)


def campaign(root: Path, kills: int, damages: int, seed: int) -> Iterator[Trial]:
    """Yield all trials; each draws from the seed and its own number."""
    for kind, world_size in (("all ranks", 2), ("one rank", 2), ("all ranks", 1)):
        folder = root / f"killed-{kind.replace(' ', '-')}-{world_size}"
        folder.mkdir()
        for number in range(kills):
            dice = random.Random(f"{seed} {kind} {world_size} {number}")
            work = partial(kill, kind=kind, world_size=world_size)
            yield tried(f"kill {kind} of {world_size}", work, folder, dice)
    base = root / BASE
    save_base(base)
    works = [(kind, partial(damage, kind=kind), 1) for kind in DAMAGES]
    works += [(kind, work, each) for kind, (work, each) in OTHERS.items()]
    for kind, work, each in works:
        for number in range(max(1, damages // len(works) // each)):
            folder = shutil.copytree(base, root / "damaged")
            dice = random.Random(f"{seed} {kind} {number}")
            yield tried(kind, work, folder, dice)
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
