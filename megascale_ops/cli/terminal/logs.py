# SPDX-License-Identifier: Apache-2.0
"""Logging of every program: sentences for a terminal, JSON lines for a machine, always on stderr.

Standard-library logging, configured once, here. A line about a fault carries ``job``, ``node``, ``rank`` and
``incident`` (``logger.warning("...", extra={"job": job, "rank": 3})``); the text form puts them in brackets behind
the sentence, the JSON form makes them fields.
"""

import json
import logging
import sys
from collections import OrderedDict
from datetime import datetime
from typing import TextIO

from megascale_ops.schema.wording import escaped

# 100 lines and 5 tracebacks of a kind in 10 s are 2 KB a second; 16 MB came in 20 s while no file could be opened.
_WHILE_S, _MOST_LINES, _MOST_TRACES = 10.0, 100, 5
# 4,096 kinds: some hundred places in the code, and the jobs and nodes that they name.
_MOST_KINDS = 4096

FIELDS = ("job", "node", "rank", "incident")


class SentenceFormatter(logging.Formatter):
    """``14:03:07 warning controller: rank 2 is silent [job=gpt rank=2]``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, followed by the traceback where one was logged."""
        clock = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        fields = " ".join(f"{name}={value}" for name, value in extra_fields(record).items())
        line = f"{clock} {record.levelname.lower()} {_program(record)}: {record.getMessage()}"
        line = escaped(f"{line} [{fields}]" if fields else line)
        if not record.exc_info:
            return line
        # Indented: an exception's text may have line breaks, and none of its lines must look like a log line.
        trace = self.formatException(record.exc_info).split("\n")
        return "\n".join([line, *(f"    {escaped(one)}" for one in trace)])


class JsonFormatter(logging.Formatter):
    """One JSON object a line; ``time`` is RFC 3339 with the machine's offset."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line without a line break in it."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **extra_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class Repeats(logging.Filter):
    """Lets through so many lines of one kind in a while, and notes on the next one how many were left out.

    A kind is where in the code a line comes from and which job and node it is about.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: OrderedDict[tuple[object, ...], list[float]] = OrderedDict()  # since when, how many, left out

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is to be written."""
        kind = (record.name, record.lineno, getattr(record, "job", ""), getattr(record, "node", ""))
        seen = self._seen.get(kind)
        if seen is None:
            seen = self._seen[kind] = [record.created, 0, 0]
            if len(self._seen) > _MOST_KINDS:
                self._seen.popitem(last=False)
        if not 0 <= record.created - seen[0] < _WHILE_S:
            seen[0], seen[1] = record.created, 0
        seen[1] += 1
        if seen[1] > (_MOST_TRACES if record.exc_info else _MOST_LINES):
            seen[2] += 1
            return False
        if seen[2]:
            record.msg = f"{record.getMessage()} ({seen[2]:.0f} more lines like this one were left out)"
            record.args = None
            seen[2] = 0
        return True


def extra_fields(record: logging.LogRecord) -> dict[str, object]:
    """Return which job, node, rank and incident a line is about, as far as it names them."""
    said = ((name, getattr(record, name, None)) for name in FIELDS)
    return {name: value for name, value in said if value not in (None, "", -1)}  # -1: no rank


def configure(level: str = "info", log_format: str = "text", stream: TextIO | None = None) -> None:
    """Send all logging to ``stream`` (stderr when None), from ``level`` up, as ``text`` or ``json``.

    Calling it again replaces what was configured before, so that a verb's own options win over the group's.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(Repeats())
    handler.setFormatter(JsonFormatter() if log_format == "json" else SentenceFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # aiohttp logs a line per request at info: at 1,536 heartbeats a second that is all one would see.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    # S3's libraries tell at info in which variable each key was found.
    for library in ("aiobotocore", "botocore"):
        logging.getLogger(library).setLevel(logging.WARNING)


def _program(record: logging.LogRecord) -> str:
    """Return the program of a line: ``controller`` for ``megascale_ops.controller.loop``, ``agent`` for the agent."""
    parts = record.name.split(".")
    if parts[0] == "megascale_agents":
        return "agent"
    return parts[1] if parts[0] == "megascale_ops" and len(parts) > 1 else parts[0]
