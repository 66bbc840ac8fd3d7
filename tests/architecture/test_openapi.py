# SPDX-License-Identifier: Apache-2.0
"""The published description of the controller's HTTP API is the one that it serves, and leaves no address out.

After a wanted change: ``MEGASCALE_UPDATE_GOLDEN=1 pytest tests/architecture/test_openapi.py`` and read the diff.
"""

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

from megascale_ops.controller.server.api import Api
from megascale_ops.controller.server.openapi import describe
from megascale_ops.controller.server.operations import NOT_PUBLIC, OPERATIONS
from tests.fakes.served_controller import Served, serve_controller

COMMITTED = Path(__file__).parents[2] / "docs" / "openapi.json"
OWN = "the controller's own token"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """Serve a controller that has a token."""
    async with serve_controller(tmp_path, OWN) as one:
        yield one


def addresses(served: Served) -> set[str]:
    """Return method and address of every route that the controller adds."""
    routes = Api(served.loop, served.store, OWN).application().router.routes()
    return {f"{one.method} {one.resource.canonical}" for one in routes if one.resource is not None}


def references(part: object) -> Iterator[str]:
    """Yield every reference in a description."""
    if isinstance(part, dict):
        yield from (value for key, value in part.items() if key == "$ref")
        for value in part.values():
            yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


async def get(url: str, token: str = "") -> tuple[int, Any]:
    """Return status and JSON of an answer."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_every_address_is_described_or_says_why_not(served: Served) -> None:
    """A route that is added without a row, and a row whose route is gone, fail here."""
    known = addresses(served)

    assert known == {*OPERATIONS, *NOT_PUBLIC}
    assert not set(OPERATIONS) & set(NOT_PUBLIC)
    assert all(NOT_PUBLIC.values())


async def test_the_committed_description_is_what_is_served(served: Served) -> None:
    """To the last character: a change of a type or an address is committed with the description."""
    status, described = await get(f"{served.url}/openapi.json")
    text = json.dumps(described, indent=1, ensure_ascii=False) + "\n"

    if os.environ.get("MEGASCALE_UPDATE_GOLDEN"):
        COMMITTED.write_text(text, encoding="utf-8")
    assert status == 200
    assert COMMITTED.read_text(encoding="utf-8") == text


def test_a_type_that_changes_makes_the_description_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison: another answer is another description."""
    routes = [("GET", "/v1/status"), ("GET", "/v1/hardware")]
    before = describe(routes)
    changed = OPERATIONS["GET /v1/status"]._replace(gives=OPERATIONS["GET /v1/hardware"].gives)

    monkeypatch.setitem(OPERATIONS, "GET /v1/status", changed)

    assert describe(routes) != before


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    """JSON Schema 2020-12, which OpenAPI 3.1 takes as it is; operations have names of their own."""
    described = json.loads(COMMITTED.read_text(encoding="utf-8"))
    schemas = described["components"]["schemas"]
    names = [one["operationId"] for methods in described["paths"].values() for one in methods.values()]

    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert {one.removeprefix("#/components/schemas/") for one in references(described)} == set(schemas)
    assert len(names) == len(set(names)) == len(OPERATIONS)


async def test_what_is_described_as_open_is_and_all_else_wants_a_token(served: Served) -> None:
    """As the description says of each address."""
    described = json.loads(COMMITTED.read_text(encoding="utf-8"))
    asked = {path: methods["get"] for path, methods in described["paths"].items() if "get" in methods}

    for path, one in asked.items():
        status, answer = await get(served.url + path.replace("{", "").replace("}", ""))
        is_open = one.get("security") == []
        assert (status == 200) if is_open else (status == 401 and list(answer) == ["error"]), path
