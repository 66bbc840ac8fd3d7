# SPDX-License-Identifier: Apache-2.0
"""Every address of the controller against every kind of token: no request does more than its token allows."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from megascale_ops.controller.job.evidence_orders import EvidenceOrders
from megascale_ops.controller.server.api import Api
from megascale_ops.errors import RefusedError
from megascale_ops.link import Link
from megascale_ops.schema.health import CheckAsk, HardwareFinding, NodeAsk
from megascale_ops.schema.messages import Evidence, Heartbeat, JobReport, Join, Leave, Order, PolicyChange, StopAsk
from megascale_ops.schema.progress import RankReport
from megascale_ops.schema.tokens import Grant, issue, new_token
from tests.fakes.served_controller import Served, serve_controller

OWN = new_token()
UNTIL_S = time.time() + 3600.0
TOKENS = {
    "own": OWN,
    "reads": issue(OWN, Grant("read", until_wall_s=UNTIL_S)),
    "reads job": issue(OWN, Grant("read", "job")),
    "job": issue(OWN, Grant("operate", "job", until_wall_s=UNTIL_S)),
    "job on n": issue(OWN, Grant("operate", "job", "n")),
    "node n": issue(OWN, Grant("operate", node="n")),
    "other job": issue(OWN, Grant("operate", "other")),
    "node m": issue(OWN, Grant("operate", node="m")),
    "job on m": issue(OWN, Grant("operate", "job", "m")),
    "late": issue(OWN, Grant("operate", "job", until_wall_s=time.time() - 1.0)),
    "foreign": new_token(),
    "foreign job": issue(new_token(), Grant("operate", "job")),
    "none": "",
}
EVERYBODY = set(TOKENS)
OPERATE = {"own", "job", "job on n"}  # in the name of node n, or of none
READ_ALL = {"own", "reads"}
READ_JOB = {*READ_ALL, "reads job", "job", "job on n", "job on m"}
READ_ASKED = {*READ_JOB, "other job"}  # each sees what it is for
REPORT = {"own", "job", "job on n", "node n"}


def _heartbeat(node: str = "n", job: str = "job", agent: str = "x", seq: int = 1, **more: object) -> Heartbeat:
    now_s = time.monotonic()
    reports = (JobReport(job, 1, ranks=(RankReport(rank=0, local_rank=0, pid=1, round=1),)),)
    return Heartbeat(node, agent, seq, now_s, time.time(), full=True, jobs=reports, **more)  # type: ignore[arg-type]  # fields


def _join(job: str, node: str, runner: str = "r1") -> Join:
    return Join(job, node, runner, f"{job}-{node}", 1, 1, 1, "127.0.0.1", 29500, time.monotonic())


# Address as in the router -> the query, the body, the tokens that are allowed.
RULES: dict[tuple[str, str], tuple[str, object, set[str]]] = {
    ("POST", "/v1/heartbeat"): ("/v1/heartbeat", _heartbeat(), REPORT),
    ("POST", "/v1/evidence"): ("/v1/evidence", Evidence("n", "job", "job-1", "o"), REPORT),
    ("POST", "/v1/jobs/{job}/join"): ("/v1/jobs/job/join?wait_s=0", _join("job", "n"), OPERATE),
    ("GET", "/v1/jobs/{job}/orders"): ("/v1/jobs/job/orders?node=n&runner_id=r1&wait_s=0", None, OPERATE),
    ("POST", "/v1/jobs/{job}/leave"): ("/v1/jobs/job/leave", Leave("job", "n", "r9", "succeeded"), OPERATE),
    ("GET", "/v1/jobs/{job}/policy"): ("/v1/jobs/job/policy", None, READ_JOB),
    ("POST", "/v1/jobs/{job}/policy"): ("/v1/jobs/job/policy", PolicyChange({}), {*OPERATE, "job on m"}),
    ("POST", "/v1/jobs/{job}/stop"): ("/v1/jobs/job/stop", StopAsk(), {*OPERATE, "job on m"}),
    ("POST", "/v1/jobs/{job}/checkpoint"): ("/v1/jobs/job/checkpoint", None, {*OPERATE, "job on m"}),
    ("GET", "/v1/jobs/{job}/checkpoint"): ("/v1/jobs/job/checkpoint", None, READ_JOB),
    ("GET", "/v1/jobs/{job}/history"): ("/v1/jobs/job/history", None, READ_JOB),
    ("GET", "/v1/jobs/{job}/logs"): ("/v1/jobs/job/logs?rank=0", None, READ_JOB),
    ("GET", "/v1/jobs/{job}/skew"): ("/v1/jobs/job/skew", None, READ_JOB),
    ("POST", "/v1/jobs/{job}/profile"): ("/v1/jobs/job/profile", {}, {*OPERATE, "job on m"}),
    ("GET", "/v1/jobs/{job}/profile/{id}"): ("/v1/jobs/job/profile/1", None, READ_JOB),
    ("GET", "/v1/status"): ("/v1/status", None, READ_ASKED),
    ("GET", "/v1/incidents"): ("/v1/incidents", None, READ_ASKED),
    ("GET", "/v1/incidents/{id}"): ("/v1/incidents/job-1", None, READ_ASKED),
    ("POST", "/v1/nodes/{node}/check"): ("/v1/nodes/n/check", CheckAsk(), {"own"}),
    ("GET", "/v1/nodes/{node}/check"): ("/v1/nodes/n/check", None, READ_ALL),
    ("GET", "/v1/audit"): ("/v1/audit", None, READ_ALL),
    ("GET", "/v1/recordings"): ("/v1/recordings", None, READ_ALL),
    ("GET", "/v1/recordings/{id}"): ("/v1/recordings/1", None, READ_ALL),
    ("GET", "/v1/hardware"): ("/v1/hardware", None, READ_ALL),
    ("GET", "/v1/nodes"): ("/v1/nodes", None, READ_ALL),
    ("GET", "/v1/nodes/{node}"): ("/v1/nodes/n", None, READ_ALL),
    ("POST", "/v1/nodes/{node}"): ("/v1/nodes/n", NodeAsk("quarantine"), {"own"}),
    ("DELETE", "/v1/hardware/{uuid}"): ("/v1/hardware/GPU-1", None, {"own"}),
    ("GET", "/v1/live/snapshot"): ("/v1/live/snapshot", None, READ_ASKED),
    ("GET", "/v1/live"): ("/v1/live?job=nobody's", None, READ_ALL),
    ("GET", "/metrics"): ("/metrics", None, READ_ALL),
    ("GET", "/v1/sd/agents"): ("/v1/sd/agents", None, READ_ALL),
    ("GET", "/healthz"): ("/healthz", None, EVERYBODY),
    ("GET", "/leader"): ("/leader", None, EVERYBODY),
    ("GET", "/openapi.json"): ("/openapi.json", None, EVERYBODY),
    ("GET", "/"): ("/", None, EVERYBODY),
    ("GET", "/static/{name}"): ("/static/app.js", None, EVERYBODY),
    ("GET", "/runbooks/"): ("/runbooks/", None, EVERYBODY),
    ("GET", "/runbooks/{name}"): ("/runbooks/AgentDown", None, EVERYBODY),
}
# A controller answers 404 at an unknown address to any client with a valid token.
NOWHERE = ("*", "/{anything}")
STRANGERS = {"late", "foreign", "foreign job", "none"}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A controller that knows two jobs, ``job`` of node n and ``other`` of node m."""
    async with serve_controller(tmp_path, OWN) as one:
        async with Link(one.url, OWN) as link:
            await link.join(_join("job", "n"))
            await link.join(_join("other", "m"))
        yield one


