# SPDX-License-Identifier: Apache-2.0
"""An exception as it would read on any rank in any run: two that are equal are one fault. Pure."""

import re

from megascale_ops.schema.messages import RankExit

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def signature(exit_: RankExit) -> str:
    """Return the exception as it would read on any rank in any run: numbers and addresses are taken out."""
    if exit_.error is None:
        return ""
    text = _NUMBER.sub("N", _ADDRESS.sub("0xN", exit_.error.message))
    return f"{exit_.error.type}: {text} at {exit_.error.where}"
