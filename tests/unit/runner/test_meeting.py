# SPDX-License-Identifier: Apache-2.0
"""Where nodes meet, for each way in which a launch line of torchrun's can say it."""

import pytest

from megascale_ops.errors import UsageError
from megascale_ops.runner.config import RunConfig
from megascale_ops.runner.meeting import Meeting, meet
from megascale_ops.runner.plan import Machine, make_plan, parse_nnodes

KEY_FILE = "/run/key"
HERE = {"localhost", "127.0.0.1", "::1", "head"}


def met(**given: object) -> Meeting:
    """Return where nodes meet."""
    config = RunConfig(**{"nnodes": "1", **given})  # type: ignore[arg-type]  # a test's shorthand
    return meet(config, parse_nnodes(config.nnodes), lambda host: host in HERE)


def test_one_node_needs_no_meeting_point() -> None:
    """The usual line names c10d and an endpoint; alone, a run brings up a controller of its own, and says so."""
    found = met(nnodes="1", rdzv_backend="c10d", rdzv_endpoint="localhost:29400")

    assert (found.controller, found.max_nodes) == ("", 1)
    assert found.said == ("--rdzv-endpoint localhost:29400 (c10d) is not needed: one node meets nobody",)


@pytest.mark.parametrize("backend", ["c10d", "etcd-v2", "static"])
@pytest.mark.parametrize("nnodes", ["2", "1:4", "2:4"])
def test_several_nodes_meet_at_the_endpoint_of_any_backend(backend: str, nnodes: str) -> None:
    """The controller is where torchrun would have had its store; the node that lives there brings it up."""
    found = met(nnodes=nnodes, rdzv_backend=backend, rdzv_endpoint="localhost:29400")

    assert (found.controller, found.serve) == ("http://localhost:29400", "localhost:29400")
    assert found.said == ("the nodes meet at localhost:29400: the controller is there, brought up by this run",)


def test_who_lives_elsewhere_only_goes_there() -> None:
    """Of several nodes one brings the controller up."""
    found = met(nnodes="2", rdzv_backend="c10d", rdzv_endpoint="far:29400", token_file=KEY_FILE)

    assert (found.controller, found.serve, found.in_place) == ("http://far:29400", "", True)


@pytest.mark.parametrize(("rank", "serve"), [(0, "head:19500"), (1, "")])
def test_the_static_line_meets_beside_its_master(rank: int, serve: str) -> None:
    """``--nnodes 2 --node-rank R --master-addr A``: node rank 0 brings the controller up, and rank 0 keeps its port."""
    found = met(nnodes="2", node_rank=rank, master_addr="head", token_file=KEY_FILE)

    assert (found.controller, found.serve) == ("http://head:19500", serve)
    assert (found.master_port, found.node_rank) == (29500, rank)
    (said,) = found.said
    assert said.endswith("; rank 0 serves at head:29500")


@pytest.mark.parametrize(("port", "beside"), [(29501, 19501), (11024, 1024), (11023, 21023), (60000, 50000)])
def test_every_node_works_out_the_same_port_for_the_controller(port: int, beside: int) -> None:
    """It is no neighbour of the master's, where the next job has its own, and one that needs no root."""
    found = met(nnodes="2", master_addr="localhost", master_port=port)

    assert (found.controller, found.master_port) == (f"http://localhost:{beside}", port)


@pytest.mark.parametrize(("address", "first"), [("localhost", 0), ("far", -1)])
def test_without_a_node_rank_who_lives_at_the_master_is_the_first(address: str, first: int) -> None:
    """A script that names the address itself looks for rank 0 there."""
    found = met(nnodes="2", master_addr=address, token_file=KEY_FILE)

    assert found.node_rank == first


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [("localhost", "localhost:29400"), ("[::1]:5", "[::1]:5"), ("[::1]", "[::1]:29400")],
)
def test_an_endpoint_may_leave_out_the_port(endpoint: str, url: str) -> None:
    """As torchrun's c10d, which has 29400 then; addresses of version 6 stand in brackets."""
    assert met(nnodes="2", rdzv_backend="c10d", rdzv_endpoint=endpoint).controller == f"http://{url}"


