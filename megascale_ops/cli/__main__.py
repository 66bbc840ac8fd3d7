# SPDX-License-Identifier: Apache-2.0
"""The program `megascale-ops`, and ``python -m megascale_ops.cli``, which needs no console script.

Ctrl-C is taken before anything is imported that takes time: Python would end it with a traceback from the midst of an
import, which on a busy machine takes half a second.
"""

import sys

from megascale_ops.cli.terminal.interrupt import EXIT_INTERRUPTED, ctrl_c_ends


def start() -> int:
    """Run the command line of this process, and return its exit code."""
    with ctrl_c_ends(EXIT_INTERRUPTED):
        from megascale_ops.cli.main import main

        return main()


if __name__ == "__main__":
    sys.exit(start())
