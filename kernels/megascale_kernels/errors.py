# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, in sentences: every error names the rank, the place and what to do."""


class KernelError(RuntimeError):
    """Something that is not the caller's arguments: a peer, a device, a workspace that gave up."""


class TileTimeout(KernelError):
    """A wait inside a kernel passed its deadline, or a peer's did; the kernel returned and the CUDA context lives.

    Ranks are those of the workspace's group; where they are not the job's own numbers the message names the group.

    Attributes:
        rank: this rank.
        peer: the rank waited for; where another rank gave up first, the one that it had waited for.
        operator: the operator's name.
        epoch: number of the launch.
        cta: the CTA that waited.
        tile: the tile it had in hand.
        channel: the flag it waited for.
        needed: the stamp it needed.
        seen: the stamp it saw.
        peer_tile: last tile that the peer is known to have in hand, -1 when unknown.
    """

    def __init__(self, message: str, **facts: int | str) -> None:
        super().__init__(message)
        self.rank = int(facts.get("rank", -1))
        self.peer = int(facts.get("peer", -1))
        self.operator = str(facts.get("operator", ""))
        self.epoch = int(facts.get("epoch", -1))
        self.cta = int(facts.get("cta", -1))
        self.tile = int(facts.get("tile", -1))
        self.channel = int(facts.get("channel", -1))
        self.needed = int(facts.get("needed", -1))
        self.seen = int(facts.get("seen", -1))
        self.peer_tile = int(facts.get("peer_tile", -1))


class RankMismatch(KernelError):
    """A peer runs another operator, or the same one with other sizes."""


class WorkspaceTooSmall(ValueError):
    """The workspace was made for smaller tensors; the message names the size that is needed."""


class Unsupported(ValueError):
    """Tensors or a machine that the kernels cannot serve: the message gives the reason."""


class MissingDependency(Unsupported, ImportError):
    """torch or Triton is not installed."""
