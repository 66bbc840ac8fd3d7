# SPDX-License-Identifier: Apache-2.0
"""An agent that speaks no TLS is scraped without OpenSSL, and what wants OpenSSL later has it as ever."""

import subprocess
import sys

import pytest

_WITHOUT = """
import sys
from pathlib import Path
from megascale_agents.startup import memory

def openssl():
    return sorted({name for name in ("libssl", "libcrypto") if name in Path("/proc/self/maps").read_text()})

with memory.without_tls():
    import http.client
memory.load_prometheus_client()
from megascale_ops.exposition import Page, encoded
page = Page()
page.add("megascale_job_step", [(("j",), 3.0)])
print(encoded(page).body.decode().splitlines()[-1], openssl())
import hashlib, ssl, urllib.request
print(ssl.create_default_context().verify_mode.name, hashlib.sha256.__name__, hasattr(urllib.request, "HTTPSHandler"))
"""
_WITH = """
import ssl, sys
from megascale_agents.startup import memory
memory.load_prometheus_client()
import prometheus_client.exposition, urllib.request
print(prometheus_client.exposition.ssl is ssl, urllib.request.HTTPSHandler.__name__)
"""


@pytest.mark.parametrize(
    ("probe", "lines"),
    [
        pytest.param(
            _WITHOUT,
            ['megascale_job_step{job="j"} 3.0 []', "CERT_REQUIRED openssl_sha256 False"],
            id="an agent on plain HTTP",
        ),
        pytest.param(_WITH, ["True HTTPSHandler"], id="an agent on TLS"),
    ],
)
def test_a_scrape_loads_openssl_only_where_it_is(probe: str, lines: list[str]) -> None:
    """And no stand-in is left behind."""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)

    assert (done.stdout.splitlines(), done.stderr) == (lines, "")
