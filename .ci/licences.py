# SPDX-License-Identifier: Apache-2.0
"""Check that everything installed stands under a licence that we may use: a part of ``make lint``.

    python .ci/licences.py

What is not on the list fails, also a licence that cannot be told: then a person reads it and adds a row, here or in
``installed``. The list is about use and redistribution beside code under Apache-2.0.
"""

import sys
from importlib.metadata import Distribution

import installed

# Permissive ones, and MPL-2.0, which asks for its own files only.
ALLOWED = frozenset(
    {
        *(
            "Apache-2.0",
            "Apache-2.0 WITH LLVM-exception",
            "MIT",
            "MIT-0",
            "BSD-2-Clause",
            "BSD-3-Clause",
            "0BSD",
            "ISC",
        ),
        *("BSL-1.0", "PSF-2.0", "CNRI-Python", "MPL-2.0", "Unlicense", "Zlib", "CC0-1.0"),
    }
)
# Beyond the list, each for a reason of its own.
EXCEPTIONS = {
    "psycopg": "LGPL-3.0: an extra that is imported unchanged, never shipped with us",
    "psycopg-binary": "same",
}
# torch's CUDA builds bring NVIDIA's libraries under NVIDIA's terms; the user installs them with torch.
NOT_OURS = ("nvidia-", "cuda-")


def complaints(distributions: dict[str, Distribution]) -> list[str]:
    """Return a sentence for each that may not be there."""
    found = []
    for name, one in sorted(distributions.items()):
        if name in EXCEPTIONS or name.startswith(NOT_OURS):
            continue
        expression = installed.licence_of(one)
        try:
            if not expression:
                found.append(f"{name} {one.version}: its metadata names no licence that is known here")
            elif not installed.is_allowed(expression, ALLOWED):
                found.append(f"{name} {one.version}: {expression} is not among the licences that we may use")
        except ValueError as error:
            found.append(f"{name} {one.version}: {error}")
    return found


def main() -> int:
    """Say what is wrong; the exit code."""
    distributions = installed.distributions()
    found = complaints(distributions)
    for sentence in found:
        sys.stderr.write(f"{sentence}\n")
    if not found:
        sys.stdout.write(f"{len(distributions)} distributions stand under licences that we may use\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
