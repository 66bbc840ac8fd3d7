# SPDX-License-Identifier: Apache-2.0
"""The dashboards before Grafana's own published schema: no Grafana server can be had here, its types can.

About 8 s, half of it the package's way from the registry or its cache.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.grafana_schema import GrafanaSchema
from tests.fakes.read_dashboards import dashboards

# One worker: the schema is installed once.
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> GrafanaSchema:
    """Install the schema once."""
    return GrafanaSchema(tmp_path_factory.mktemp("schema"))


def first(dashboard: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the first panel of a kind."""
    found: dict[str, Any] = next(panel for panel in dashboard["panels"] if panel["type"] == kind)
    return found


def _typing_error(dashboard: dict[str, Any]) -> None:
    first(dashboard, "stat")["tilte"] = "a slip of the pen"


def _no_such_option(dashboard: dict[str, Any]) -> None:
    first(dashboard, "stat")["options"]["graphMode"] = "pie"


def _no_such_colour_mode(dashboard: dict[str, Any]) -> None:
    first(dashboard, "stat")["fieldConfig"]["defaults"]["color"]["mode"] = "rainbow"


def _limit_without_value(dashboard: dict[str, Any]) -> None:
    del first(dashboard, "stat")["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"]


def _fields_of_another_kind(dashboard: dict[str, Any]) -> None:
    first(dashboard, "timeseries")["fieldConfig"]["defaults"]["custom"]["cellOptions"] = {"type": "auto"}


def _query_without_reference(dashboard: dict[str, Any]) -> None:
    del first(dashboard, "table")["targets"][0]["refId"]


BREAKS: tuple[Callable[[dict[str, Any]], None], ...] = (
    _typing_error,
    _no_such_option,
    _no_such_colour_mode,
    _limit_without_value,
    _fields_of_another_kind,
    _query_without_reference,
)


def test_grafana_would_take_every_dashboard(schema: GrafanaSchema) -> None:
    """The compiler has nothing against any, and something against each of six broken ones: one run for both."""
    good = dashboards()
    broken = {}
    for number, spoil in enumerate(BREAKS):
        broken[f"broken-{number}"] = copy.deepcopy(good["megascale-oncall"])
        spoil(broken[f"broken-{number}"])

    errors = schema.errors({**good, **broken})

    assert [line for line in errors if not line.startswith("broken-")] == []
    missed = [
        spoil.__name__ for number, spoil in enumerate(BREAKS) if not any(f"broken-{number}." in e for e in errors)
    ]
    assert missed == []


@pytest.mark.matrix
def test_an_empty_dashboard_is_no_dashboard(schema: GrafanaSchema) -> None:
    """What is missing is an error too, not only what is wrong."""
    errors = schema.errors({"nothing": {"panels": []}})

    assert len(errors) == 1
    assert "is not assignable to type 'Board'" in errors[0]
