# SPDX-License-Identifier: Apache-2.0
"""The nearest name, and the sentence that carries it."""

import pytest

from megascale_ops.cli.terminal.suggest import nearest, unknown

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
