# SPDX-License-Identifier: Apache-2.0
"""Versions that travel with messages, the journal and the black box, and the one rule for reading them.

A neighbour one version apart is understood (fields are only ever added, with defaults); anything further away is
refused with both versions named.
"""

from megascale_ops.errors import VersionError

MESSAGE_VERSION = 1
JOURNAL_VERSION = 2
BOX_VERSION = 3
MARK_HEADER = "Megascale-Ops"
"""Header of a controller's answers, with its message version: an answer with none of our fields may be a stranger's."""


def spoken() -> int:
    """Return the version of the messages that this program sends, as a factory of the field ``version``.

    A plain default would be left out of what is sent, as all defaults are, and be taken for its own version by each
    reader: two versions could never be distinguished.
    """
    return MESSAGE_VERSION


def check_version(what: str, theirs: int, ours: int) -> None:
    """Refuse ``theirs`` unless it is at most one version away from ``ours``.

    Raises:
        VersionError: naming both versions.
    """
    if abs(theirs - ours) > 1:
        raise VersionError(
            f"{what} has version {theirs}; this program speaks version {ours} (and its direct neighbours): "
            "update the older side"
        )
