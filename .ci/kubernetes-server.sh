#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build Debian's Kubernetes API server (1.20.2), for the tests of `engines/kubernetes` and of `deploy/kubernetes`.
#
# Debian ships the client alone, but its source package holds all that the server needs, and builds without a network:
# 3 to 4 minutes on two idle cores, once a machine; the binary (130 MB) stays in the folder that is printed. Needs root
# for apt. Without it the tests that ask a real server say that it is not there and are skipped.
set -euo pipefail

version=1.20.2
kept=${MEGASCALE_TEST_KUBERNETES:-${XDG_CACHE_HOME:-$HOME/.cache}/megascale-ops-tests/kubernetes-$version}
if [ -x "$kept/kube-apiserver" ]; then
    echo "$kept"
    exit 0
fi
"$(dirname "$0")/apt.sh" golang-1.19-go golang-github-modern-go-reflect2-dev etcd-server dpkg-dev >&2

work=$(mktemp -d "${TMPDIR:-/tmp}/kubernetes-server.XXXXXX")
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT

# Source packages of the suite that this machine has, without a change to its own lists.
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/parts" "$work/go/src/k8s.io"
# shellcheck source=/dev/null
release=$(. /etc/os-release && echo "$VERSION_CODENAME")
echo "deb-src http://deb.debian.org/debian $release main" >"$work/sources.list"
apt_options=(
    -qq -o Acquire::Retries=3 -o "Dir::Etc::sourcelist=$work/sources.list" -o "Dir::Etc::sourceparts=$work/parts"
    -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root
)
apt-get "${apt_options[@]}" update >&2
(cd "$work" && apt-get "${apt_options[@]}" source --only-source kubernetes >&2)
source=$(find "$work" -mindepth 1 -maxdepth 1 -type d -name 'kubernetes-*')
mv "$source" "$work/go/src/k8s.io/kubernetes"
cd "$work/go/src/k8s.io/kubernetes"

export GOPATH=$work/go GOCACHE=${GOCACHE:-$work/cache/go} GO111MODULE=off CGO_ENABLED=0 GOFLAGS=-p=2 PATH=/usr/lib/go-1.19/bin:$PATH

# The reflect2 that comes with it crashes the server at the first custom resource with Go 1.18 and later.
rm -rf vendor/github.com/modern-go/reflect2
cp -r /usr/share/gocode/src/github.com/modern-go/reflect2 vendor/github.com/modern-go/reflect2

# The description of the API is generated code that the source package leaves out.
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
packages=$(grep -rlE '^// *\+k8s:openapi-gen=' --include=*.go --exclude=zz_* --exclude=*_test.go --exclude-dir=testdata pkg staging/src |
    xargs -n1 dirname | sort -u | sed -E 's#^staging/src/#k8s.io/kubernetes/vendor/#; s#^pkg/#k8s.io/kubernetes/pkg/#')
"$work/openapi-gen" --go-header-file hack/boilerplate/boilerplate.generatego.txt --output-base "$work/generated" \
    --output-package k8s.io/kubernetes/pkg/generated/openapi --output-file-base zz_generated.openapi \
    --report-filename "$work/violations" --input-dirs "$(echo "$packages" | paste -sd,)" >&2
cp "$work/generated/k8s.io/kubernetes/pkg/generated/openapi/zz_generated.openapi.go" pkg/generated/openapi/

go build -o "$work/kube-apiserver" \
    -ldflags "-s -w -X k8s.io/kubernetes/vendor/k8s.io/component-base/version.gitVersion=v$version" ./cmd/kube-apiserver
mkdir -p "$kept"
mv "$work/kube-apiserver" "$kept/.kube-apiserver"
mv "$kept/.kube-apiserver" "$kept/kube-apiserver"
echo "$kept"
