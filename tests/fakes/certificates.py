# SPDX-License-Identifier: Apache-2.0
"""A certificate for this host that no client trusts yet, made by openssl."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path) -> Path:
    """Return a file with a certificate for 127.0.0.1 and its key; the test is skipped where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine to make a certificate with: apt-get install openssl")
    path, key = folder / "cert.pem", folder / "key.pem"
    make = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=here")
    names = ("-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run(
        ["openssl", *make, *names, "-keyout", key, "-out", path], check=True, capture_output=True, timeout=60
    )
    path.write_text(path.read_text() + key.read_text())
    return path


def serving_with(certificate: Path) -> ssl.SSLContext:
    """Return what a server needs to show it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context
