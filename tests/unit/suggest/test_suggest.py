# SPDX-License-Identifier: Apache-2.0
"""The nearest name, and the sentence that carries it."""

import pytest

from megascale_ops.suggest import nearest, unknown

OPTIONS = ["--nproc-per-node", "--nnodes", "--node-name", "--watch", "--job"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--nnode", "--nnodes"),
        ("--nproc_per_node", "--nproc-per-node"),
        ("--WATCH", "--watch"),
        ("--nproc", "--nproc-per-node"),
        ("--nprok", "--nproc-per-node"),
        ("--jbo", "--job"),
        ("--zzzzzz", None),
        ("", None),
    ],
)
def test_nearest_name(given: str, meant: str | None) -> None:
    """Typing errors, underscores, capitals and beginnings are recognised; nonsense gets no guess."""
    assert nearest(given, OPTIONS) == meant


def test_no_known_names_no_guess() -> None:
    """An empty vocabulary gives the plain sentence."""
    assert unknown("key", "x", []) == "unknown key 'x'"


def test_what_a_stranger_sent_is_cut_and_no_text_is_no_name() -> None:
    """A message may name a class of fault by a page, or by a number; neither fills a screen or takes a second."""
    said = unknown("action", "warn" * 100_000, ["warn", "stop"])

    assert len(said) < 150
    assert unknown("action", 7, ["warn"]) == "unknown action 7"


def test_names_that_all_begin_alike_want_more_in_common() -> None:
    """``alike`` says how much."""
    known = ["megascale_job_step", "megascale_node_up"]

    assert nearest("megascale_disk_free", known) is not None
    assert nearest("megascale_disk_free", known, alike=0.8) is None
    assert nearest("megascale_job_stepp", known, alike=0.8) == "megascale_job_step"
