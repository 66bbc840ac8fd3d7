# SPDX-License-Identifier: Apache-2.0
"""What stands in an address of the controller: names that are not known, and parameters that can't be."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from megascale_ops.link import Link
from megascale_ops.schema.messages import Join
from tests.fakes.served_controller import Served, serve_controller


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """Serve a controller that knows one job."""
    async with serve_controller(tmp_path) as one:
        async with Link(one.url) as link:
            await link.join(Join("gpt", "a", "r1", "j1", 1, 1, 1, "127.0.0.1", 29500, 1.0))
        yield one


async def ask(served: Served, method: str, path: str) -> tuple[int, str]:
    """Return status and sentence of an answer."""
    body = {"settings": {}} if path.endswith("policy") else {}
    data = body if method == "POST" else None
    async with aiohttp.ClientSession() as session, session.request(method, served.url + path, json=data) as answer:
        return answer.status, (await answer.json()).get("error", "")


@pytest.mark.parametrize(
    "asked",
    [
        "GET /v1/status?job=nope",
        "GET /v1/incidents?before=nope-1",
        "GET /v1/incidents/nope-1",
        "GET /v1/jobs/nope/policy",
        "POST /v1/jobs/nope/policy",
        "GET /v1/jobs/nope/history",
        "GET /v1/jobs/nope/skew",
        "POST /v1/jobs/nope/profile",
        "GET /v1/jobs/gpt/profile/nope",
        "DELETE /v1/hardware/nope",
        "GET /v1/live?job=nope",
        "GET /v1/live/snapshot?job=nope",
    ],
)
async def test_a_name_that_is_not_known_is_404_and_named(served: Served, asked: str) -> None:
    """One sentence, with the name in it."""
    status, sentence = await ask(served, *asked.split(" "))

    assert status == 404
    assert "nope" in sentence


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("incidents?limit=0", "limit '0' can't be: expected `int` >= 1"),
        ("incidents?limit=1001", "limit '1001' can't be: expected `int` <= 1000"),
        ("incidents?limit=many", "limit 'many' can't be: expected `int`"),
        ("incidents?limit=", "limit '' can't be: expected `int`"),
        ("incidents?limit=1&limit=2", "names something twice"),
        (f"status?job={'x' * 129}", "can't be: expected `str` of length <= 128"),
        ("jobs/gpt/orders?wait_s=nan", "wait_s 'nan' can't be: expected `float` >= 0.0"),
        ("jobs/gpt/orders?wait_s=-1", "wait_s '-1' can't be: expected `float` >= 0.0"),
        ("jobs/gpt/orders?round=one", "round 'one' can't be: expected `int`"),
        (f"jobs/{'x' * 129}/skew", "can't be: expected `str` of length <= 128"),
    ],
)
async def test_a_parameter_that_cannot_be_is_400_and_named(served: Served, query: str, sentence: str) -> None:
    """With what was given, and what could have been."""
    status, said = await ask(served, "GET", f"/v1/{query}")

    assert status == 400
    assert sentence in said


async def test_a_parameter_that_nobody_knows_is_ignored(served: Served) -> None:
    """A newer page or client may ask an older controller."""
    assert await ask(served, "GET", "/v1/status?job=gpt&colour=blue") == (200, "")
