# SPDX-License-Identifier: Apache-2.0
"""What a PromQL expression asks for."""

import pytest

from megascale_ops.grafana import promql
from megascale_ops.grafana.promql import Selector


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("up", ["up"]),
        ("sum(rate(a_total[5m]))", ["a_total"]),
        ("sum by (job, node) (a) / on (node) group_left (uuid) b", ["a", "b"]),
        ('topk by(rank)(3, a{job="x"}) or vector(0)', ["a"]),
        ("sum without (instance) (rate(a[$__rate_interval])) > bool 1e3", ["a"]),
        ("job:a:median offset 5m", ["job:a:median"]),
        ("max_over_time((a > 1)[1h:15s])", ["a"]),
        ("count(a) by (node) unless b", ["a", "b"]),
        ("a and on() b # c", ["a", "b"]),
        ('label_replace(a, "node", "$1", "instance", "(.*):.*")', ["a"]),
        ('{__name__="a_b", job="x"}', ["a_b"]),
        ('count({__name__=~"a_.*"})', []),
        ("topk($top, ${metric:raw})", []),
        ("a == inf or a != NaN or a @ end()", ["a", "a", "a"]),
        ("", []),
        ("a{", ["a"]),
        ("a[5m", ["a"]),
    ],
)
def test_names_of_series_are_told_from_everything_else(expression: str, names: list[str]) -> None:
    """Functions, keywords, labels in lists, numbers, texts and comments are no series."""
    assert [one.name for one in promql.selectors(expression)] == names


def test_labels_of_a_selector_are_those_that_it_matches() -> None:
    """Text in a matcher is no label, even when it looks like one."""
    found = promql.selectors('a{job=~"$job",rank!="1, node=2"} * b{le="+Inf"}')

    assert found == [Selector("a", ("job", "rank")), Selector("b", ("le",))]


@pytest.mark.parametrize(
    ("expression", "asked"),
    [
        ('a{job="$job"}', 'a{job=~".*"}'),
        ('a{job!~"${job:regex}"}', 'a{job!=" "}'),
        ('a{job="fixed"}[$__rate_interval]', 'a{job="fixed"}[1m]'),
        ("topk($top, a)", "topk(5, a)"),
        ('a{node="[[node]]-x"}', 'a{node=~".*"}'),
        ('label_replace(a, "x", "$1", "y", "(.*)")', 'label_replace(a, "x", "$1", "y", "(.*)")'),
    ],
)
def test_variables_are_filled_so_that_everything_is_selected(expression: str, asked: str) -> None:
    """What Prometheus is asked has no variable left, and selects what any choice in Grafana would."""
    assert promql.filled(expression, {"__rate_interval": "1m"}) == asked