@pytest.mark.parametrize("endpoint", ["localhost:0", "localhost:x", ":5", "localhost:99999"])
def test_an_endpoint_where_nobody_can_meet_is_refused(endpoint: str) -> None:
    """One sentence; on one node it does not matter."""
    with pytest.raises(UsageError, match=r"^--rdzv-endpoint .* can't be used by several nodes"):
        met(nnodes="2", rdzv_backend="c10d", rdzv_endpoint=endpoint)
    assert met(rdzv_backend="c10d", rdzv_endpoint=endpoint).controller == ""


def test_a_meeting_point_that_others_reach_asks_for_a_secret() -> None:
    """Any client that reaches a controller could stop jobs; torchrun's store has the same gap without a warning."""
    with pytest.raises(UsageError, match="--token-file"):
        met(nnodes="2", rdzv_backend="c10d", rdzv_endpoint="head:29400")


@pytest.mark.parametrize("backend", ["", "megascale"])
@pytest.mark.parametrize("endpoint", ["h:7070", "http://h:7070"])
def test_our_own_backend_has_the_controller_at_its_endpoint(backend: str, endpoint: str) -> None:
    """On one node, too: there is a controller, and it is to be obeyed."""
    found = met(rdzv_backend=backend, rdzv_endpoint=endpoint)

    assert found == Meeting("http://h:7070", max_nodes=1)


def test_a_controller_that_is_given_is_the_meeting_point() -> None:
    """Whatever torchrun's line says besides."""
    found = met(nnodes="1:2", controller="http://h:7070", rdzv_backend="c10d", rdzv_endpoint="localhost:29400")

    assert (found.controller, found.serve, found.max_nodes) == ("http://h:7070", "", 2)
    assert found.said == ("--rdzv-endpoint localhost:29400 (c10d) is not needed: nodes meet at the controller",)


def test_a_range_from_one_starts_with_one_node() -> None:
    """Without a place to meet, no other node can join; a message says so."""
    found = met(nnodes="1:2")

    assert (found.controller, found.max_nodes) == ("", 1)
    assert found.said == ("--nnodes 1:2 starts with one node and stays so: no controller is given for others to join",)


@pytest.mark.parametrize("nnodes", ["2", "2:4"])
def test_several_nodes_without_a_place_to_meet_are_refused(nnodes: str) -> None:
    """One sentence says what to start."""
    with pytest.raises(UsageError, match="needs a controller that all nodes reach"):
        met(nnodes=nnodes)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("", 0)),
        ({"master_port": 29501}, ("", 29501)),
        ({"master_addr": "localhost", "master_port": 29501}, ("localhost", 29501)),
        ({"nnodes": "1:2", "master_addr": "localhost", "master_port": 29501}, ("localhost", 29501)),
        ({"master_addr": "localhost"}, ("", 0)),
        # The controller decides which node has rank 0, so the address on the line may be another one's.
        ({"nnodes": "2", "controller": "http://h:1", "master_addr": "a", "master_port": 29501}, ("", 29501)),
        ({"nnodes": "2", "master_addr": "localhost", "master_port": 29501}, ("", 29501)),
        ({"nnodes": "2", "master_addr": "localhost"}, ("", 29500)),  # torchrun's
        ({"wrap": True, "master_port": 29501}, ("", 0)),
    ],
)
def test_rank_0_serves_where_the_line_says(given: dict[str, object], expected: tuple[str, int]) -> None:
    """A script that says ``tcp://localhost:PORT`` itself finds rank 0 there; otherwise each round has a free port."""
    machine = Machine("node-a", 2, 0, "/state", "stamp", "python", lambda host: host in HERE)

    plan = make_plan(RunConfig(**given), ("train.py",), machine, threads_set=False)  # type: ignore[arg-type]  # fields

    assert plan.master == expected
