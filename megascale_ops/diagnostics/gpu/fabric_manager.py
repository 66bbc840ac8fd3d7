# SPDX-License-Identifier: Apache-2.0
"""Whether the fabric manager lives where NVSwitches need it, and whether each GPU has joined the fabric.

Without it GPUs of a machine with NVSwitches fail at their first CUDA call, or communicate through the host.
"""

import contextlib
import ctypes
from pathlib import Path

import psutil

from megascale_ops.diagnostics.check import Check, Reading, Task, UnmeasuredError
from megascale_ops.diagnostics.report import CheckFinding, Fact

CHECK = Check("fabric_manager", "the fabric manager", ("gpu",), quick_s=5.0, full_s=10.0)

_PROCESS = "nv-fabricmanager"
# 15 characters are all that the kernel keeps of a name.
_KEPT = 15
_DEVICES = "nvidia-nvswitch[0-9]*"
# nvmlGpuFabricState_t.
_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}


def measure(task: Task) -> Reading:
    """Look for switches, the process, and each GPU's state.

    Raises:
        UnmeasuredError: there is neither a switch nor a fabric here.
    """
    del task
    states = _states()
    switches = len(list(Path("/dev").glob(_DEVICES)))
    if not switches and not states:
        raise UnmeasuredError("no NVSwitch on this node, so no fabric manager is needed")
    facts = [Fact("fabric_state", gpu, state, peers="GPU") for gpu, state in states.items()]
    if switches:
        names = (one.info["name"] or "" for one in psutil.process_iter(["name"]))
        lives = any(name[:_KEPT] == _PROCESS[:_KEPT] for name in names)
        facts.append(Fact("fabric_manager", "node", "lives" if lives else "not seen"))
    return Reading((), tuple(facts))


def _states() -> dict[str, str]:
    """Return the state of each GPU in the fabric; GPUs without one are left out."""
    found = {}
    with contextlib.suppress(Exception):  # NVML's own kinds; a library that does not know the question
        import pynvml

        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            info = pynvml.c_nvmlGpuFabricInfoV_t()
            info.version = pynvml.nvmlGpuFabricInfo_v2
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
                if info.state:
                    found[f"GPU {index}"] = _STATES.get(info.state, str(info.state))
    return found


def judge(reading: Reading) -> list[CheckFinding]:
    """Find GPUs outside the fabric. In a container the manager's process can't be seen: the states decide."""
    states = reading.texts("fabric_state")
    out = [gpu for gpu, state in states.items() if state != "completed"]
    following = "systemctl status nvidia-fabricmanager; its version has to be the driver's; then restart it"
    if out:
        text = f"{', '.join(out)}: registration with the fabric is {states[out[0]]}, so NVLink is not used"
        return [CheckFinding("bad", out[0], text, following)]
    if not states and reading.texts("fabric_manager").get("node") == "not seen":
        text = "there are NVSwitches, and no fabric manager is seen (in a container it may run on the host)"
        return [CheckFinding("warn", "node", text, following)]
    return []
