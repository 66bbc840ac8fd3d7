# SPDX-License-Identifier: Apache-2.0
"""Which configuration a MoE layer runs with, the same on every rank (COMET's profile, 2502.19811, section 3.3).

As `choosing.py` does it for matrix products: what `tune_moe` measured in this process, then what an earlier tuning left
in `moe_choices.json`, then the model of `moe/assignment.py`. Rank 0 reads the file once for each workspace and hands
it out, with the name of its GPU; everything after that is a pure function of what was handed out and of the sizes that
ranks share, never of a routing or of one rank's number of tokens.
"""

import json
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from megascale_kernels.autotune import store
from megascale_kernels.autotune.choosing import describe
from megascale_kernels.autotune.handout import DEADLINE_S, from_rank_zero, least_of_ranks
from megascale_kernels.moe import sync_free
from megascale_kernels.moe.assignment import MOST_WAYS, by_model, flags_of, likely_ways, may_be_serial
from megascale_kernels.moe.moe_config import MoeConfig

if TYPE_CHECKING:
    from megascale_kernels.memory.workspace import Workspace
    from megascale_kernels.moe.tables import Sizes

FILE = "moe_choices.json"


class MoeTable:
    """What one workspace's ranks have agreed on.

    Attributes:
        environment: its name, for writing.
        tuned: what was measured, by `moe_key`; None is the serial path.
    """

    def __init__(self, environment: str, tuned: dict[str, MoeConfig | None]) -> None:
        self.environment, self.tuned = environment, tuned

    def learn(self, sizes: "Sizes", config: MoeConfig | None) -> None:
        """Take over what a tuning has found; every rank must."""
        self.tuned[moe_key(sizes)] = config


_tables: "WeakKeyDictionary[Workspace, MoeTable]" = WeakKeyDictionary()


def moe_key(sizes: "Sizes") -> str:
    """The name of a layer: its sizes, tokens of all ranks by buckets, and shards where experts are cut."""
    tokens = store.bucket(sizes.world_size * sizes.pitch)
    cut = f" s{sizes.shards}" if sizes.shards > 1 else ""
    return f"moe t{tokens} k{sizes.top_k} e{sizes.experts} h{sizes.hidden} i{sizes.inner}{cut}"


def read_moe_config(raw: dict[str, Any]) -> MoeConfig:
    """A configuration from what `MoeConfig._asdict` gave.

    Raises:
        ValueError: a field is missing, unknown, of another type, or the kernels cannot run with it.
    """
    defaults = MoeConfig()._asdict()
    if raw.keys() != defaults.keys():
        raise ValueError(f"fields {sorted(raw)} instead of {sorted(defaults)}")
    for name, kind in get_type_hints(MoeConfig).items():
        takes_truth = kind is bool or bool in get_args(kind)
        is_truth = isinstance(raw[name], bool) and not takes_truth  # to Python it is a number, here it is a slip
        known = raw[name] in get_args(kind) if "Literal" in str(get_origin(kind)) else isinstance(raw[name], kind)
        if is_truth or not known:
            raise ValueError(f"{name} is {raw[name]!r}")
    config = MoeConfig(**raw)
    config.check()
    if (config.lead_rows or 0) < 0 or config.stages < 1 or config.warps < 1:
        raise ValueError(f"lead_rows {config.lead_rows}, stages {config.stages} or warps {config.warps} is too small")
    return config


def open_moe_table(workspace: "Workspace") -> MoeTable:
    """The workspace's table; when it is new, rank 0 reads the file and hands it out.

    Raises:
        KernelError: rank 0 did not come to the first call.
    """
    table = _tables.get(workspace)
    if table is not None:
        return table
    said = ""
    if workspace.rank == 0:
        gpu, processors = describe(workspace.device)
        dtype = str(workspace.dtype).removeprefix("torch.")
        environment = store.environment_key(gpu, processors, workspace.world_size, dtype)
        entries = store.read_as(store.cache_file(FILE), environment, read_moe_config)
        configs = {key: entry.config and entry.config._asdict() for key, entry in entries.items()}
        said = json.dumps({"environment": environment, "configs": configs})
    heard = json.loads(
        from_rank_zero(workspace.group, workspace.rank, workspace.world_size, said, "choice of MoE kernels")
    )
    tuned = {key: config and read_moe_config(config) for key, config in heard["configs"].items()}
    table = _tables[workspace] = MoeTable(heard["environment"], tuned)
    return table


def choose_moe(sizes: "Sizes", workspace: "Workspace") -> MoeConfig | None:
    """The configuration to run with, equal on all ranks; None is the serial path, which only a tuning chooses.

    The first call on a workspace is collective: all ranks of its group make it, as they do by calling a layer.

    Args:
        sizes: of the layer, `pitch` the most tokens of any rank.
        workspace: whose ranks.

    Raises:
        KernelError: rank 0 did not come to the first call.
    """
    table, key = open_moe_table(workspace), moe_key(sizes)
    chosen = table.tuned[key] if key in table.tuned else by_model(sizes)
    return chosen if chosen is None or _fits(sizes, chosen, workspace) else MoeConfig().resolved(sizes)


def _fits(sizes: "Sizes", config: MoeConfig, workspace: "Workspace") -> bool:
    """Whether a workspace has the flags that a configuration takes; one may have been tuned with a larger one."""
    return flags_of(sizes, config) <= workspace.layout.channels


def moe_contenders(sizes: "Sizes", workspace: "Workspace", *, serial: bool = True) -> list[MoeConfig | None]:
    """The ways that may be best for a layer, what `choose_moe` gives first; only that where a tuning has found it.

    The serial path takes the place of the least likely way where the model gives our kernels no sure lead over it, it
    needs no wait of the host and a small share of the memory that is free on every rank: in other layers' contests it
    would be a turn lost, or a model's end. Where it could take part, the call is collective.

    Args:
        sizes: of the layer.
        workspace: whose ranks.
        serial: whether the caller may be served in series.

    Raises:
        KernelError: a rank did not come to the first call.
    """
    chosen = choose_moe(sizes, workspace)
    if moe_key(sizes) in open_moe_table(workspace).tuned:
        return [chosen]
    others = [way for way in likely_ways(sizes) if _fits(sizes, way, workspace)]
    ways: list[MoeConfig | None] = list(dict.fromkeys([chosen, *others]))[:MOST_WAYS]
    may_take_part = serial and may_be_serial(sizes) and not sync_free.why_not(sizes, workspace)
    if may_take_part and has_room_in_series(sizes, workspace):
        ways = [*ways[: MOST_WAYS - 1], None]
    return ways


def has_room_in_series(sizes: "Sizes", workspace: "Workspace", *, deadline_s: float = DEADLINE_S) -> bool:
    """Whether every rank has the memory for a try of the serial path; the same on all ranks. Collective, on the host.

    Args:
        sizes: of the layer.
        workspace: whose ranks.
        deadline_s: how long to wait for the others, seconds.

    Raises:
        KernelError: a rank did not come.
    """
    free = least_of_ranks(
        workspace.group, workspace.rank, workspace.world_size, sync_free.free_bytes(workspace.device),
        "free memory", deadline_s=deadline_s,
    )  # fmt: skip
    return sync_free.TRIED_SHARE * sync_free.bytes_of(sizes) <= free
