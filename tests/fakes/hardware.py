# SPDX-License-Identifier: Apache-2.0
"""A node's hardware as files: GPUs for the stand-in of ``pynvml``, adapters below /sys, a kernel log, a /proc.

    machine = FakeMachine(folder)                  # 8 GPUs, 2 adapters
    agent = Popen([..., "agent", *machine.options()], env={**os.environ, **machine.environment()})
    machine.gpu(3, temperature=91, fields={"270": 4_000_000_000})
    machine.xid(3, 79, "GPU has fallen off the bus")

Everything may be changed while an agent looks at it; files are written beside and renamed.
"""

import importlib.util
import itertools
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.fakes.node import before_others

NVML_TREE = Path(__file__).parent / "nvml_tree"

_COUNTERS = (
    "symbol_error", "link_error_recovery", "port_rcv_errors", "port_rcv_remote_physical_errors", "port_xmit_discards",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors", "link_downed", "port_rcv_data", "port_xmit_data",
)  # fmt: skip
_HW_COUNTERS = (
    "np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets", "out_of_sequence", "local_ack_timeout_err",
    "roce_adp_retrans", "packet_seq_err", "out_of_buffer", "rnr_nak_retry_err", "req_transport_retries_exceeded",
    "rx_icrc_encapsulated",
)  # fmt: skip


class FakeMachine:
    """One node's hardware below ``folder``."""

    def __init__(self, folder: Path, *, gpus: int = 8, adapters: int = 2) -> None:
        self.sys = folder / "sys"
        self.proc = folder / "proc"
        self.kernel_log = folder / "kmsg"
        self.nvml = folder / "gpus.json"
        self._state: dict[str, Any] = {
            "gpus": [{"uuid": uuid_of(index), "bus": f"00000000:{0x18 + index:02X}:00.0"} for index in range(gpus)]
        }
        self._seq = itertools.count(1)
        folder.mkdir(parents=True, exist_ok=True)
        self._write_gpus()
        self.kernel_log.write_bytes(b"")
        for index in range(adapters):
            self.port(f"mlx5_{index}")
        self.pressure()
        self.process(1, "init", "S")
        boot = self.proc / "sys" / "kernel" / "random"
        boot.mkdir(parents=True)
        (boot / "boot_id").write_text("11111111-2222-3333-4444-555555555555\n")

    def options(self) -> list[str]:
        """Return what to tell ``megascale-ops agent``."""
        return ["--sys-root", str(self.sys), "--proc-root", str(self.proc), "--kernel-log", str(self.kernel_log)]

    def environment(self) -> dict[str, str]:
        """Return what the agent's environment needs for the GPUs."""
        return {"PYTHONPATH": before_others(NVML_TREE), "MEGASCALE_FAKE_NVML": str(self.nvml)}

    def gpu(self, index: int, **changes: Any) -> None:  # noqa: ANN401  whatever the stand-in supports
        """Change a GPU; the names are those of ``HEALTHY`` in the stand-in."""
        self._state["gpus"][index] |= changes
        self._write_gpus()

    def driver(self, *, hang_s: float = 0.0, error: int = 0, deaf: bool = False) -> None:
        """Let the driver hang, fail, or tell of no events from now on."""
        self._state |= {"hang_s": hang_s, "error": error, "deaf": deaf}
        self._write_gpus()

    def xid(self, index: int, number: int, text: str = "") -> None:
        """Let the driver write an Xid into the kernel's log."""
        self.log(f"NVRM: Xid (PCI:0000:{0x18 + index:02x}:00): {number}, pid=4242, name=python, {text}")

    def log(self, text: str, mono_s: float | None = None) -> None:
        """Write one line into the kernel's log, of now or of another moment."""
        now_us = time.monotonic_ns() // 1000 if mono_s is None else int(mono_s * 1e6)
        with self.kernel_log.open("ab") as file:
            file.write(f"4,{next(self._seq)},{now_us},-;{text}\n".encode())

    def port(self, device: str, *, state: str = "4: ACTIVE", **counters: int) -> None:
        """Make an adapter's only port, or change it."""
        at = self.sys / "class" / "infiniband" / device / "ports" / "1"
        values = {"state": state, "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
        values["phys_state"] = "5: LinkUp" if "ACTIVE" in state else "2: Polling"
        values |= {f"counters/{name}": str(counters.get(name, 0)) for name in _COUNTERS}
        values |= {f"hw_counters/{name}": str(counters.get(name, 0)) for name in _HW_COUNTERS}
        for name, value in values.items():
            _write(at / name, f"{value}\n")

    def pressure(self, *, memory: float = 0.0, oom_kills: int = 0) -> None:
        """Set the pressure in percent and the number of kills."""
        for name, percent in (("memory", memory), ("io", 1.5), ("cpu", 20.0)):
            _write(self.proc / "pressure" / name, f"some avg10={percent:.2f} avg60=0.00 avg300=0.00 total=1\n")
        _write(self.proc / "vmstat", f"nr_free_pages 1\noom_kill {oom_kills}\npgmajfault 3\n")

    def process(self, pid: int, name: str, state: str) -> None:
        """Make a process, or change its state."""
        fields = " ".join(["0"] * 18 + [str(1000 + pid)] + ["0"] * 30)
        _write(self.proc / str(pid) / "stat", f"{pid} ({name}) {state} {fields}\n")

    def _write_gpus(self) -> None:
        _write(self.nvml, json.dumps(self._state))


def load_pynvml() -> ModuleType:
    """Return the stand-in of ``pynvml`` as a module, for tests that run the collector in their own process."""
    spec = importlib.util.spec_from_file_location("pynvml", NVML_TREE / "pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def uuid_of(index: int) -> str:
    """Return the UUID of a GPU of this machine."""
    return f"GPU-{index:08d}-aaaa-bbbb-cccc-000000000000"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