async def test_every_address_has_its_rule(served: Served) -> None:
    """An address that is added without a line in this table fails here."""
    routes = Api(served.loop, served.store, OWN).application().router.routes()

    known = {(route.method, route.resource.canonical) for route in routes if route.resource is not None}

    assert {key for key in known if key[0] != "HEAD"} == {*RULES, NOWHERE}


@pytest.mark.parametrize("rule", sorted(RULES), ids=" ".join)
async def test_nobody_does_more_than_the_token_says(served: Served, rule: tuple[str, str]) -> None:
    """401 without a valid token, 403 with one for something else, and neither for whom it was issued."""
    path, body, allowed = RULES[rule]
    data = None if body is None else msgspec.json.encode(body)
    answers = {}

    async with aiohttp.ClientSession() as session:
        for who, token in TOKENS.items():
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with session.request(rule[0], served.url + path, data=data, headers=headers) as answer:
                answers[who] = (answer.status, await answer.text())

    for who, (status, text) in answers.items():
        if who in allowed:
            assert status not in (401, 403, 500), (who, text)
        else:
            assert status == (401 if who in STRANGERS else 403), (who, text)
            assert not [token for token in TOKENS.values() if token and token in text]


async def test_a_token_that_has_ended_says_so(served: Served) -> None:
    """Its holder gets the reason, and what to do."""
    async with Link(served.url, TOKENS["late"]) as link:
        with pytest.raises(RefusedError, match=r"valid until 20\d\d-\d\d-\d\d \d\d:\d\d UTC"):
            await link.status()


