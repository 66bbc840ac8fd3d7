# SPDX-License-Identifier: Apache-2.0
"""A page as a picture, by whatever Chromium this machine has: headless, offline, and never longer than its deadline."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from megascale_ops.errors import MegascaleError
from megascale_ops.whole_file import open_beside

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
# 60 s: a start takes one to three; a loaded machine with cold disks takes ten times as long.
DEADLINE_S = 60.0
WIDTH = 1400
# 16,384 pixels: higher pictures are more than a browser's surface holds.
MOST_HEIGHT = 16_384
_HEIGHT = re.compile(r'<html[^>]*\bdata-height="(\d+)"')


def find_browser() -> str:
    """Return the browser to use.

    Raises:
        MegascaleError: there is none.
    """
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return found
    raise MegascaleError(
        "a picture needs Chromium or Chrome, and none is on PATH: `apt-get install chromium`, or leave --png out"
    )


def picture(page: Path, target: Path, *, width: int = WIDTH, dark: bool = False) -> None:
    """Write the whole of a page as PNG.

    Raises:
        MegascaleError: there is no browser, it failed or took too long, or the target can't be written.
        UsageError: the target is a folder, a device or a pipe.
    """
    browser = find_browser()
    height = _HEIGHT.search(run_headless(browser, page, "--dump-dom", width=width))
    size = f"{width},{min(MOST_HEIGHT, int(height.group(1)) if height else width)}"
    with tempfile.TemporaryDirectory(prefix="megascale-picture-") as folder:
        made = Path(folder) / "page.png"
        scheme = ("--blink-settings=preferredColorScheme=0",) if dark else ("--blink-settings=preferredColorScheme=1",)
        run_headless(browser, page, f"--screenshot={made}", f"--window-size={size}", *scheme, width=width)
        if not made.is_file():
            raise MegascaleError(f"{browser} made no picture of {page}")
        try:
            with made.open("rb") as source, open_beside(target, follow=True) as file:
                shutil.copyfileobj(source, file)
        except OSError as error:
            raise MegascaleError(f"the picture {target} can't be written: {error.strerror}") from error


def run_headless(browser: str, page: Path, *options: str, width: int = WIDTH) -> str:
    """Open a page headless and return what the browser printed to stdout.

    Raises:
        MegascaleError: it failed or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="megascale-browser-") as profile:
        command = [
            browser,
            *("--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--mute-audio"),
            *(
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--disable-extensions",
            ),
            # No name resolves: a browser requests updates and the like of its vendor, here on a training node.
            "--host-resolver-rules=MAP * ~NOTFOUND",
            # /dev/shm of a container has 64 MB by default, less than a browser needs.
            *("--disable-dev-shm-usage", f"--user-data-dir={profile}", f"--window-size={width},1000"),
            # Chromium refuses its sandbox to root. The page is the product's own and forbids every request.
            *(("--no-sandbox",) if os.geteuid() == 0 else ()),
            *options,
            page.absolute().as_uri(),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise MegascaleError(f"{browser} did not show {page} within {DEADLINE_S:.0f} s") from error
        except OSError as error:
            raise MegascaleError(f"{browser} can't be started: {error.strerror}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise MegascaleError(f"{browser} failed with status {done.returncode}: {last}")
    return done.stdout
