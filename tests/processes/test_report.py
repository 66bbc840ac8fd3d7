# SPDX-License-Identifier: Apache-2.0
"""The report of a real run in a real browser: drawn, without an error, and without asking anybody for anything."""

import http.server
import json
import re
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.errors import MegascaleError
from megascale_ops.trace.browser import find_browser, run_headless
from tests.processes.launch import Launch, until

PACED = Path(__file__).parents[1] / "fixtures" / "scripts" / "paced.py"
pytestmark = pytest.mark.processes


@pytest.fixture
def browser() -> str:
    """Return the browser of this machine."""
    try:
        return find_browser()
    except MegascaleError as error:
        pytest.skip(f"no browser can be had here: {error}")


class Seen:
    """What a browser did with a page: its elements as text, what went to the console, what it asked for."""

    def __init__(self, browser: str, page: Path, folder: Path) -> None:
        log, net = folder / "browser.log", folder / "net.json"
        self.dom = run_headless(
            browser, page, "--dump-dom", "--enable-logging", f"--log-file={log}", f"--log-net-log={net}",
            "--net-log-capture-mode=Everything",
        )  # fmt: skip
        self.console = [line for line in log.read_text(errors="replace").splitlines() if ":CONSOLE" in line]
        # The browser also sends requests to its vendor: those of a page from a file carry that page's key.
        asked = re.findall(r'"network_isolation_key":"file:.*"url":"([^"]+)"', net.read_text(errors="replace"))
        self.asked = {one for one in asked if not one.startswith(("file:", "data:", "blob:"))}

    def drawn(self, name: str) -> str:
        """Return what the page's program wrote down about what it drew."""
        found = re.search(rf'id="plot"[^>]*data-{name}="([^"]*)"', self.dom)
        assert found is not None, self.dom[-2000:]
        return found.group(1)


@pytest.fixture
def server() -> Iterator[int]:
    """Return the port of a server that a page may not ask."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served.server_address[1]
        served.shutdown()


def test_the_tests_own_eyes_see_errors_and_requests(browser: str, tmp_path: Path, server: int) -> None:
    """A page that fails and one that asks are noticed: otherwise the next test would prove nothing."""
    page = tmp_path / "bad.html"
    page.write_text(f"<script>nobody.knows()</script><img src=http://127.0.0.1:{server}/x.png>")

    seen = Seen(browser, page, tmp_path)

    assert any("nobody is not defined" in line for line in seen.console)
    assert any(f"127.0.0.1:{server}" in one for one in seen.asked)


@pytest.mark.calm  # a rank that is 20 % slower is to be seen
def test_a_run_with_a_slow_rank(launch: Launch, browser: str, tmp_path: Path) -> None:
    """While it runs and after its end: every rank has its row, the ledger adds up, the picture is a picture."""
    started = launch.spawn("run", "--nproc-per-node=4", "--job=toy", "--", str(PACED), "--slow=forward", "--steps=250")
    launch.until_step(100)
    live = launch.command("report", "toy", "--json")
    assert live.returncode == 0, live.stderr
    assert json.loads(live.stdout)["source"].startswith("the controller at http://")
    assert json.loads(live.stdout)["ranks"] == 4
    assert launch.finish(started) == 0, launch.output()
    until((launch.run_dir() / "history-toy.bin").exists, "the history to be written")

    page, image = tmp_path / "r.html", tmp_path / "r.png"
    done = launch.command("report", "toy", "-o", str(page), "--png", str(image), "--json")

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["notes"] == []
    assert told["state"] == "finished"
    assert round(sum(told["ledger_s"].values()), 6) == round(told["wall_s"], 6)
    assert told["ledger_s"]["train"] > 7.0
    assert told["ledger_s"]["unknown"] == 0.0
    assert told["slowest"][0]["rank"] == 2
    assert told["step"] == 249
    seen = Seen(browser, page, tmp_path)
    assert seen.drawn("rows") == "4"
    assert int(seen.drawn("columns")) >= 5
    assert seen.console == []
    assert seen.asked == set()
    assert "straggler" in seen.dom
    assert 'class="hm"' in seen.dom or "heatmaplayer" in seen.dom
    width, height = struct.unpack(">II", image.read_bytes()[16:24])
    assert width == 1400
    assert height > 1500
    launch.assert_nothing_left()
