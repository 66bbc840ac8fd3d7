# SPDX-License-Identifier: Apache-2.0
"""Files of tests that share what the machine has once, or what is dear to make: one worker holds all of a group.

pytest-xdist's own groups (``--dist loadgroup``) keep nobody together with pytest 9.2: the plugin writes a group into
``_nodeid``, which is no longer read. Workers then waited for each other's locks, and each made the fixtures anew
(kernels for four ranks, a C library under three sanitizers). The scheduler knows nothing of a test but its node ID, so
groups are of files.
"""

from collections.abc import Mapping

from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

GROUPS: Mapping[str, str] = {
    "tests/processes/test_chaos.py": "chaos",
    "tests/processes/test_dashboard_schema.py": "grafana schema",
    "tests/processes/test_foreign_users.py": "users",
    "tests/processes/test_kernels_cpu.py": "kernels",
    "tests/processes/test_nccl_drawn.py": "NCCL's profiler",
    "tests/processes/test_nccl_profiler.py": "NCCL's profiler",
    "tests/processes/test_nccl_thinning.py": "NCCL's thinning",
    "tests/processes/test_partitions.py": "networks",
    "tests/processes/test_shared_memory.py": "users",
    "tests/processes/test_slow_links.py": "networks",
    "tests/processes/test_stranger.py": "users",
}


class ByGroup(LoadScopeScheduling):
    """Hands each group to one worker, and all other tests out one by one."""

    def __init__(self, config: object, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self.log = Producer("bygroup") if log is None else log.bygroup

    def _split_scope(self, nodeid: str) -> str:
        """Return the name of the unit of work that a test belongs to."""
        return GROUPS.get(nodeid.partition("::")[0], nodeid)
