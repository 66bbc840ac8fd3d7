# SPDX-License-Identifier: Apache-2.0
"""ScMoE's shortcut-connected expert parallelism: the previous layer's representation is routed while this one computes.

In an ordinary block the experts wait for attention, and attention's successor waits for the experts' two all-to-alls.
ScMoE (2404.05019) routes what the *previous* layer gave, so that nothing in this block is needed for it: the dispatch
travels while attention computes, the results while the shared expert does. It is another model, to be trained as such.

    ShortcutExperts   `begin`, `multiply`, `finish`: three moments of one mixture of experts
    ShortcutBlock     a transformer block that puts attention and the shared expert between them
"""

from typing import NamedTuple

from torch import Tensor, nn

from megascale_kernels.errors import Unsupported
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe import all_to_all
from megascale_kernels.moe.expert_shards import choose_shards
from megascale_kernels.moe.router import route
from megascale_kernels.moe.schedules.expert_pipeline import crew_of
from megascale_kernels.moe.schedules.shuffle import Begun, Shuffle
from megascale_kernels.torch_api.moe_ops import MoELayer


class UnderWay(NamedTuple):
    """A mixture of experts between two of its moments; `begin` and `multiply` return it.

    Attributes:
        tokens: [T, H] that were routed.
        gates: [T, top_k], of every shard where experts are cut.
        shuffle: where pairs go.
        begun: the all-to-all that is under way.
        multiplied: the experts have run, and the results are on their way back.
    """

    tokens: Tensor
    gates: Tensor
    shuffle: Shuffle
    begun: Begun
    multiplied: bool


class ShortcutExperts(MoELayer):
    """Routed experts in three moments, between which the caller computes something else (ScMoE, 2404.05019).

    `forward` is the three in a row and gives what `MoELayer` gives. All ranks reach the same moments in the same order.
    Arguments are those of `MoELayer`; there are no shared experts here, since `ShortcutBlock` runs its own.

    Raises:
        Unsupported: what `MoELayer` refuses, or shared experts.
    """

    def __init__(
        self, hidden: int, inner: int, experts: int, top_k: int, workspace: Workspace, **options: object
    ) -> None:  # fmt: skip
        if options.get("shared_inner"):
            raise Unsupported(
                "ShortcutExperts(shared_inner=...): the shared expert runs between the moments, as a module of "
                "ShortcutBlock"
            )
        super().__init__(hidden, inner, experts, top_k, workspace, **options)  # type: ignore[arg-type]  # MoELayer checks them

    def begin(self, x: Tensor) -> UnderWay:
        """Route tokens, [..., H], and send them on their way.

        Raises:
            Unsupported: tokens of another width, type or device than the layer's.
            RankMismatch: ranks called different things.
        """
        hidden = self.router.shape[1]
        if x.shape[-1] != hidden or x.dtype != self.workspace.dtype or x.device.type != self.workspace.device.type:
            raise Unsupported(
                f"ShortcutExperts.begin: tokens are [..., {hidden}] of {self.workspace.dtype} on "
                f"{self.workspace.device.type}; got {tuple(x.shape)} of {x.dtype} on {x.device.type}"
            )
        tokens = x.reshape(-1, hidden)
        self.routed = routed = route(
            tokens @ self.router.T, self.top_k, score=self.score, normalise=self.normalise,
            capacity_factor=self.capacity_factor, bias=self.choice_bias,
        )  # fmt: skip
        experts, _, inner, _ = self.w_in.shape
        all_to_all.agree(
            f"ShortcutExperts(H {hidden}, I {inner}, experts {experts}, top {self.top_k}, {x.dtype}, tensor_parallel "
            f"{self.tensor_parallel})",
            self.workspace,
        )
        ids, gates = choose_shards(routed.ids, routed.gates, experts, self.tensor_parallel)
        shuffle = Shuffle(ids, experts, crew_of(self.workspace))
        return UnderWay(tokens, gates, shuffle, shuffle.dispatch(tokens, 0), multiplied=False)

    def multiply(self, under_way: UnderWay) -> UnderWay:
        """Wait for the ranks' tokens, run the experts, and send the results on their way back.

        Raises:
            Unsupported: the experts have run.
            TileTimeout: a peer did not come (on the CPU; NCCL has its own time limit).
        """
        if under_way.multiplied:
            raise Unsupported("ShortcutExperts.multiply: these tokens have been multiplied; call finish")
        y = under_way.shuffle.multiply(under_way.begun, 0, self.w_in, self.w_out)
        return under_way._replace(begun=under_way.shuffle.combine(y, 0), multiplied=True)

    def finish(self, under_way: UnderWay) -> Tensor:
        """Wait for the results and add them up, weighted: [T, H].

        Raises:
            Unsupported: the experts have not run.
            TileTimeout: a peer did not come (on the CPU; NCCL has its own time limit).
        """
        if not under_way.multiplied:
            raise Unsupported("ShortcutExperts.finish: call multiply before it")
        shuffle, begun = under_way.shuffle, under_way.begun
        return shuffle.add(under_way.tokens, [shuffle.finish(begun, 0)], under_way.gates)

    def forward(self, x: Tensor) -> Tensor:
        """The three moments in a row: tokens to tokens, [..., H]."""
        return self.finish(self.multiply(self.begin(x))).view_as(x)


class ShortcutBlock(nn.Module):
    """A transformer block whose routed experts see the previous layer's representation (ScMoE, 2404.05019).

    Given x of this layer and the previous layer's `before`, both [..., H]:

        a = x + attention(norm_attention(x))
        out = a + shared(norm_shared(a)) + experts(norm_experts(before))

    Args:
        attention: [..., H] to the same.
        shared: the shared expert, [..., H] to the same.
        experts: the routed ones.
        norms: in front of attention, the shared expert and the routed ones; RMS norms of the experts' width by default.
    """

    def __init__(
        self, attention: nn.Module, shared: nn.Module, experts: ShortcutExperts, norms: tuple[nn.Module, ...] = ()
    ) -> None:
        super().__init__()
        if norms and len(norms) != 3:
            raise Unsupported(f"ShortcutBlock(norms=...): three modules, or none; got {len(norms)}")
        router = experts.router
        made = norms or tuple(nn.RMSNorm(router.shape[1], device=router.device, dtype=router.dtype) for _ in range(3))
        self.attention, self.shared, self.experts = attention, shared, experts
        self.norm_attention, self.norm_shared, self.norm_experts = made

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        """This layer's tokens and the previous layer's representation of them to this layer's: [..., H] each.

        Raises:
            Unsupported: the two have different shapes.
        """
        if x.shape != before.shape:
            raise Unsupported(
                f"ShortcutBlock: x and the previous layer's representation are of one shape; got {tuple(x.shape)} and "
                f"{tuple(before.shape)}"
            )
        under_way = self.experts.begin(self.norm_experts(before))
        attended = x + self.attention(self.norm_attention(x))
        under_way = self.experts.multiply(under_way)
        shared = self.shared(self.norm_shared(attended))
        out: Tensor = attended + shared + self.experts.finish(under_way).view_as(x)
        return out