async def test_a_token_for_a_job_shows_no_other_one(served: Served) -> None:
    """Not in the status, not among the incidents, not in the list of jobs that the page draws."""
    async with Link(served.url, TOKENS["job"]) as mine, Link(served.url, TOKENS["reads"]) as all_of_it:
        status, frame = await mine.status(), await mine.live_snapshot()
        whole = await all_of_it.live_snapshot("job")
        with pytest.raises(RefusedError, match="this token is for job job, and this shows job other"):
            await mine.status("other")
        with pytest.raises(RefusedError, match="this shows job other"):
            await mine.live_snapshot("other")

    assert [one.job for one in status.jobs] == ["job"]
    assert (frame.job, [one.job for one in frame.jobs or ()]) == ("job", ["job"])
    assert [one.job for one in whole.jobs or ()] == ["job", "other"]


async def test_a_token_for_a_job_turns_no_page_to_another_one(served: Served) -> None:
    """A page of incidents has its job's alone, from memory and from the journal, and no other job's is an edge."""
    for _ in range(3):
        for job in ("job", "other"):
            _open_incident(served, job)
            await served.loop.settle(job, 5.0)
    async with Link(served.url, TOKENS["job"]) as mine, Link(served.url, TOKENS["reads"]) as all_of_it:
        pages = [
            await mine.incidents(limit=limit, before=before) for limit, before in ((2, ""), (2, "job-2"), (500, ""))
        ]
        whole = await all_of_it.incidents(limit=500)
        for asked, before in (("", "other-2"), ("", "other-9"), ("other", "")):
            with pytest.raises(RefusedError, match=r"no incident 'other-|this shows job other"):
                await mine.incidents(asked or None, limit=2, before=before)

    assert [[one.id for one in page.incidents] for page in pages] == [
        ["job-2", "job-3"],
        ["job-1"],
        ["job-1", "job-2", "job-3"],
    ]
    assert [page.older for page in pages] == [True, False, False]
    assert {one.job for one in whole.incidents} == {"job", "other"}


async def test_a_fault_of_ours_is_told_to_all_and_its_job_to_who_may_see_it(served: Served) -> None:
    """A probe gets that something is wrong; the job, and what went wrong, only tokens that may see every job."""
    served.loop.faults.note("other", "judging it", KeyError("a word of that job"))
    told = {}

    for who in ("own", "reads", "job", "other job", "late", "none"):
        async with Link(served.url, TOKENS[who] or None) as link:
            told[who] = await link.healthz()
    served.loop.faults.total.clear()  # it was the test's, not the controller's

    assert {said["status"] for said in told.values()} == {"degraded"}
    assert {who for who, said in told.items() if "job other" in str(said)} == {"own", "reads"}
    assert {who for who, said in told.items() if "a word of that job" in str(said)} == {"own", "reads"}


async def test_the_agent_of_a_job_puts_out_no_other_one(served: Served) -> None:
    """Who may speak for more lives: refused with what to do. Its own job's agent may be replaced at any time."""
    async with Link(served.url, TOKENS["job"]) as mine, Link(served.url, TOKENS["node n"]) as nodes:
        await mine.heartbeat(_heartbeat(agent="a1"))
        await mine.heartbeat(_heartbeat(agent="a2"))
        await nodes.heartbeat(_heartbeat(agent="daemon"))

        with pytest.raises(RefusedError, match=r"node n is spoken for by an agent of its own.*another --node name"):
            await mine.heartbeat(_heartbeat(agent="a3"))

    view = served.loop.registry.node("n")
    assert view is not None
    assert view.agent_id == "daemon"


