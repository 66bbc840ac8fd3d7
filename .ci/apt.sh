#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install the Debian packages named that are missing, when this machine has apt and we are root.
# Elsewhere say what is missing and go on: the tests that need it say so themselves.
set -euo pipefail

missing=()
for package in "$@"; do
    case "$package" in
        gcc) command -v gcc >/dev/null || missing+=("$package") ;;
        procps) command -v ps >/dev/null || missing+=("$package") ;;
        libc6-dev) [ -e /usr/include/stdio.h ] || missing+=("$package") ;;
        postgresql)
            command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || missing+=("$package")
            ;;
        *) dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package") ;;
    esac
done
[ ${#missing[@]} -eq 0 ] && exit 0

if command -v apt-get >/dev/null && [ "$(id -u)" -eq 0 ]; then
    echo "installing ${missing[*]}"
    # 300 s: a slow mirror; a locked dpkg must not hang the tests for ever.
    apt_options=(-qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
    apt-get "${apt_options[@]}" update
    DEBIAN_FRONTEND=noninteractive apt-get "${apt_options[@]}" install -y --no-install-recommends "${missing[@]}"
else
    echo "not installed here: ${missing[*]} (tests that need them will say so)" >&2
fi
