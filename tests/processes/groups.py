# SPDX-License-Identifier: Apache-2.0
"""Files of tests that one worker holds, and files that are begun with.

A group of files shares what the machine has once, or what is dear to make. Of Slurm's clusters each begins with job 1
on the nodes n1 and n2, and the port of a job's controller follows from that.

pytest-xdist's own groups (``--dist loadgroup``) keep nobody together with pytest 9.2: the plugin writes a group into
``_nodeid``, which is no longer read. Workers then waited for each other's locks, and each made the fixtures anew
(kernels for four ranks, a C library under three sanitizers). The scheduler knows nothing of a test but its node ID, so
groups are of files.

A test that waits for most of a minute is begun with: at the end all other workers would wait for it.
"""

from collections.abc import Mapping

from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

GROUPS: Mapping[str, str] = {
    "tests/processes/test_attention_cpu.py": "attention",
    "tests/processes/test_chaos.py": "chaos",
    "tests/processes/test_checkpoint_behind.py": "saves in the background",
    "tests/processes/test_checkpoint_behind_replicas.py": "replicas in the background",
    "tests/processes/test_checkpoint_examples.py": "examples",
    "tests/processes/test_checkpoint_loading.py": "ranks that load",
    "tests/processes/test_checkpoint_meshes.py": "ranks of a mesh",
    "tests/processes/test_checkpoint_modes.py": "torch in the worker",
    "tests/processes/test_checkpoint_prune.py": "torch in the worker",
    "tests/processes/test_checkpoint_ranks.py": "ranks that save",
    "tests/processes/test_checkpoint_replicas.py": "replicas",
    "tests/processes/test_checkpoint_s3.py": "a bucket",
    "tests/processes/test_checkpoint_tiers.py": "ranks that are nodes",
    "tests/processes/test_dashboards.py": "dashboards",
    "tests/processes/test_dashboard_schema.py": "grafana schema",
    "tests/processes/test_foreign_users.py": "users",
    "tests/processes/test_kernels_bench.py": "torch in the worker",
    "tests/processes/test_installed.py": "an installation",
    "tests/processes/test_kernels_cpu.py": "kernels",
    "tests/processes/test_kubernetes_server.py": "Kubernetes",
    "tests/processes/test_moe_cpu.py": "layers of experts",
    "tests/processes/test_moe_family.py": "schedules of experts",
    "tests/processes/test_moe_gpt_bench.py": "torch in the worker",
    "tests/processes/test_nccl_drawn.py": "NCCL's profiler",
    "tests/processes/test_nccl_profiler.py": "NCCL's profiler",
    "tests/processes/test_nccl_thinning.py": "NCCL's thinning",
    "tests/processes/test_page.py": "page",
    "tests/processes/test_page_views.py": "views of the page",
    "tests/processes/test_shared_memory.py": "users",
    "tests/processes/test_slurm.py": "Slurm",
    "tests/processes/test_slurm_accounting.py": "Slurm",
    "tests/processes/test_slurm_faults.py": "Slurm",
    "tests/processes/test_slurm_guide.py": "Slurm",
    "tests/processes/test_slurm_nodes.py": "Slurm",
    "tests/processes/test_slurm_requeue.py": "Slurm",
    "tests/processes/test_slurm_shared_node.py": "Slurm",
    "tests/processes/test_slurm_step.py": "Slurm",
    "tests/processes/test_slurm_submit.py": "Slurm",
    "tests/processes/test_stranger.py": "users",
}
# Those with a test, or tests of one group in a row, of 10 s and more while eight run at a time: the longest first.
FIRST = tuple(
    f"tests/processes/test_{name}.py"
    for name in (
        "slurm_requeue", "checkpoint_s3", "nccl_thinning", "shared_memory", "installed", "prometheus", "dashboards",
        "two_controllers", "cli_programs", "two_machines", "alert_gaps", "wrapped_launchers", "legitimate_waits",
        "partitions", "moe_cpu", "debugger_session", "chaos", "silent_endings", "page_views", "nccl_profiler",
        "asleep_in_backward", "launches", "dashboard_schema", "checkpoint_sums", "eviction", "page",
        "checkpoint_campaign", "alert_rules", "negative_controls", "ski_rental", "hosts", "diagnose",
        "recorder_scripts", "attention_cpu", "kubernetes_server", "checkpoint_tiers", "recorder_bystanders",
        "blackbox_kill", "checkpoint_meshes", "checkpoint_behind", "kernels_cpu", "checkpoint_replicas",
        "checkpoint_behind_crash", "checkpoint_prune", "kernels_bench", "checkpoint_loading", "checkpoint_ranks",
        "agent_hardware", "controller_abuse", "stacks_wake_nobody", "told_in_the_terminal", "stepped_clocks",
        "agent_logs", "recordings", "checkpoint_crash", "moe_gpt_bench", "leader_cut_off", "console", "journal_server",
        "coded_examples", "engine_eviction", "own_parts", "frameworks", "next_steps", "run_has_agent", "recovery",
        "own_faults", "checkpoint_adapters",
    )
)  # fmt: skip


class ByGroup(LoadScopeScheduling):
    """Hands each group to one worker, and all other tests out one by one."""

    def __init__(self, config: object, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self.log = Producer("bygroup") if log is None else log.bygroup

    def _split_scope(self, nodeid: str) -> str:
        """Return the name of the unit of work that a test belongs to."""
        return GROUPS.get(nodeid.partition("::")[0], nodeid)


def place(nodeid: str) -> int:
    """Return where a test stands in the order of handing out; those without a place of their own come last."""
    path = nodeid.partition("::")[0]
    return FIRST.index(path) if path in FIRST else len(FIRST)