async def test_an_agent_that_sees_more_than_its_job_is_heard_of_that_job(served: Served) -> None:
    """A user's two jobs on one node lie in one folder: the agent of one speaks of both, and only its own counts."""
    both = (JobReport("other", 1), *_heartbeat().jobs)
    async with Link(served.url, TOKENS["job"]) as mine:
        await mine.heartbeat(msgspec.structs.replace(_heartbeat(), jobs=both))

    view = served.loop.registry.node("n")
    assert view is not None
    assert set(view.shares) == {"job"}


async def test_hardware_is_remembered_for_all_on_the_word_of_nodes_only(served: Served) -> None:
    """What a job's agent finds is told of its job; no other one is kept off a GPU for it."""
    bad = HardwareFinding(
        "xid_79", "GPU 3: Xid 79", "kernel_log", "fail", "GPU-3", time.time(), time.time(), is_bad=True
    )
    async with Link(served.url, TOKENS["job"]) as mine, Link(served.url, TOKENS["node n"]) as nodes:
        await mine.heartbeat(_heartbeat(agent="a", findings=(bad,)))
        before = served.loop.hardware.book.entries()
        await nodes.heartbeat(_heartbeat(agent="daemon", findings=(bad,)))

    assert before == ()
    assert [one.uuid for one in served.loop.hardware.book.entries()] == ["GPU-3"]


async def test_a_job_can_not_take_all_places_for_nodes(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that its user invents fill half of them; the node's own agent still finds one."""
    monkeypatch.setattr("megascale_ops.controller.loop.MOST_NODES", 4)
    async with Link(served.url, TOKENS["job"]) as mine, Link(served.url, TOKENS["node n"]) as nodes:
        for name in ("made-up-1", "made-up-2"):
            await mine.heartbeat(_heartbeat(name, agent=name))
        with pytest.raises(RefusedError, match="made-up-3 is one too many"):
            await mine.heartbeat(_heartbeat("made-up-3", agent="made-up-3"))

        await nodes.heartbeat(_heartbeat(agent="daemon"))

    assert {view.node for view in served.loop.registry.nodes()} == {"made-up-1", "made-up-2", "n"}


async def test_orders_of_another_job_are_neither_heard_nor_taken_back(served: Served) -> None:
    """An agent with a job's token hears its job's orders, and can say of no other one that it is done."""
    held = {
        f"{job}:1:1": Order(id=f"{job}:1:1", job=job, node="n", kind="preserve", round=1) for job in ("job", "other")
    }
    for name, order in zip(("job", "other"), held.values(), strict=True):
        served.loop.jobs[name].orders[order.id] = order
    served.loop.transitions.agent_orders["n"] = dict(held)
    async with Link(served.url, TOKENS["job"]) as mine, Link(served.url, TOKENS["node n"]) as nodes:
        heard = await mine.heartbeat(_heartbeat(agent="a"))
        await mine.heartbeat(_heartbeat(agent="a", seq=2, done_orders=tuple(held)))

        left = await nodes.heartbeat(_heartbeat(agent="daemon"))

    assert [order.id for order in heard.orders] == ["job:1:1"]
    assert [order.id for order in left.orders] == ["other:1:1"]


async def test_evidence_is_for_orders_that_were_given_to_that_node(served: Served) -> None:
    """With a token for everything too: an order that does not exist, or another node's, brings nothing in."""
    job = served.loop.jobs["job"]
    incident = _open_incident(served)
    asked = job.asked[incident] = EvidenceOrders({"job:1:1": "n"})
    async with Link(served.url, OWN) as link:
        for node, order in (("n", "job:1:2"), ("m", "job:1:1"), ("n", "")):
            with pytest.raises(RefusedError, match="was given to node"):
                await link.evidence(Evidence(node, "job", incident, order))
        assert asked.answered == set()

        await link.evidence(Evidence("n", "job", incident, "job:1:1"))

    assert asked.answered == {"job:1:1"}


def _open_incident(served: Served, job: str = "job") -> str:
    from megascale_ops.schema.health import Verdict

    verdict = Verdict(fault="frozen", culprits=(0,), reason="a test", confidence=0.9)
    loop = served.loop
    return loop.transitions.open_incident(loop.jobs[job], verdict, detected=time.time()).id
