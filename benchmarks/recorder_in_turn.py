# SPDX-License-Identifier: Apache-2.0
"""What a step's events cost the recorder in several versions, measured in turn (A B A B), in CPU time.

Each version comes from a folder of its own, each measurement is a process of its own (``recorder.py --events``, this
folder's), and each figure is the least over all rounds: what others do on the machine only ever adds. A step has two
events each of data, backward, optimizer and a declared phase, and sixteen of eight collectives.

    git worktree add --detach ../before HEAD~3
    python benchmarks/recorder_in_turn.py ../before . [--rounds 6] [--core 1]
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

DEADLINE_S = 120.0
# How many events of each kind a step has: EVENTS_A_STEP of ``recorder.py``.
OF_A_STEP = {
    "data (begin, end)": 2,
    "backward (begin, end)": 2,
    "optimizer (begin, end of the step)": 2,
    "collective (enter, leave)": 16,
    "recorder.phase (enter, leave)": 2,
}
WHOLE = "a step's 24 events"


def measure(folder: Path, core: int) -> dict[str, float]:
    """Return nanoseconds of each event with the recorder of ``folder``."""
    script = Path(__file__).with_name("recorder.py")
    done = subprocess.run(
        ["taskset", "-c", str(core), sys.executable, "-P", str(script), "--events"],
        env={**os.environ, "PYTHONPATH": str(folder.resolve())},
        check=True, timeout=DEADLINE_S, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout)
    found[WHOLE] = sum(found[event] * count for event, count in OF_A_STEP.items())
    return found


def main() -> None:
    """Measure in turn and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    options = parser.parse_args()
    found: list[list[dict[str, float]]] = [[] for _ in options.folders]
    for _ in range(options.rounds):
        for version, folder in zip(found, options.folders, strict=True):
            version.append(measure(folder, options.core))
    print(f"{'CPU time, ns':38}" + "".join(f"{folder.name or '.':>12}" for folder in options.folders))
    for event in found[0][0]:
        print(f"{event:38}" + "".join(f"{min(one[event] for one in version):12.0f}" for version in found))
    print("each round's step:")
    for at in range(options.rounds):
        print(f"{at + 1:38}" + "".join(f"{version[at][WHOLE]:12.0f}" for version in found))


if __name__ == "__main__":
    main()
