# SPDX-License-Identifier: Apache-2.0
"""The earlier name of ``megascale_kernels.tracing``: kept for one release, for scripts and ``python -m`` lines."""

import sys

from megascale_kernels.tracing import *  # noqa: F403 (an alias of all its names)
from megascale_kernels.tracing import __all__  # noqa: F401 (what an alias gives)
from megascale_kernels.tracing.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
