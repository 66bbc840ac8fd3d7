# SPDX-License-Identifier: Apache-2.0
"""Derived tokens: what they allow stands in them, and only their controller's own token makes one."""

import base64

import msgspec
import pytest

from megascale_ops.errors import UsageError
from megascale_ops.schema.tokens import EVERYTHING, Grant, is_derived, issue, new_token, read_grant

OWN = new_token()
GRANTS = [
    Grant("read"),
    Grant("read", "a.job"),
    Grant("operate", "job-1", until_wall_s=1_800_000_000.0),
    Grant("operate", node="n1.example"),
    Grant("operate", "job", "n1", 5.0),
]


@pytest.mark.parametrize("grant", GRANTS)
def test_a_derived_token_says_what_it_was_issued_for(grant: Grant) -> None:
    """A holder of the own token reads the grant back; a controller with another one reads nothing."""
    token = issue(OWN, grant)

    assert read_grant(OWN, token) == grant
    assert read_grant(new_token(), token) is None
    assert is_derived(token)
    assert token.isascii()
    assert not set(token) - set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")


def test_the_own_token_allows_everything() -> None:
    """It is what the controller was started with."""
    assert read_grant(OWN, OWN) == EVERYTHING
    assert not is_derived(OWN)


@pytest.mark.parametrize("grant", GRANTS)
def test_a_changed_token_allows_nothing(grant: Grant) -> None:
    """Another grant under the same signature, another signature, a part: none is valid."""
    prefix, payload, signature = issue(OWN, grant).split(".")
    wider = base64.urlsafe_b64encode(msgspec.json.encode(EVERYTHING)).rstrip(b"=").decode()

    forged = [
        f"{prefix}.{wider}.{signature}",
        f"{prefix}.{payload}.{signature[:-2]}",
        f"{prefix}.{payload}.",
        f"{prefix}.{payload}",
        f"{prefix}..{signature}",
        f"mo2.{payload}.{signature}",
        f"{prefix}.{payload}.{signature}.",
        f"{prefix}.{payload}.{'é' * 43}",
        "",
        OWN[:-1],
    ]

    assert [read_grant(OWN, token) for token in forged] == [None] * len(forged)


@pytest.mark.parametrize(
    ("own", "grant", "sentence"),
    [
        (OWN, EVERYTHING, "for one job or one node"),
        (OWN, Grant("read", node="n1"), "for reporting"),
        (OWN, Grant("read", "../etc"), "job name"),
        (OWN, Grant("operate", node="a b"), "node name"),
        (issue(OWN, Grant("operate", "job")), Grant("read", "job"), "a derived token can't issue others"),
    ],
    ids=["everything", "read-node", "no-job-name", "no-node-name", "derived"],  # the tokens are new in each process
)
def test_what_makes_no_sense_is_not_issued(own: str, grant: Grant, sentence: str) -> None:
    """One sentence; above all, no grant can be passed on."""
    with pytest.raises(UsageError, match=sentence):
        issue(own, grant)
