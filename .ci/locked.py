# SPDX-License-Identifier: Apache-2.0
"""Write down what pip would install now, each file with its SHA-256: for a site that wants to install only that.

    pip install --dry-run --ignore-installed --quiet --report - '.[controller,store]' | python .ci/locked.py > FILE
    pip install --require-hashes -r FILE && pip install --no-deps .

A list of hashes holds for one Python, one architecture and the builds of torch that one index has (PyPI's, PyTorch's
CPU or CUDA builds, a site's own): so it is made where it is used, and none is kept in the repository.
"""

import json
import sys
from typing import Any


def lines(report: dict[str, Any]) -> list[str]:
    """Return pip's requirements with hashes, sorted; what is built from a folder has none and is left out."""
    found = []
    for item in report["install"]:
        hashes = item["download_info"].get("archive_info", {}).get("hashes", {})
        if "sha256" in hashes:
            name, version = item["metadata"]["name"], item["metadata"]["version"]
            found.append(f"{name}=={version} --hash=sha256:{hashes['sha256']}")
    return sorted(found, key=str.lower)


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines(json.load(sys.stdin))) + "\n")
