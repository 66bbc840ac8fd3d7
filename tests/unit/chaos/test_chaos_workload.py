# SPDX-License-Identifier: Apache-2.0
"""A fault strikes the chosen rank once in the life of its folder; one that lasts goes on after a restart."""

import argparse
from pathlib import Path

import pytest

from megascale_ops.chaos.faults import MATRIX
from megascale_ops.chaos.misdeeds import MISDEEDS
from megascale_ops.chaos.workload import Fate


def fate(folder: Path, name: str, rank: int = 1, chosen: int = 1) -> Fate:
    """A rank's fate when ``chosen`` suffers ``name`` at step 10."""
    return Fate(argparse.Namespace(fault=name, rank=chosen, at=10, folder=folder), rank)


def test_a_fault_strikes_once_and_not_after_a_restart(tmp_path: Path) -> None:
    """The mark in the folder outlives the process, and says when."""
    first = fate(tmp_path, "gil_held")

    assert not first.strikes("gil_held", 9)
    assert first.strikes("gil_held", 10)
    assert not first.strikes("gil_held", 11)
    assert not fate(tmp_path, "gil_held").strikes("gil_held", 10)
    assert float((tmp_path / "marks" / "gil_held.1").read_text()) > 0


def test_a_fault_spares_everybody_else(tmp_path: Path) -> None:
    """Other ranks and other faults are not struck; -1 means all ranks."""
    assert not fate(tmp_path, "gil_held", rank=2).strikes("gil_held", 10)
    assert not fate(tmp_path, "gil_held").strikes("abort", 10)
    assert fate(tmp_path, "exception_all", rank=2, chosen=-1).strikes("exception_all", 10)
    assert fate(tmp_path, "exception_all", rank=3, chosen=-1).strikes("exception_all", 10)


def test_what_lasts_goes_on_after_a_restart(tmp_path: Path) -> None:
    """A slow rank is slow in every step from its first on."""
    assert not fate(tmp_path, "gc_storm").lasts("gc_storm", 9)
    assert fate(tmp_path, "gc_storm").lasts("gc_storm", 10)
    assert fate(tmp_path, "gc_storm").lasts("gc_storm", 11)


@pytest.mark.parametrize("name", [row.name for row in MATRIX if row.inside])
def test_the_workload_knows_every_inside_fault(name: str) -> None:
    """No row of the matrix asks a rank for what it can't suffer."""
    assert name in MISDEEDS or name in {"eval_declared", "eval_one_declared", "debugger_attached"}
