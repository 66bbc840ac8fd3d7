# SPDX-License-Identifier: Apache-2.0
"""What a rank read, received and sent in a restore."""

from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Bytes of one rank; by file what it read from storage itself."""

    read_bytes: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    is_from_buddy: bool = False
    """Whether a file was not on the node that wrote it any more, and its copy was read; the same on all ranks."""
    read_by_file: dict[str, int] = field(default_factory=dict)
