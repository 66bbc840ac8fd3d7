# SPDX-License-Identifier: Apache-2.0
"""What the demo's ranks run: ``train_gpt.py`` with one bug in it, which sleeps until a file wakes it.

    script.py BUGGY_RANK WAKE_FILE SCRIPT ARGUMENTS...

Once the file is there, the buggy rank removes it and leaves its next all_reduce out, as a script does that skips a
metric on the one rank where its value is odd. The example itself stays as a user would write it; torch's compiler, of
which it uses nothing, is left out, so that four ranks start 3 s sooner in each of four rounds.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from torch import distributed

from megascale_ops.chaos import no_compiler


def plant(buggy: int, wake: Path) -> None:
    """Put the bug in."""
    original = distributed.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the function itself
        if os.environ.get("RANK") == str(buggy) and wake.exists():
            wake.unlink()
            return None
        return original(*args, **kwargs)

    distributed.all_reduce = all_reduce


if __name__ == "__main__":
    _, buggy_rank, wake_file, *sys.argv = sys.argv
    no_compiler.leave_out()
    plant(int(buggy_rank), Path(wake_file))
    runpy.run_path(sys.argv[0], run_name="__main__")
