# SPDX-License-Identifier: Apache-2.0
"""What the agent can be told, and what it refuses with one sentence."""

from pathlib import Path

import pytest
from megascale_agents import config as configuration
from megascale_agents.config import Address, AgentConfig
from megascale_agents.daemon import run_agent

from megascale_ops.errors import UsageError

URL = "http://127.0.0.1:7070"


def test_a_controller_is_all_it_needs() -> None:
    """Everything else has a default that works."""
    config = AgentConfig(controller=URL)

    configuration.check(config)

    assert configuration.metrics_address(config) == Address("127.0.0.1", 7071, any_port=True)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (AgentConfig(), "--controller"),
        (AgentConfig(controller=URL, look_interval_s=0.0), "look_interval_s"),
        (AgentConfig(controller=URL, heartbeat_interval_s=0.01), "heartbeat_interval_s"),
        (AgentConfig(controller=URL, heartbeat_interval_s=float("nan")), "heartbeat_interval_s"),
    ],
)
def test_what_cannot_work_is_refused(config: AgentConfig, word: str) -> None:
    """The sentence names the setting."""
    with pytest.raises(UsageError, match=word):
        configuration.check(config)


@pytest.mark.parametrize("root", ["nowhere", "file", "x" * 5000, "a\0b"])
@pytest.mark.parametrize("name", ["sys_root", "proc_root"])
def test_a_place_of_the_host_that_is_no_folder_is_refused(tmp_path: Path, name: str, root: str) -> None:
    """Every check would be off without a word of it; the node's own, and a folder as a container has it, are taken."""
    (tmp_path / "file").touch()
    wrong = str(tmp_path / root)

    with pytest.raises(UsageError, match=f"{name} .* is no folder"):
        configuration.check_roots(AgentConfig(controller=URL, **{name: wrong}))
    configuration.check_roots(AgentConfig(controller=URL, **{name: str(tmp_path)}))
    configuration.check_roots(AgentConfig(controller=URL))


@pytest.mark.parametrize("listen", ["7071", ":7071", "localhost", "localhost:x", "localhost:99999", "a b"])
def test_a_listen_address_is_host_and_port(listen: str) -> None:
    """Anything else is refused with what is allowed."""
    with pytest.raises(UsageError, match="HOST:PORT"):
        configuration.metrics_address(AgentConfig(controller=URL, metrics_listen=listen))


def test_metrics_beyond_loopback_need_a_token() -> None:
    """As everywhere in this project."""
    open_config = AgentConfig(controller=URL, metrics_listen="0.0.0.0:9000")
    with_token = AgentConfig(controller=URL, metrics_listen="0.0.0.0:9000", token_file="t")  # noqa: S106  a path

    with pytest.raises(UsageError, match="--token-file"):
        configuration.metrics_address(open_config)
    for_scrapes = AgentConfig(controller=URL, metrics_listen="0.0.0.0:9000", metrics_token_file="t")  # noqa: S106  a path
    assert configuration.metrics_address(for_scrapes) == configuration.metrics_address(with_token)
    address = configuration.metrics_address(with_token)

    assert address is not None
    assert not address.is_loopback


def test_metrics_can_be_turned_off_or_put_elsewhere() -> None:
    """An empty address serves none; IPv6 works."""
    assert configuration.metrics_address(AgentConfig(controller=URL, metrics_listen="")) is None
    assert configuration.metrics_address(AgentConfig(controller=URL, metrics_listen="[::1]:80")) == Address("::1", 80)


@pytest.mark.parametrize(
    ("content", "mode", "word"),
    [("x", 0o644, "chmod"), ("", 0o600, "is empty"), ("a\nb", 0o600, "no token"), ("s3cret", 0o600, "guessed")],
)
def test_an_agent_whose_token_file_proves_nothing_does_not_start(
    tmp_path: Path, content: str, mode: int, word: str
) -> None:
    """A token that others can read is no secret; neither for the controller nor for its own metrics."""
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(mode)

    with pytest.raises(UsageError, match=word):
        run_agent(AgentConfig(controller=URL, token_file=str(path)))
    with pytest.raises(UsageError, match=word):
        run_agent(AgentConfig(controller=URL, metrics_token_file=str(path)))
    with pytest.raises(UsageError, match="can't be read"):
        run_agent(AgentConfig(controller=URL, token_file=str(tmp_path / "missing")))


def test_a_node_has_a_name_that_can_be_a_folder() -> None:
    """The host's name when none is given."""
    assert configuration.effective_node(AgentConfig())
    with pytest.raises(UsageError, match="node name"):
        configuration.effective_node(AgentConfig(node="a/b"))
