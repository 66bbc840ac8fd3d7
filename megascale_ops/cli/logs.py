# SPDX-License-Identifier: Apache-2.0
"""Logging of every program: sentences for a terminal, JSON lines for a machine, always on stderr.

Standard-library logging, configured once, here. A line about a fault carries ``job``, ``node``, ``rank`` and
``incident`` (``logger.warning("...", extra={"job": job, "rank": 3})``); the text form puts them in brackets behind
the sentence, the JSON form makes them fields.
"""

import json
import logging
import sys
from datetime import datetime
from typing import TextIO

FIELDS = ("job", "node", "rank", "incident")


class SentenceFormatter(logging.Formatter):
    """``14:03:07 warning controller: rank 2 is silent [job=gpt rank=2]``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, followed by the traceback where one was logged."""
        clock = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        fields = " ".join(f"{name}={value}" for name, value in extra_fields(record).items())
        line = f"{clock} {record.levelname.lower()} {_program(record)}: {record.getMessage()}"
        line += f" [{fields}]" if fields else ""
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


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


def extra_fields(record: logging.LogRecord) -> dict[str, object]:
    """Return which job, node, rank and incident a line is about, as far as it says so."""
    said = ((name, getattr(record, name, None)) for name in FIELDS)
    return {name: value for name, value in said if value not in (None, "", -1)}  # -1: no rank


def configure(level: str = "info", log_format: str = "text", stream: TextIO | None = None) -> None:
    """Send all logging to ``stream`` (stderr when None), from ``level`` up, as ``text`` or ``json``.

    Calling it again replaces what was configured before, so that a verb's own options win over the group's.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else SentenceFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # aiohttp logs a line per request at info: at 1,536 heartbeats a second that is all one would see.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def _program(record: logging.LogRecord) -> str:
    """Return the room that speaks: ``controller`` for ``megascale_ops.controller.loop``, ``agent`` for the agent."""
    parts = record.name.split(".")
    if parts[0] == "megascale_agents":
        return "agent"
    return parts[1] if parts[0] == "megascale_ops" and len(parts) > 1 else parts[0]
