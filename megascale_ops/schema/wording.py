# SPDX-License-Identifier: Apache-2.0
"""Times, certainties and foreign texts as people read them, the same in a terminal, in a log and in a report."""

import re
from datetime import datetime, tzinfo

# 1.5: starts of one job on one machine differ by less; a start that takes longer is no longer "about" as long.
LONG_START = 1.5
# A file's name has 255 bytes at most; what is longer and has no space is nothing that a person reads to its end.
_ENDLESS = re.compile(r"\S{256,}")
# What ``Verdict.sure_of`` may limit a confidence to.
PLACE = "place"
# What is being done, by the state of a job that is not training as it should: a headline's words and a title's.
DOING = {
    "suspect": "a closer look is being taken",
    "confirming": "evidence is being gathered",
    "stopping": "all ranks are being stopped",
    "diagnosing": "what to do is being decided",
    "replacing": "waiting for nodes",
    "restarting": "ranks are starting",
    "catching_up": "training is catching up",
}


def printable(text: str) -> str:
    """Return ``text`` on one line with every control character shown instead of obeyed."""
    one_line = " ".join(text.split())
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in one_line)


def escaped(text: str) -> str:
    """Return ``text`` as it is but for what is obeyed instead of shown: line breaks, escape codes, marks of direction.

    For whole lines whose own spacing is meant; :func:`printable` also makes one line of many.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shortened(text: str) -> str:
    """Return ``text`` with the middle of each word left out that is longer than a name of a file may be."""
    return _ENDLESS.sub(lambda found: f"{found[0][:60]}...{found[0][-20:]} ({len(found[0])} characters)", text)


def pictured(text: str) -> str:
    """Return ``text`` with a picture of its own width for each control character but line breaks; for tables."""
    return "".join(char if char.isprintable() or char == "\n" else _picture(char) for char in text)


def _picture(char: str) -> str:
    """Return Unicode's picture of a control character, a replacement character where it has none."""
    code = ord(char)
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def counted(number: int, thing: str) -> str:
    """Return how many of a thing there are: ``1 node``, ``1,536 nodes``."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def percent(share: float) -> str:
    """Return a share as people read it, everywhere with the same digit: ``23.6 %``."""
    return f"{share * 100:.1f} %"


def duration(seconds: float) -> str:
    """Return a duration at the precision in which a person thinks of it: ``380 ms``, ``2.41 s``, ``12 min 5 s``."""
    if seconds < 1.0:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60.0:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def state_words(state: str) -> str:
    """Return a job's state as people say it."""
    return state.replace("_", " ")


def doing_words(state: str) -> str:
    """Return what is being done about a job that does not train as it should; of any other its state."""
    return DOING.get(state, state_words(state))


def starting(stepped: int, ranks: int, age_s: float, usual_s: float) -> str:
    """Return how far a start is: ``starting 0/4, about 12 s``.

    Args:
        stepped: ranks that have made a step since.
        ranks: all of them.
        age_s: since when it starts, -1 where that is not known.
        usual_s: what the last start took; 0: not known.
    """
    return f"starting {stepped:,}/{ranks:,}{start_time(age_s, usual_s)}"


def start_time(age_s: float, usual_s: float) -> str:
    """Return how long a start takes by the one before, with a comma before it; "" where there was none."""
    if usual_s <= 0:
        return ""
    usual = f"{usual_s:.0f} s" if 1.0 <= usual_s < 60.0 else duration(usual_s)
    return f", longer than the {usual} of the last one" if age_s > LONG_START * usual_s else f", about {usual} in all"


def clock(wall_s: float, zone: tzinfo | None = None) -> str:
    """Return a wall clock time with its date and offset, to the tenth of a second."""
    moment = datetime.fromtimestamp(wall_s, tz=zone).astimezone(zone)
    return moment.strftime("%Y-%m-%d %H:%M:%S.%f")[:-5] + moment.strftime(" %z")


def certainty(confidence: float, sure_of: str) -> str:
    """Return how sure a verdict is, and of what: 95 % must not read as a certain hang where a rank may only be late."""
    share = f"{confidence * 100:.0f} %"
    return f"{share} of who and where, not of a hang: it may go on by itself" if sure_of == PLACE else share
