# SPDX-License-Identifier: Apache-2.0
"""The one sentence for a name that does not exist: what was given, and the name that was probably meant."""

from collections.abc import Iterable

# 100 characters of a name: the product's have 40 at most, and names from outside may have a page.
_MOST = 100


def nearest(name: object, known: Iterable[str], *, alike: float = 0.6) -> str | None:
    """Return the known name that ``name`` was probably meant to be, or None when nothing comes close.

    Hyphens, underscores and case do not count as differences. A name that only begins like what was given is taken
    when no whole name comes close (``--nproc`` for ``--nproc-per-node``).

    Args:
        name: what was given; what is no text is meant to be nothing.
        known: the names that there are.
        alike: how much has to be the same, 0 to 1. 0.6 is difflib's own: two words of five letters may differ in two.
    """
    from difflib import get_close_matches

    if not isinstance(name, str):
        return None
    spelled = {candidate.lower().replace("_", "-"): candidate for candidate in known}
    wanted = name[:_MOST].lower().replace("_", "-")
    close = get_close_matches(wanted, spelled, n=1, cutoff=alike)
    if close:
        return spelled[close[0]]
    # A beginning is weaker than a whole word: from three letters on, one of five may differ (0.8).
    beginnings = {candidate[: len(wanted)]: spelled[candidate] for candidate in sorted(spelled, reverse=True)}
    close = get_close_matches(wanted, beginnings, n=1, cutoff=0.8) if len(wanted.strip("-")) > 2 else []
    return beginnings[close[0]] if close else None


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the sentence for an unknown option, verb or key, with the nearest known name when there is one."""
    guess = nearest(name, known)
    return f"unknown {kind} {name!r:.{_MOST}}" + (f": did you mean {guess!r}?" if guess else "")
