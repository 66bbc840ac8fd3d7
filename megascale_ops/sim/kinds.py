# SPDX-License-Identifier: Apache-2.0
"""The kinds of fault that are injected: what each does, and which verdict about it is right."""

from typing import NamedTuple

# A rank of which others wait in a collective: which of these a judge says follows from how its process looks, and from
# whether it stands still while it loads data or saves.
_HANGS = frozenset({"silent", "not_joined", "sleeping", "stuck", "data_stall", "storage_stall"})


class Kind(NamedTuple):
    """One kind. ``classes``: of ``schema.fault_classes``, the right ones; ``blames``: rank, node, job, or none."""

    name: str
    classes: frozenset[str]
    blames: str
    what: str


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("gpu_error", frozenset({"cuda_error"}), "rank", "a GPU's error ends its rank, an Xid is in the log"),
        Kind("segfault", frozenset({"segfault"}), "rank", "a rank dies of a memory fault"),
        Kind("killed", frozenset({"killed", "out_of_memory"}), "rank", "a rank is killed, as for memory"),
        Kind("exception", frozenset({"exception"}), "rank", "an exception ends a rank"),
        Kind("exception_everywhere", frozenset({"exception_everywhere"}), "job", "the same exception ends all ranks"),
        Kind(
            "nan", frozenset({"exception_everywhere", "loss_nan"}), "job", "the loss is no number, the script gives up"
        ),
        Kind("network_error", frozenset({"nccl_error"}), "rank", "NCCL of a rank gives up on the network"),
        Kind("host_lost", frozenset({"node_lost"}), "node", "a host dies without a word"),
        Kind("hang", _HANGS, "rank", "a rank sleeps where it is, all others wait for it in collectives"),
        Kind("gpu_hang", frozenset({"gpu_stuck"}), "rank", "a GPU ends nothing any more, its host waits as all do"),
        Kind("network_hang", frozenset({"silent"}), "none", "a collective that all of a group are in does not end"),
        Kind("slow", frozenset({"straggler"}), "rank", "a rank's own work takes longer"),
    )
}
