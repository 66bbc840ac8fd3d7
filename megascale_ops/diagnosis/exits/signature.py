# SPDX-License-Identifier: Apache-2.0
"""A failure as it would read on any rank in any run: two that are equal are one fault. Pure."""

import re

from megascale_ops.schema.messages import RankExit

# 200 characters: a sentence; a line that goes on is of a program, not for people.
_MOST_CHARACTERS = 200
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def signature(exit_: RankExit) -> str:
    """Return the exception as it would read on any rank in any run: numbers and addresses are taken out."""
    if exit_.error is None:
        return ""
    return f"{exit_.error.type}: {without_numbers(exit_.error.message)} at {exit_.error.where}"


def signature_of_exit(exit_: RankExit) -> str:
    """Return the exit status and the last line of stderr, without numbers and addresses."""
    lines = [line.strip() for line in exit_.stderr_tail.splitlines() if line.strip()]
    said = f": {without_numbers(lines[-1])[:_MOST_CHARACTERS]}" if lines else " without a word"
    return f"exit code {exit_.code}{said}"


def without_numbers(text: str) -> str:
    """Return a text with a letter for each number and address."""
    return _NUMBER.sub("N", _ADDRESS.sub("0xN", text))
