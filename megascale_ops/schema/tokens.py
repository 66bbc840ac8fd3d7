# SPDX-License-Identifier: Apache-2.0
"""Tokens: the controller's own, and those derived from it for one job, one node, or for reading.

A derived token holds in clear what it allows and until when (a ``Grant``), and carries an HMAC-SHA256 of that under the
controller's own token:

    mo1.<grant as JSON, base64url>.<HMAC, base64url>

So the controller stores nothing, a holder of its own token can issue one without asking it, and a new own token makes
all of them void at once. Pure: the time is passed in.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import Literal

import msgspec

from megascale_ops.errors import UsageError
from megascale_ops.schema.identity import check_name

Right = Literal["read", "operate"]

_OWN_BYTES = 32
_PREFIX = "mo1"
# The key serves for this alone; another use of the same secret would have another context.
_CONTEXT = b"megascale-ops derived token 1\n"


class Grant(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the holder of a token may do.

    ``read`` may look. ``operate`` may also change: with a job, all that its runners, agents and people do in it; with a
    node and no job, no more than an agent of that node reports. Empty ``job`` and ``node`` mean every one.
    """

    right: Right
    job: str = ""
    node: str = ""
    until_wall_s: float = 0.0  # 0: as long as the controller's own token is the same
    name: str = ""  # of the person or program that it was issued to: what the audit log says

    @property
    def is_everything(self) -> bool:
        """Whether nothing is forbidden."""
        return self.right == "operate" and not self.job and not self.node

    @property
    def scope(self) -> str:
        """What it is for, in words."""
        parts = [*([f"job {self.job}"] if self.job else []), *([f"node {self.node}"] if self.node else [])]
        only = " to read only" if self.right == "read" else ""
        return (" on ".join(parts) or "all jobs") + only


EVERYTHING = Grant("operate")
READ_ALL = Grant("read")
_grants = msgspec.json.Decoder(Grant)


def new_token() -> str:
    """Return a random token of 256 bits for a controller."""
    return secrets.token_hex(_OWN_BYTES)


def issue(own_token: str, grant: Grant) -> str:
    """Return a token with the rights of ``grant``.

    Raises:
        UsageError: the grant makes no sense, or ``own_token`` is itself a derived one.
    """
    if is_derived(own_token):
        raise UsageError("a derived token can't issue others: take the file that the controller was started with")
    if grant.is_everything and not grant.name:
        raise UsageError(
            "a token that may operate is for one job or one node: name it by --job or --node; for one that may operate "
            "everything say by --name who has it"
        )
    if grant.right == "read" and grant.node:
        raise UsageError("a token for one node is for reporting: leave --node out to read")
    for kind, name in (("job", grant.job), ("node", grant.node), ("holder", grant.name)):
        if name:
            check_name(kind, name)
    payload = _text(msgspec.json.encode(grant))
    return f"{_PREFIX}.{payload}.{_text(_sign(own_token, payload))}"


def read_grant(own_token: str, token: str) -> Grant | None:
    """Return what a token allows under the controller's own one, None when it was not issued with it.

    Compared in constant time. Whether its time is over is for the caller to check.
    """
    if hmac.compare_digest(_bytes(token), _bytes(own_token)):
        return EVERYTHING
    prefix, _, rest = token.partition(".")
    payload, _, signature = rest.partition(".")
    if prefix != _PREFIX or not hmac.compare_digest(_bytes(signature), _bytes(_text(_sign(own_token, payload)))):
        return None
    try:
        return _grants.decode(base64.urlsafe_b64decode(_bytes(payload) + b"=" * (-len(payload) % 4)))
    except (msgspec.MsgspecError, binascii.Error):
        return None  # signed by a version newer than this one


def is_derived(token: str) -> bool:
    """Return whether a token is one that ``issue`` has made."""
    return token.startswith(f"{_PREFIX}.") and token.count(".") == 2


def _sign(own_token: str, payload: str) -> bytes:
    return hmac.digest(_bytes(own_token), _CONTEXT + _bytes(payload), hashlib.sha256)


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
