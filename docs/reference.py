# SPDX-License-Identifier: Apache-2.0
"""Write the generated pages of the reference into a folder: ``python docs/reference.py DIR``.

The site is built with them and nothing of them is committed, so they can't be behind the code.
"""

import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Write the pages and say where; the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python docs/reference.py DIR", file=sys.stderr)  # noqa: T201  a script's usage line
        return 2
    root = Path(__file__).parents[1]
    sys.path[:0] = [str(root / folder) for folder in (".", "docs", "agents", "kernels")]
    from megascale_docs.reference import PAGES

    from megascale_ops.whole_file import write_whole

    for place, make in PAGES.items():
        path = Path(arguments[0], place)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, make().encode())
        print(path)  # noqa: T201  same
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
