# SPDX-License-Identifier: Apache-2.0
"""``python -m megascale_ops.cli``: the command line without its console script, for a parent that starts a verb."""

import sys

from megascale_ops.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
