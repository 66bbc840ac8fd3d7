# SPDX-License-Identifier: Apache-2.0
"""A page holds what is added to it, by the table, whatever format it is asked for in."""

import math

import pytest
from megascale_agents.collectors.table import declared

from megascale_ops.distribution import Distribution
from megascale_ops.exposition import Page, encoded
from megascale_ops.schema.metrics import METRICS, Kind, Metric
from tests.fakes.scraped import OPEN_METRICS, open_samples, samples, values

LAG, TICK = "megascale_rank_arrival_lag_seconds", "megascale_controller_tick_seconds"
TEXT = "text/plain; version=0.0.4; charset=utf-8"


def told(page: Page) -> dict[tuple[str, ...], float]:
    """Return every sample of a page by name and the values of its labels."""
    return {(one.name, *values(one)): one.value for one in samples(encoded(page).body)}


def test_a_job_may_be_called_anything_that_is_a_name() -> None:
    """Its name breaks no line."""
    page = Page()
    page.add("megascale_job_step", [(('a"b\\c\nd',), math.inf)])

    assert told(page) == {("megascale_job_step", 'a"b\\c\nd'): math.inf}


def test_ranks_of_which_nothing_is_known_have_no_series() -> None:
    """Negative, infinite or no number; others are told to six digits, and the third label is every one's."""
    page = Page()
    page.by_rank(LAG, [("j", [0.5, math.nan, -1.0, math.inf, 0.12345678], "all"), ("k", [0.0], "all")])

    assert told(page) == {(LAG, "j", "0", "all"): 0.5, (LAG, "j", "4", "all"): 0.123457, (LAG, "k", "0", "all"): 0.0}


def test_buckets_count_all_that_is_below_them() -> None:
    """As Prometheus reads ``le``: a value that equals a bound is within it."""
    times = Distribution((0.1, 1.0))
    for value in (0.05, 0.1, 5.0):
        times.observe(value)
    page = Page()
    page.distributions(TICK, [((), times)])

    found = told(page)

    assert [found[f"{TICK}_bucket", bound] for bound in ("0.1", "1.0", "+Inf")] == [2, 2, 3]
    assert (found[f"{TICK}_count",], found[f"{TICK}_sum",]) == (3, pytest.approx(5.15))


def test_a_copy_counts_no_more() -> None:
    """What is written by a thread does not change while the loop measures on."""
    times = Distribution((1.0,))
    copy = times.copy()

    times.observe(0.5)

    assert (copy.below(), times.below()) == ([(1.0, 0), (math.inf, 0)], [(1.0, 1), (math.inf, 1)])


def test_a_family_without_series_is_left_out() -> None:
    """And one that is counted counts what is there, itself too."""
    page = Page(counted_by="megascale_controller_series")
    page.add("megascale_jobs", [])
    page.by_rank("megascale_rank_comm_wait_ratio", [("j", [-1.0], "")])
    page.add("megascale_job_step", [(("j",), 3.0), (("k",), 4.0)])

    text = encoded(page).body.decode()

    assert "megascale_jobs" not in text
    assert "megascale_rank_comm_wait_ratio" not in text
    assert text.endswith("megascale_controller_series 3.0\n")


def test_every_row_of_the_table_has_its_name_help_and_kind() -> None:
    """Prometheus shows what the table says, or the collector that declares it; the library adds no ending to a name."""
    page, table = Page(), (*METRICS.values(), *declared())
    for metric in table:
        if metric.kind is Kind.HISTOGRAM:
            page.distributions(metric.name, [(metric.labels, Distribution(metric.buckets))])
        else:
            page.add_family(metric, [(metric.labels, 1.0)])

    body, content_type = encoded(page)

    assert content_type == TEXT
    lines = body.decode().splitlines()
    for metric in table:
        kind = "gauge" if metric.kind is Kind.INFO else metric.kind
        assert f"# HELP {metric.name} {metric.help}" in lines
        assert f"# TYPE {metric.name} {kind}" in lines
    assert sum(line.startswith("# TYPE ") for line in lines) == len(table), "no _created, or the like"
    opened = encoded(page, OPEN_METRICS)
    assert opened.content_type.startswith("application/openmetrics-text; version=1.0.0;")
    assert opened.body.endswith(b"\n# EOF\n")
    assert b"\n# UNIT megascale_job_step_seconds seconds\n" in opened.body
    assert {(one.name, values(one)) for one in open_samples(opened.body)} == {
        (one.name, values(one)) for one in samples(body)
    }


@pytest.mark.parametrize("version", ["x", "0.0.1", "9" * 5000, "1.é", "", "-"])
def test_a_version_that_nobody_knows_gets_a_page(version: str) -> None:
    """Whatever stands in the header, there is a page."""
    page = Page()
    page.add("megascale_job_step", [(("j",), 3.0)])

    body, content_type = encoded(page, f"application/openmetrics-text;version={version}")

    assert content_type.isascii()
    assert b'\nmegascale_job_step{job="j"} 3.0\n' in body


def test_what_does_not_fit_the_table_is_said() -> None:
    """A label too few, a family twice, a unit that the name does not end in, a name that is not there: bugs of ours."""
    page = Page()
    page.add("megascale_job_step", [((), 3.0)])
    odd = Page()
    odd.add_family(Metric("megascale_thing", "", Kind.GAUGE, "seconds", "A thing."), [((), 1.0)])

    with pytest.raises(AssertionError, match="megascale_job_step"):
        encoded(page)
    with pytest.raises(AssertionError, match="added twice"):
        page.add("megascale_job_step", [])
    with pytest.raises(AssertionError, match="does not end in its unit"):
        encoded(odd)
    with pytest.raises(KeyError):
        page.add("megascale_nothing", [])
