# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: INP001  a script beside data, not a package
"""Write the Grafana dashboards of this folder, or name those that differ from what would be written.

With them what Kubernetes' operators read of dashboards and rules: agents/deploy/kubernetes/monitoring.

    python dashboards/generate.py             write megascale-*.json, and the objects made from them and from rules/
    python dashboards/generate.py --check     exit 1 and name the files that differ; writes nothing
    python dashboards/generate.py --sketch    print what each dashboard looks like, in characters

It needs grafana-foundation-sdk, which is among the development dependencies; using the dashboards needs none.
"""

import argparse
import json
import sys
from pathlib import Path

OBJECTS = Path(__file__).parents[1] / "agents" / "deploy" / "kubernetes" / "monitoring"


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file differs")
    parser.add_argument("--sketch", action="store_true", help="print the layout of each dashboard; write nothing")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="where the files are  [here]")
    options = parser.parse_args()
    if not options.folder.is_dir():
        sys.stderr.write(f"generate.py: --folder {options.folder}: there is no such folder\n")
        return 2
    has_objects = options.folder.samefile(Path(__file__).parent)  # dashboards elsewhere are no part of the repository
    try:
        from megascale_dashboards import kubernetes, writing
    except ModuleNotFoundError as error:
        sys.stderr.write(f"generate.py: {error.name} is missing: pip install 'grafana-foundation-sdk==0.0.21'\n")
        return 2
    if options.sketch:
        for text in writing.rendered().values():
            sys.stdout.write(f"{writing.sketch(json.loads(text))}\n\n")
        return 0
    if options.check:
        differing = writing.differing(options.folder) + (kubernetes.differing(OBJECTS) if has_objects else [])
        for name in differing:
            sys.stderr.write(f"{name} differs from what dashboards/generate.py writes\n")
        if differing:
            sys.stderr.write("run: python dashboards/generate.py\n")
        return 1 if differing else 0
    for name in writing.write(options.folder) + (kubernetes.write(OBJECTS) if has_objects else []):
        sys.stdout.write(f"{name} written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
