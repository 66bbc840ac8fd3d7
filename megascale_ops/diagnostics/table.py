# SPDX-License-Identifier: Apache-2.0
"""The checks, in the order in which their results are shown; a new one is a file and a line here."""

from functools import cache
from importlib import import_module
from typing import cast

from megascale_ops.diagnostics.check import CheckModule

CHECKS = (
    "host.cpu",
    "host.memory",
    "host.numa",
    "host.disk",
    "host.file_systems",
    "host.swap",
    "host.clock",
    "host.limits",
    "host.kernel_log",
    "host.rdma",
    "gpu.health",
    "gpu.fabric_manager",
    "gpu.gemm",
    "gpu.agreement",
    "gpu.hbm",
    "gpu.hbm_pattern",
    "gpu.pcie",
    "gpu.nvlink",
    "gpu.nccl",
)
# Which checks can be made is known from it: it needs no GPU, and says whether there are any.
INVENTORY = "gpu_health"


@cache
def modules() -> dict[str, tuple[str, CheckModule]]:
    """Return each check's module by the check's name, with the module's own name; none of them loads torch."""
    found = {}
    for line in CHECKS:
        name = f"megascale_ops.diagnostics.{line}"
        module = cast("CheckModule", import_module(name))
        found[module.CHECK.name] = (name, module)
    return found
