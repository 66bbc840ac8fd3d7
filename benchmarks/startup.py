# SPDX-License-Identifier: Apache-2.0
"""How long a person waits for ``megascale-ops --help``: whole processes, in turn with a bare Python."""

import statistics
import subprocess
import sys
import time

RUNS = 20
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "megascale-ops --help": [sys.executable, "-m", "megascale_ops.cli.main", "--help"],
    "megascale-ops run --help": [sys.executable, "-m", "megascale_ops.cli.main", "run", "--help"],
}


def main() -> None:
    """Take turns, print the table."""
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(RUNS):
        for name, command in COMMANDS.items():
            begin = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            found[name].append(time.perf_counter() - begin)
    print(f"{'command':<26}{'median s':>10}{'max s':>9}   of {RUNS} runs in turn")
    for name, times in found.items():
        print(f"{name:<26}{statistics.median(times):>10.3f}{max(times):>9.3f}")


if __name__ == "__main__":
    main()
