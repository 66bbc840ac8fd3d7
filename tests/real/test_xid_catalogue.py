# SPDX-License-Identifier: Apache-2.0
"""Our decision on every Xid and every NVLink 5 sub-code, held against NVIDIA's whole catalogue (xid_catalogue/)."""

import csv
from collections.abc import Callable
from typing import Any

import pytest
from megascale_agents.collectors.nvlink_xids import advice_of
from megascale_agents.collectors.xid_table import XIDS, meaning_of

from tests.real.cases import HERE

# What the catalogue's immediate actions are with us; the work flows have a decision of ours each, below.
ACTIONS = {
    "IGNORE": "none",
    "RESTART_APP": "restart_app",
    "RESET_GPU": "reset_gpu",
    "RESTART_BM": "restart_node",
    "RESTART_VM": "restart_node",
    "CHECK_MECHANICALS": "check_hardware",
    "UPDATE_SWFW": "update_software",
    "CONTACT_SUPPORT": "contact_support",
    "WORKFLOW_NVLINK5_ERR": "follow_driver",
    "XID_154": "follow_driver",
    # Without a 154 beside it the process is started again.
    "XID_154_EVAL": "restart_app",
}
# Number -> our action; the reason stands beside its row in xid_table.py.
OURS = (
    {45: "restart_app", 48: "reset_gpu", 74: "check_nvlink", 109: "restart_app", 159: "reset_gpu"}
    | dict.fromkeys((162, 163, 164, 165, 171, 172), "none")
    | dict.fromkeys((166, 167, 168, 169, 170), "contact_support")
)


def table(name: str) -> list[dict[str, str]]:
    """Rows of a file of the catalogue, by their columns' names."""
    with (HERE / "xid_catalogue" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


CATALOGUE, DECODE = table("xids.csv"), table("nvlink5.csv")


def line_of(row: dict[str, str], version: str, severity: str) -> str:
    """The line that a driver before (v1) or since 575 (v2) writes for a row; free bits of a mask are zero."""
    unit = row["unit"].split("/")[0 if version == "v1" else -1]
    info = int(row[f"intrinfo_{version}"].replace("-", "0"), 2)
    return f"{unit} {severity} XC0 i0 Link 08 ({info:#010x} {int(row['error_status'], 16):#010x} 0x00000000 0x0)"


def test_the_catalogue_is_whole() -> None:
    """A row that was lost on the way would be right for ever."""
    assert [int(row["number"]) for row in CATALOGUE] == list(range(1, 173))
    assert len(DECODE) == 94
    assert {int(row["xid"]) for row in DECODE} == set(range(144, 151))


@pytest.mark.parametrize("row", CATALOGUE, ids=lambda row: f"{row['number']}-{row['mnemonic']}")
def test_every_row_is_followed_or_decided(row: dict[str, str]) -> None:
    """An action of the catalogue is ours too, unless the row is one of those that we decided ourselves."""
    number = int(row["number"])
    ours = XIDS[number]

    assert ours.action == OURS.get(number, ACTIONS.get(row["immediate"], ""))
    assert (ours.source == "ours") == (number in OURS)


def test_we_have_no_rows_of_our_own() -> None:
    """What the catalogue does not list is not known, and goes to a person."""
    assert set(XIDS) == {int(row["number"]) for row in CATALOGUE}
    assert (meaning_of(999).action, meaning_of(0).action) == ("contact_support", "contact_support")


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(
    "row", DECODE, ids=lambda row: f"{row['xid']}-{row['unit']}-{row['intrinfo_v2'][6:12]}-{row['error_status']}"
)
def test_every_sub_code_of_nvlink_5_is_decoded(row: dict[str, str], version: str) -> None:
    """By the words of the line: drivers of both ages, and what the catalogue asks for at once."""
    severity = "Nonfatal" if row["severity"] == "Non-fatal" else "Fatal"

    advice = advice_of(int(row["xid"]), line_of(row, version, severity))

    assert advice is not None
    assert advice.action == ACTIONS[row["immediate"]]
    assert row["unit"].split("/")[0 if version == "v1" else -1] in advice.text or "NVLink 8 went down" in advice.text


@pytest.mark.parametrize("raise_bit", [lambda info: info | 0x80, lambda info: info | 0x400], ids=["v2", "v1"])
def test_a_receivers_error_that_was_raised_asks_for_a_reset(raise_bit: Callable[[int], int], request: Any) -> None:  # noqa: ANN401
    """The catalogue's second action for RLW_RXPIPE, by a bit of IntrInfo."""
    version = request.node.callspec.id
    rows = [row for row in DECODE if row["promoted"]]

    for row in rows:
        info = int(row[f"intrinfo_{version}"].replace("-", "0"), 2)
        said = f"RLW_RXPIPE Nonfatal XC0 i0 Link 03 ({raise_bit(info):#010x} {row['error_status']} 0x0)"
        advice = advice_of(145, said)

        assert advice is not None
        assert advice.action == ACTIONS[row["promoted"]]
    assert len(rows) == 3


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "reset_gpu"),
        ("GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)", "reset_gpu"),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", "restart_node"),
        ("GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", "restart_app"),
        ("GPU recovery action changed from 0x3 (Drain P2P) to 0x4 (Drain and Reset)", "reset_gpu"),
        ("GPU recovery action changed from 0x4 (Drain and Reset) to 0x0 (None)", "none"),
        ("GPU recovery action changed from 0x0 (None) to 0x6 (something new)", "reset_gpu"),
        ("GPU recovery action changed from 0x0 (None) to 0x99 (something new)", "contact_support"),
    ],
)
def test_the_driver_itself_says_what_154_asks_for(said: str, action: str) -> None:
    """By its words, else by its number; what neither tells goes to a person."""
    advice = advice_of(154, said)

    assert advice is not None
    assert advice.action == action


@pytest.mark.parametrize(
    ("registers", "action"),
    [
        ("0x1, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "none"),
        ("0x40800001, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "none"),
        ("0x0, 0x0, 0x0, 0x0, 0x00100000, 0x0, 0x0", "none"),
        ("0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", ""),
        ("0x1, 0x0, 0x0, 0x10000, 0x0, 0x0, 0x0", ""),
        ("0x1, 0x0, 0x4, 0x0, 0x0, 0x0, 0x0", ""),
        ("0x0, 0x0, 0x0, 0x0, 0x00140000, 0x0, 0x0", ""),
        ("0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", ""),
    ],
)
def test_registers_of_74_that_may_be_ignored(registers: str, action: str) -> None:
    """By the catalogue's work flow; all others, and a line without them, are a check of the links as the row says."""
    advice = advice_of(74, f"NVLink: fatal error detected on link 2({registers})")

    assert (advice.action if advice is not None else "") == action
    assert XIDS[74].action == "check_nvlink"


@pytest.mark.parametrize("said", ["", "GPU recovery action", "RLW_RXPIPE", "Nonfatal", "(0x1 0x2)", "\x00" * 999])
def test_a_line_that_can_not_be_read_advises_nothing(said: str) -> None:
    """The table's row stands then: the driver is asked."""
    assert advice_of(154, said) is None
    assert advice_of(145, said) is None
    assert advice_of(31, "RLW_CTRL Fatal XC0 i0 Link 05 (0x1 0x2)") is None
