# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

import gc
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import cpu_times, turns
from tests.cpu_times import pytest_runtest_protocol
from tests.drawn_seeds import drawn_seed, pytest_terminal_summary
from tests.few_reports import pytest_sessionstart

if TYPE_CHECKING:
    from tests.fakes.postgres import PostgresServer

# pytest finds hooks and fixtures by their names.
__all__ = ["drawn_seed", "pytest_runtest_protocol", "pytest_sessionstart", "pytest_terminal_summary"]

# A test never asserts speed; an example that takes more than 0.2 s on a machine with other work would be a failure.
# Its blob draws a failure again where what is printed of it does not.
settings.register_profile("any machine", deadline=None, print_blob=True)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of our own."""
    cpu_times.pytest_addoption(parser)
    turns.add_option(parser)
    parser.addoption("--seed", type=int, default=0, help="of commands that are drawn (unit/cli/test_drawn_commands.py)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let tests take turns."""
    config.pluginmanager.register(turns, "turns")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector: what is found lives to the end, and each look goes over it all."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what was collected out of every later garbage collection.

    8,000 tests with their parameters and what they import are 640,000 objects that live to the end. Each full
    collection looked at all of them, for 0.4 s, and tests about memory ask for a dozen. What of it is garbage (140,000
    objects, some 25 MB) stays: to look for it would take each worker 0.7 s.
    """
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest tests where there are workers, all of which put theirs into one order, once shuffled."""
    if hasattr(config, "workerinput"):
        from tests.processes.groups import place

        items.sort(key=lambda item: place(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Let one worker hold what belongs together, where ``--dist loadgroup`` asks for it."""
    if config.getoption("dist") != "loadgroup":
        return None
    from tests.processes.groups import ByGroup

    return ByGroup(config, log)


@pytest.fixture(scope="session")
def postgres_of_the_session() -> "Iterator[PostgresServer]":
    """The server behind `postgres`: to make one takes a second of CPU time."""
    from tests.fakes.postgres import PostgresServer

    made = PostgresServer()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def postgres(postgres_of_the_session: "PostgresServer") -> "PostgresServer":
    """A real PostgreSQL server that runs, with an empty database of the test's own; it may be frozen and stopped."""
    postgres_of_the_session.begin_anew()
    return postgres_of_the_session
