# SPDX-License-Identifier: Apache-2.0
"""Requests by the published description, right or wrong, get the answers that it specifies.

schemathesis draws requests from the description that a real controller serves, valid ones and such that break a rule,
and holds every answer against it. ``make fuzz`` draws more.
"""

import asyncio
import concurrent.futures
import contextlib
import copy
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus

import pytest
import requests
import schemathesis
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode, checks
from schemathesis.core.failures import FailureGroup
from schemathesis.schemas import BaseSchema

from megascale_ops.controller.server.operations import OPERATIONS, PROGRAMS, READ, Operation
from megascale_ops.link import Link
from megascale_ops.schema.health import HardwareFinding
from megascale_ops.schema.messages import Heartbeat, JobReport, Join, RankExit
from megascale_ops.schema.progress import Progress, RankReport, StepWork
from tests.fakes.mutations import EXAMPLES, fuzzed
from tests.fakes.served_controller import serve_controller

KNOWN = {"job": "gpt", "id": "gpt-1", "uuid": "GPU-1"}
# What ends only when the reader goes; tests/unit/controller/test_live_stream.py reads it.
ENDLESS = "live"
ASKED = sorted((one for one in OPERATIONS.values() if one.id != ENDLESS), key=lambda one: one.id)
TOO_LARGE = {HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE}
ALWAYS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
# 30 s: an answer that takes longer is a hang.
ANSWER_S = 30.0
# 6 requests of each kind, 1 of what programs send: the library takes half a second to draw a heartbeat. Those are drawn
# from their types in each run as well (tests/unit/controller/test_wild_messages.py). `make fuzz`: 300 and 40.
FEW, FEWEST = min(300, max(1, EXAMPLES // 10)), min(40, max(1, EXAMPLES // 60))


async def _bring_up(url: str) -> None:
    """Have a job that runs, an incident that is over and a GPU that is remembered as bad."""
    mine = {"job": "gpt", "node": "a", "runner_id": "r1", "nproc": 1, "min_nodes": 1, "max_nodes": 1}
    mine |= {"addr": "127.0.0.1", "store_port": 29500}
    bad = HardwareFinding("xid_79", "it fell off the bus", "gpu", "fail", "GPU-1", is_bad=True)
    async with Link(url) as link:
        await link.join(Join(join_id="j1", mono_s=time.monotonic(), **mine))
        exits = (RankExit(0, 0, 7, -9, time.monotonic(), step=3),)
        again = {"previous_round": 1, "cause": "failure", "exits": exits}
        await link.join(Join(join_id="j2", mono_s=time.monotonic(), **mine, **again))
        for step in range(4):
            now_s = time.monotonic()
            progress = Progress(state="running", step=step, steps_seen=step + 1, moved_mono_s=now_s)
            ranks = (RankReport(0, 0, 100, 2, progress=progress, work=(StepWork(step, 0.5),)),)
            report = JobReport("gpt", 2, ranks=ranks)
            await link.heartbeat(
                Heartbeat("a", "x", step + 1, now_s, time.time(), full=True, jobs=(report,), findings=(bad,))
            )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a controller in a thread of its own; requests come from this one."""
    folder = tmp_path_factory.mktemp("controller")
    served: concurrent.futures.Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = (
        concurrent.futures.Future()
    )

    async def serve() -> None:
        async with serve_controller(folder) as one:
            await _bring_up(one.url)
            over = asyncio.Event()
            served.set_result((one.url, asyncio.get_running_loop(), over))
            await over.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if served.done():
                raise
            served.set_exception(error)

    thread = threading.Thread(target=run, name="controller", daemon=True)
    thread.start()
    address, events, over = served.result(ANSWER_S)
    yield address
    events.call_soon_threadsafe(over.set)
    thread.join(ANSWER_S)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def schema(url: str) -> BaseSchema:
    """Return the description as the controller serves it."""
    found = schemathesis.openapi.from_url(f"{url}/openapi.json", timeout=ANSWER_S)
    found.config.update(base_url=url)
    return found


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """Ask without the environment's proxies and netrc."""
    with requests.Session() as one:
        one.trust_env = False
        yield one


def ask(case: Case, session: requests.Session) -> requests.Response:
    """Send a request; one that would wait for something to happen waits for nothing."""
    if any(one.name == "wait_s" for one in case.operation.query):
        with contextlib.suppress(TypeError, ValueError):
            if float(case.query.get("wait_s", 20.0)) >= 0.0:
                case.query["wait_s"] = 0
    # Not ``case.call``, which looks into urllib3: grafana-client draws a fork of it that has other insides.
    answer: requests.Response = session.request(**case.as_transport_kwargs(), timeout=ANSWER_S)
    if answer.status_code >= 400:
        said = answer.json()
        assert list(said) == ["error"]
        assert 0 < len(said["error"]) < 2000
    return answer


def few(one: Operation) -> settings:
    """Return how much is drawn of one operation. A request that fails is told as it was: to simplify takes minutes."""
    most = FEWEST if one.tag == PROGRAMS and one.takes is not None else FEW
    return settings(fuzzed, max_examples=most, phases=(Phase.reuse, Phase.generate))


def drawn(schema: BaseSchema, one: Operation, mode: GenerationMode) -> st.SearchStrategy[Case]:
    """Return requests of one operation, about known things and about others."""
    only = schema.include(operation_id=one.id)
    if not any(operation.ok().path_parameters for operation in only.get_all_operations()):
        return only.as_strategy(generation_mode=mode)
    return only.as_strategy(generation_mode=mode) | only.as_strategy(generation_mode=mode, path_parameters=KNOWN)


@pytest.mark.parametrize("one", ASKED, ids=lambda one: one.id)
def test_what_is_asked_rightly_is_answered_as_described(
    schema: BaseSchema, session: requests.Session, one: Operation
) -> None:
    """Status, type and every field as described; what only reads takes all that its description allows."""

    @few(one)
    @given(case=drawn(schema, one, GenerationMode.POSITIVE))
    def hold(case: Case) -> None:
        answer = ask(case, session)
        # No description says how long an address may be with all that is in it.
        is_taken = one.tag == READ and answer.status_code != HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        case.validate_response(answer, checks=[*ALWAYS, *([checks.positive_data_acceptance] if is_taken else [])])

    hold()


@pytest.mark.parametrize("one", [one for one in ASKED if one.query or one.takes], ids=lambda one: one.id)
def test_what_is_asked_wrongly_is_refused_in_one_sentence(
    schema: BaseSchema, session: requests.Session, one: Operation
) -> None:
    """A value of another type or beyond its bounds is 400 (404 in an address, 413 or 431 where it is too long)."""

    @few(one)
    @given(case=drawn(schema, one, GenerationMode.NEGATIVE))
    def hold(case: Case) -> None:
        answer = ask(case, session)
        # The library takes these for no refusals.
        is_too_large = answer.status_code in TOO_LARGE
        wanted = ALWAYS if is_too_large else [*ALWAYS, checks.negative_data_rejection]
        case.validate_response(answer, checks=wanted)

    hold()


def test_an_answer_that_is_not_as_described_is_seen(schema: BaseSchema, session: requests.Session, url: str) -> None:
    """Negative control: the same answers, held against a description that says otherwise of one field."""
    wrong = copy.deepcopy(schema.raw_schema)
    wrong["components"]["schemas"]["Status"]["properties"]["version"] = {"type": "string"}
    other = schemathesis.openapi.from_dict(wrong)
    other.config.update(base_url=url)

    case = other["/v1/status"]["GET"].Case()

    with pytest.raises(FailureGroup, match="violates schema"):
        case.validate_response(ask(case, session), checks=ALWAYS)
