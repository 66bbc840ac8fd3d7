# SPDX-License-Identifier: Apache-2.0
"""Read what faulthandler and torch's worker server write: the Python stacks of all threads, the main thread last."""

import re

from megascale_agents.evidence.frame_classes import Frame

_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>[0-9]{1,9}|\?+) in (?P<function>.*)$')


def parse(data: bytes) -> str:
    """Put the main thread, which both faulthandler and the worker server write last, first; drop empty threads."""
    blocks = [block.strip("\n") for block in data.decode("utf-8", "replace").split("\n\n")]
    kept = [block for block in blocks if block.strip() and "<no Python frame>" not in block]
    return "\n\n".join(reversed(_threads("\n".join(kept))))


def main_frames(data: bytes) -> tuple[Frame, ...]:
    """Return the frames of the main thread, innermost first; none when it runs no Python any more."""
    threads = _threads(data.decode("utf-8", "replace"))
    found = [_FRAME.match(line) for line in threads[-1].splitlines()] if threads else []
    return tuple(
        Frame(match["function"], match["file"], int(match["line"]) if match["line"].isdigit() else 0)
        for match in found
        if match is not None
    )


def _threads(text: str) -> list[str]:
    """Cut a traceback of all threads into one text for each."""
    threads: list[str] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")) or (not threads and line.strip()):
            threads.append(line)
        elif line.strip():
            threads[-1] += "\n" + line
    return threads
