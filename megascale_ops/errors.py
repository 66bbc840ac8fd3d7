# SPDX-License-Identifier: Apache-2.0
"""The errors that leave this package.

A user's mistake is a ``ValueError`` with one clear sentence; everything else hangs under ``MegascaleError`` so that a
caller can catch what is ours without catching what is not. The command line prints the sentence and exits with
``exit_code``; a user's mistake never shows a traceback.
"""


class MegascaleError(Exception):
    """Something of ours could not do what it was asked; the message names what, where and what to do."""

    exit_code = 1


class UsageError(MegascaleError, ValueError):
    """What the user gave cannot work as given (an option, a path, a name, a file)."""

    exit_code = 2


class ControllerUnreachableError(MegascaleError):
    """No controller answered at the address given before the deadline. ``leader``: the one to ask instead, if known."""

    def __init__(self, sentence: str = "", leader: str = "") -> None:
        super().__init__(sentence)
        self.leader = leader


class StrangerError(ControllerUnreachableError):
    """Something answers at the address given, and it is no controller; the message says what. To wait is no use."""


class RefusedError(MegascaleError):
    """The controller understood the request and said no; the text carries its sentence."""


class NotFoundError(RefusedError):
    """There is no job, incident or profile of the name that was asked for."""


class VersionError(MegascaleError):
    """A message, journal or black box of a version that this program does not support; both versions are named."""


class CheckpointError(MegascaleError):
    """No checkpoint could be written, or none that verifies could be read."""
