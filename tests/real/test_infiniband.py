# SPDX-License-Identifier: Apache-2.0
"""Adapters as real nodes have them: trees of /sys/class/infiniband that change between looks, and what is told of them.

``given.devices`` names adapters by their shape (below), ``given.looks`` what happens before each look: "gone" or "back"
for an adapter, "new SHAPE" for one that was not there, else a file's content by its path (port 1 is meant where none
is told). ``!refused`` is a file whose reading fails, by the kernel itself (a link to /proc/self/mem), ``!absent`` one
that is not there. ``right.looks`` has all findings of each look, and samples by name, device and, for some, kind;
``none`` names those that must not be there.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from megascale_agents.config import AgentConfig
from megascale_agents.hardware.hardware import Hardware
from megascale_agents.metrics.hardware import samples_of

from tests.real.cases import Case, rows

PMA = (
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors", "port_xmit_discards", "port_xmit_constraint_errors", "port_rcv_constraint_errors",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors", "VL15_dropped", "port_xmit_wait",
    "port_rcv_data", "port_xmit_data", "port_rcv_packets", "port_xmit_packets",
)  # fmt: skip
MLX5 = (
    "duplicate_request", "implied_nak_seq_err", "lifespan", "local_ack_timeout_err", "np_cnp_sent",
    "np_ecn_marked_roce_packets", "out_of_buffer", "out_of_sequence", "packet_seq_err", "req_cqe_error",
    "req_transport_retries_exceeded", "rnr_nak_retry_err", "roce_adp_retrans", "roce_slow_restart", "rp_cnp_handled",
    "rp_cnp_ignored", "rx_icrc_encapsulated", "rx_read_requests", "rx_write_requests",
)  # fmt: skip
EFA = (
    "lifespan", "rdma_read_bytes", "rdma_read_wr_err", "rdma_write_bytes", "recv_bytes", "rx_bytes", "rx_drops",
    "rx_pkts", "send_bytes", "tx_bytes", "tx_pkts", "retrans_bytes", "retrans_pkts", "retrans_timeout_events",
    "unresponsive_remote_events", "impaired_remote_conn_events",
)  # fmt: skip
HFI1 = ("DmaWait", "PktDrop", "RcTimeOut", "RxPkt", "SwLinkUp,32", "TxPkt", "lifespan")
BNXT = (
    "active_qps", "rx_pkts", "rx_bytes", "tx_pkts", "tx_bytes", "rx_roce_errors", "rx_roce_discards", "to_retransmits",
    "seq_err_naks_rcvd", "max_retry_exceeded", "rnr_naks_rcvd", "oos_drop_count", "rx_out_of_buffer",
)  # fmt: skip
IRDMA = (
    "ip4InDiscards",
    "ip6InDiscards",
    "tcpRetransSegs",
    "cnpHandled",
    "cnpSent",
    "RxECNMrkd",
    "ip4InOctets",
    "ip4OutOctets",
)


def shape(board: str, layer: str, rate: str, pma: tuple[str, ...], own: tuple[str, ...]) -> dict[str, str]:
    """Return an adapter's files: those of the adapter by their names, those of its port below ``ports/1``."""
    port = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": rate, "link_layer": layer}
    port |= {f"counters/{name}": "0" for name in pma} | {f"hw_counters/{name}": "0" for name in own}
    return ({"board_id": board} if board else {}) | {f"ports/1/{name}": text for name, text in port.items()}


