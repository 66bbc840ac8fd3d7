# SPDX-License-Identifier: Apache-2.0
"""Which requests are answered: those of users and programs here, not those of a foreign web page."""

import pytest

from megascale_ops.controller.server.origin import why_foreign


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.1:7070"},
        {"Host": "localhost:7070", "Origin": "http://localhost:7070", "Sec-Fetch-Site": "same-origin"},
        {"Host": "[::1]:7070"},
        {},
        {"Host": "localhost:7070", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ],
)
def test_those_of_here_are_answered(headers: dict[str, str]) -> None:
    """Agents, command lines, our own page, and a person who follows a link."""
    assert why_foreign(headers, has_token=False) == ""


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"Host": "127.0.0.1:7070", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, "another site"),
        ({"Host": "127.0.0.1:7070", "Origin": "http://evil.example"}, "http://evil.example"),
        ({"Host": "127.0.0.1:7070", "Origin": "null"}, "null"),
        ({"Host": "evil.example:7070"}, "localhost and 127.0.0.1 only"),
        ({"Host": "127.0.0.1.evil.example"}, "localhost and 127.0.0.1 only"),
    ],
)
def test_those_of_another_site_are_not(headers: dict[str, str], why: str) -> None:
    """A page that posts here, and a foreign name that resolves to this address."""
    assert why in why_foreign(headers, has_token=False)


def test_with_a_token_any_name_may_lead_here() -> None:
    """The token says who asks; how the controller is called is the cluster's business."""
    assert why_foreign({"Host": "login1:7070"}, has_token=True) == ""
