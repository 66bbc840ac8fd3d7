# SPDX-License-Identifier: Apache-2.0
"""The names of the bytes in a workspace, for findings and for messages."""

from typing import NamedTuple

from megascale_kernels.device import layout as table
from megascale_kernels.device.layout import Layout

_CONTROL_NAMES = {getattr(table, name).value: name for name in ("EPOCH", "PUSHES", "EXITS", "ABORT", "CLAIM")}


class FlagPlace(NamedTuple):
    """Where in a rank's memory a flag lies."""

    slot: int
    source: int
    channel: int


def flag_at(layout: Layout, offset: int) -> FlagPlace | None:
    """The flag that lies `offset` bytes into a workspace, or None when something else lies there."""
    index = offset // 4 - layout.flags(0)
    per_slot = layout.world_size * layout.channels
    if not 0 <= index < table.SLOTS * per_slot:
        return None
    slot, rest = divmod(index, per_slot)
    return FlagPlace(slot, *divmod(rest, layout.channels))


def name_of(layout: Layout, offset: int) -> str:
    """What lies `offset` bytes into a workspace."""
    word = offset // 4
    flag = flag_at(layout, offset)
    if flag is not None:
        return f"flag of slot {flag.slot}, source rank {flag.source}, channel {flag.channel}"
    if word < table.HELLO.value:
        return _control(word)
    if word < table.FLAGS_OFFSET:
        line, field = divmod(word - table.HELLO.value, table.HELLO_LINE.value)
        slot, rank = divmod(line, table.MAX_RANKS)
        return f"hello of slot {slot}, source rank {rank}, word {field}"
    if offset < layout.data(0):
        line, field = divmod(word - layout.progress, table.LINE.value)
        return f"progress header, word {field}" if line == 0 else f"progress of CTA {line - 1}, word {field}"
    slot, byte = divmod(offset - layout.data(0), layout.data_bytes) if layout.data_bytes else (0, 0)
    return f"data slot {slot}, byte {byte}"


def _control(word: int) -> str:
    votes = table.VOTES.value
    if votes <= word < votes + table.MAX_CTAS:
        return f"vote of CTA {word - votes}"
    return f"control word {_CONTROL_NAMES.get(word, word)}"