SHAPES = {
    "ndr": shape("MT_0000000838", "InfiniBand", "400 Gb/sec (4X NDR)", PMA, MLX5),
    "hdr": shape("MT_0000000223", "InfiniBand", "200 Gb/sec (4X HDR)", PMA, MLX5),
    "roce400": shape("MT_0000000838", "Ethernet", "400 Gb/sec (4X NDR)", PMA, MLX5),
    "roce200": shape("MT_0000000884", "Ethernet", "200 Gb/sec (4X HDR)", PMA, MLX5),
    "roce25": shape("MT_0000000080", "Ethernet", "25 Gb/sec (1X EDR)", PMA, MLX5),
    "efa": shape("", "Unknown", "200 Gb/sec (4X HDR)", (), EFA),
    "bnxt_re": shape("", "Ethernet", "400 Gb/sec (4X NDR)", (), BNXT),
    "irdma": shape("", "Ethernet", "100 Gb/sec (4X EDR)", (), IRDMA),
    "hfi1": shape("Intel Omni-Path HFI 100 Series", "InfiniBand", "100 Gb/sec (4X EDR)", PMA, HFI1),
    "mlx4": shape("MT_1100120019", "InfiniBand", "56 Gb/sec (4X FDR)", PMA, ()),
}


def devices_of(given: dict[str, str]) -> dict[str, str]:
    """Return adapters by name; "mlx5_[0-7]" names eight."""
    found = {}
    for name, what in given.items():
        span = re.search(r"\[(\d+)-(\d+)\]", name)
        numbers = range(int(span[1]), int(span[2]) + 1) if span else [0]
        found |= {name.replace(span[0], str(number)) if span else name: what for number in numbers}
    return found


def write(path: Path, text: str) -> None:
    """Write a file as the kernel would show it, or let it be refused or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if text == "!refused":
        path.symlink_to("/proc/self/mem")
    elif text != "!absent":
        path.write_text(f"{text}\n", encoding="utf-8")


def happen(root: Path, devices: dict[str, str], changes: dict[str, Any]) -> None:
    """Change the tree before a look."""
    for name, text in changes.items():
        device, _, file = name.partition("/")
        if text.startswith("new "):
            shutil.rmtree(root / device, ignore_errors=True)
            devices[device] = text.removeprefix("new ")
            make(root, device, devices[device])
            continue
        for one in [device] if device in devices else [known for known in devices if re.fullmatch(device, known)]:
            if text == "gone":
                shutil.rmtree(root / one)
            elif text == "back":
                make(root, one, devices[one])
            else:
                is_own = file.startswith(("device/", "ports/")) or file == "node_guid"
                write(root / one / (file if is_own else f"ports/1/{file}"), text)


def make(root: Path, device: str, what: str) -> None:
    """Make an adapter."""
    for name, text in SHAPES[what].items():
        write(root / device / name, text)


@pytest.mark.parametrize("case", rows("infiniband"))
def test_a_tree_is_read_as_it_is_meant(case: Case, tmp_path: Path) -> None:
    """Findings of every look, word for word, and the samples that a scrape shows then."""
    devices = devices_of(case.given["devices"])
    root = tmp_path / "class" / "infiniband"
    for device, what in devices.items():
        make(root, device, what)
    exclude = case.given.get("exclude", "")
    config = AgentConfig(sys_root=str(tmp_path), proc_root=str(tmp_path), kernel_log="", fabric_exclude=exclude)
    hardware = Hardware(config, "n1", lambda _, error: pytest.fail(str(error)))
    fabric = next(check for watch, check in hardware._checks if watch is hardware.fabric)
    fabric.answered = True
    for before, right in zip(case.given["looks"], case.right["looks"], strict=True):
        happen(root, devices, {name: text for name, text in before.items() if name != "at_s"})

        found = hardware.fabric.ingest_reading(hardware.fabric.read(), before["at_s"])
        shown = {
            " ".join([name.removeprefix("megascale_ib_"), labels[1], *labels[3:]]): value
            for name, labels, value in samples_of(hardware, "n1")
            if name.startswith("megascale_ib_")
        }

        assert [f"{one.severity}: {one.text}" for one in found] == right["findings"]
        assert {name: shown.get(name) for name in right.get("samples", {})} == right.get("samples", {})
        assert not set(right.get("none", ())) & set(shown)
