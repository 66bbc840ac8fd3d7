# SPDX-License-Identifier: Apache-2.0
"""Two GPUs that are this host: their memory is the host's, and their work is done at once, by torch on the CPU.

For the paths of the checks that measure GPUs, of their order and their numbers; how fast anything is says nothing here.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megascale_ops.diagnostics.gpu import agreement, devices, gemm, hbm, hbm_pattern, nvlink, pcie
from megascale_ops.diagnostics.gpu.devices import Device

TWO = [Device(place, f"GPU {place}", "Host GPU", f"uuid-{place}") for place in range(2)]
SMALL = {
    gemm: {"_SIZE": 128, "_FLOP": 2 * 128**3, "_WARM_PRODUCTS": 2, "_QUICK_PRODUCTS": 3},
    agreement: {"_SIZE": 128, "_QUICK": 5},
    hbm: {"_BYTES": 1 << 16, "_QUICK_COPIES": 3},
    hbm_pattern: {"_PIECE_WORDS": 1 << 10, "_QUICK_BYTES": 1 << 16},
    pcie: {"_BYTES": 1 << 16},
    nvlink: {"_BYTES": 1 << 16},
}


class Mark:
    """An event: the time when it was recorded."""

    def record(self, _stream: object = None) -> None:
        """Take the time."""
        self.at_s = time.perf_counter()

    def elapsed_time(self, later: "Mark") -> float:
        """Return the milliseconds to a later one; never none."""
        return max(1e-3, (later.at_s - self.at_s) * 1e3)


class OnTheHost(TorchFunctionMode):
    """Make on the host what is asked for on a GPU; ``work`` is told of each call, and may change its result."""

    def __init__(self, work: Callable[[str, Any], None] = lambda _name, _result: None) -> None:
        super().__init__()
        self.work = work

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  torch's
        """Call what was called."""
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        result = func(*("cpu" if isinstance(one, str) and one.startswith("cuda") else one for one in args), **kwargs)
        self.work(getattr(func, "__name__", ""), result)
        return result


@contextlib.contextmanager
def two_host_gpus(work: Callable[[str, Any], None] = lambda _name, _result: None) -> Iterator[list[int]]:
    """Put two of them in place of CUDA's; yield the numbers of those that were chosen for work, in order."""
    chosen: list[int] = []

    @contextlib.contextmanager
    def device(place: int) -> Iterator[None]:
        chosen.append(place)
        yield

    with pytest.MonkeyPatch.context() as patch, OnTheHost(work):
        for module, values in SMALL.items():
            patch.setattr(module, "devices", lambda _needs=0: (TWO, []))
            for name, value in values.items():
                patch.setattr(module, name, value)
        for module in (devices, nvlink):
            patch.setattr(module, "clock_mark", Mark)
        patch.setattr(torch.cuda, "device", device)
        patch.setattr(torch.cuda, "synchronize", lambda _place=None: None)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch.cuda, "mem_get_info", lambda _place=None: (1 << 30, 1 << 30))
        patch.setattr(torch.cuda, "can_device_access_peer", lambda _one, _other: True)
        patch.setattr(torch.cuda, "Stream", lambda **_options: None)
        patch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        yield chosen
