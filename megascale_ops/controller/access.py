# SPDX-License-Identifier: Apache-2.0
"""Access: every request is checked against the grant of its token before anything is done.

``Access`` finds the grant of a request; the functions below check what a grant covers. They raise, so that an endpoint
which forgets the answer can't go on by mistake.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache

import msgspec

from megascale_ops.errors import RefusedError
from megascale_ops.schema.messages import Evidence, Heartbeat
from megascale_ops.schema.tokens import EVERYTHING, Grant, read_grant

# What the token of the request allows that is being answered. Without a default: a handler without a guard fails.
GRANT: ContextVar[Grant] = ContextVar("grant")
_BEARER = "Bearer "
# 16,384 tokens of 300 bytes, 5 MB: one for each node of a large cluster. A heartbeat's is checked in 2 us then, not 30.
_REMEMBERED = 16_384


class UnauthorisedError(RefusedError):
    """No token, or one that is not valid here."""


class ForbiddenError(RefusedError):
    """The token is valid, and not for this."""


class Access:
    """Checks the tokens of one controller.

    Args:
        own_token: the controller's; "" grants everything to every request.
        wall: wall clock seconds, for tokens that end.
        former: the one before, valid as long as a change is under way; "" for none.
    """

    def __init__(self, own_token: str, wall: Callable[[], float], former: str = "") -> None:
        self.is_closed = bool(own_token)
        self._wall = wall
        self.renew(own_token, former)

    def renew(self, own_token: str, former: str = "") -> None:
        """Go on with another own token, without a restart; what was derived from any but these two is void."""
        owns = (own_token, former) if former else (own_token,)

        # Only valid tokens are cached, in a cache of their own: guessed tokens neither fill nor empty it.
        @lru_cache(maxsize=_REMEMBERED)
        def known(token: str) -> Grant:
            found = next((grant for own in owns if (grant := read_grant(own, token)) is not None), None)
            if found is None:
                raise UnauthorisedError(
                    "the token that was given is not valid here: this controller wants a token of its own; is it an "
                    "old one, or another controller's?"
                )
            return found

        self._known = known

    def grant(self, headers: Mapping[str, str]) -> Grant:
        """Return the grant of the token in these headers.

        Raises:
            UnauthorisedError: no token, one of another controller, or one whose time is over.
        """
        if not self.is_closed:
            return EVERYTHING
        given = headers.get("Authorization", "")
        if not given.startswith(_BEARER):
            raise UnauthorisedError("this controller wants a token: give --token-file or set MEGASCALE_TOKEN_FILE")
        found = self._known(given.removeprefix(_BEARER))
        if 0 < found.until_wall_s <= self._wall():
            ended = datetime.fromtimestamp(found.until_wall_s, UTC)
            raise UnauthorisedError(f"this token was valid until {ended:%Y-%m-%d %H:%M} UTC: ask for a new one")
        return found


def may_read_all(grant: Grant) -> None:
    """Let a request pass that shows the whole cluster."""
    if grant.job or grant.node:
        raise _forbidden(grant, "this shows all jobs and nodes")


def may_operate_all(grant: Grant) -> None:
    """Let a request pass that changes what belongs to no job."""
    if not grant.is_everything:
        raise _forbidden(grant, "this changes what all jobs share")


def may_read(grant: Grant, job: str) -> None:
    """Let a request pass that shows one job, or with ``job`` empty what the grant covers; a node only reports."""
    if (grant.job and grant.job != job) or (grant.node and not grant.job):
        raise _forbidden(grant, f"this shows job {job}")


def may_operate(grant: Grant, job: str, node: str = "") -> None:
    """Let a request pass that changes one job; ``node``: in the name of that node's runner."""
    if grant.right != "operate":
        raise _forbidden(grant, "this changes something")
    if grant.is_everything:
        return
    if grant.job != job:
        raise _forbidden(grant, f"this is about job {job}")
    if node and grant.node and grant.node != node:
        raise _forbidden(grant, f"this speaks for node {node}")


def may_report(grant: Grant, heartbeat: Heartbeat) -> Heartbeat:
    """Let a heartbeat of the token's node pass; of its jobs only the token's, since an agent sees all of its user's."""
    may_speak_for(grant, heartbeat.node)
    if not grant.job or not heartbeat.jobs:
        return heartbeat
    mine = tuple(report for report in heartbeat.jobs if report.job == grant.job)
    if not mine:
        raise _forbidden(grant, f"this heartbeat speaks of job {heartbeat.jobs[0].job}")
    return heartbeat if len(mine) == len(heartbeat.jobs) else msgspec.structs.replace(heartbeat, jobs=mine)


def may_testify(grant: Grant, evidence: Evidence) -> None:
    """Let evidence pass: of the token's node and job."""
    may_speak_for(grant, evidence.node)
    if grant.job and grant.job != evidence.job:
        raise _forbidden(grant, f"this is evidence for job {evidence.job}")


def may_speak_for(grant: Grant, node: str) -> None:
    """Let an agent pass that reports its node."""
    if grant.right != "operate":
        raise _forbidden(grant, "this changes something")
    if grant.node and grant.node != node:
        raise _forbidden(grant, f"this speaks for node {node}")


def _forbidden(grant: Grant, what: str) -> ForbiddenError:
    return ForbiddenError(f"this token is for {grant.scope}, and {what}")
