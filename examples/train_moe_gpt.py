# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT with experts on Python's own source: its sequences, experts and MLPs are cut over the ranks.

    megascale-ops run --nproc-per-node 2 -- examples/train_moe_gpt.py --steps 200
    torchrun --nproc-per-node 2 examples/train_moe_gpt.py --steps 200

Every rank holds a part of each sequence. Attention gathers keys and values (`SequenceParallelAttention`), every second
MLP (`--mixture-every`) is a mixture of experts (`MoELayer`), the others are tensor-parallel (`ColumnParallelLinear`,
`RowParallelLinear`).
On GPUs their kernels overlap communication with computation, and write each tile's progress where the node agent finds
it; on a CPU they take the serial path over Gloo. What the ranks hold in common (embedding, norms, projections, routers)
has its gradients summed over them. Checkpoints hold whole tensors, so they restore on another number of ranks.
"""

import argparse
import os
import sysconfig
import time
from pathlib import Path

import torch
from megascale_kernels import (
    ColumnParallelLinear,
    MoELayer,
    RowParallelLinear,
    SequenceParallelAttention,
    Workspace,
    positions_of,
    shard_sequence,
)
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megascale_ops.checkpoint import CheckpointManager

BYTES = 256  # the vocabulary


def parse_arguments() -> argparse.Namespace:
    """The command line; its defaults make a step of about 60 ms for 2 ranks on 2 CPU cores."""
    parser = argparse.ArgumentParser(description="Train a small GPT with experts on the source of Python's library.")
    parser.add_argument("--steps", type=int, default=200, help="train until this step")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step; each lies on all ranks")
    parser.add_argument("--sequence-length", type=int, default=64, help="bytes per sequence, over all ranks")
    for name, default in (
        ("--layers", 2), ("--width", 64), ("--heads", 4), ("--kv-heads", 2), ("--experts", 8), ("--top-k", 2)
    ):  # fmt: skip
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--mixture-every", type=int, default=2, help="every so many blocks one with experts; 1 is all")
    parser.add_argument(
        "--no-contest", action="store_true", help="no trying in the first calls which way of a kernel is fastest"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the loss that keeps experts busy")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps; 0 saves only at the end")
    parser.add_argument("--log-every", type=int, default=10, help="steps")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds that a kernel waits for a peer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-sleep", type=float, default=0.0, help="seconds to add to every step")
    return parser.parse_args()


class Attention(nn.Module):
    """Causal attention of this rank's tokens to those of all ranks, with fewer heads of keys than of queries."""

    def __init__(self, args: argparse.Namespace, workspace: Workspace) -> None:
        super().__init__()
        self.heads, self.kv_heads, size = args.heads, args.kv_heads, args.width // args.heads
        self.project = nn.Linear(args.width, (args.heads + 2 * args.kv_heads) * size, bias=False)
        self.out = nn.Linear(args.width, args.width, bias=False)
        self.attend = SequenceParallelAttention(workspace, causal=True)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """(B, T / ranks, C) to the same."""
        batch, tokens, width = x_BTC.shape
        projected = self.project(x_BTC).view(batch, tokens, self.heads + 2 * self.kv_heads, -1)
        query, key, value = projected.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        mixed = self.attend(query.contiguous(), key.contiguous(), value.contiguous())
        return self.out(mixed.reshape(batch, tokens, width))


class Perceptron(nn.Module):
    """Two layers, their inner features cut over the ranks: tokens are gathered in front of the first."""

    def __init__(self, args: argparse.Namespace, workspace: Workspace) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(args.width, 4 * args.width, workspace, bias=False)
        self.down = RowParallelLinear(4 * args.width, args.width, workspace, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """(B, T / ranks, C) to the same."""
        rows = x_BTC.flatten(0, 1)
        return self.down(nn.functional.gelu(self.up(rows))).view_as(x_BTC)


class Block(nn.Module):
    """Attention, then a perceptron or a mixture of experts, each beside a residual."""

    def __init__(self, args: argparse.Namespace, workspace: Workspace, *, is_mixture: bool) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(args.width), nn.RMSNorm(args.width)
        self.attention = Attention(args, workspace)
        self.mlp: nn.Module = (
            MoELayer(args.width, 2 * args.width, args.experts, args.top_k, workspace)
            if is_mixture
            else Perceptron(args, workspace)
        )

    def forward(self, x_BTC: Tensor) -> Tensor:
        """(B, T / ranks, C) to the same."""
        x_BTC = x_BTC + self.attention(self.norm_attention(x_BTC))
        return x_BTC + self.mlp(self.norm_mlp(x_BTC))


class GPT(nn.Module):
    """Bytes in, the scores of each next byte out, for this rank's part of each sequence."""

    def __init__(self, args: argparse.Namespace, workspace: Workspace) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, args.width)
        self.position = nn.Parameter(torch.zeros(args.sequence_length, args.width))
        mixtures = range(args.mixture_every - 1, args.layers, args.mixture_every)
        self.blocks = nn.Sequential(*(Block(args, workspace, is_mixture=n in mixtures) for n in range(args.layers)))
        self.norm, self.head = nn.RMSNorm(args.width), nn.Linear(args.width, BYTES, bias=False)
        places = positions_of(workspace.rank, workspace.world_size, args.sequence_length)
        self.register_buffer("places", places, persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """(B, T / ranks) bytes to (B, T / ranks, 256) scores."""
        hidden = self.token(tokens_BT) + self.position[self.places]
        return self.head(self.norm(self.blocks(hidden)))

    def balance_loss(self) -> Tensor:
        """How uneven the experts' loads are, the mean over layers; least when all are as busy."""
        routed = [block.mlp.routed for block in self.blocks if isinstance(block.mlp, MoELayer)]
        losses = [one.balance_loss for one in routed if one is not None]
        return torch.stack(losses).mean() if losses else torch.zeros((), device=self.position.device)


def cut_dimensions(gpt: GPT) -> dict[str, int]:
    """Along which dimension each parameter is cut over the ranks; those that all ranks hold whole are not in it."""
    found = {}
    for name, module in gpt.named_modules():
        if isinstance(module, ColumnParallelLinear):
            found[f"{name}.weight"] = 0
        elif isinstance(module, RowParallelLinear):
            found[f"{name}.weight"] = 1
        elif isinstance(module, MoELayer):
            found |= {f"{name}.w_in": 0, f"{name}.w_out": 0}
    return found


def start_alike(gpt: GPT, cut: dict[str, int]) -> None:
    """What all ranks hold begins as rank 0 has drawn it."""
    for name, parameter in gpt.named_parameters():
        if name not in cut:
            distributed.broadcast(parameter.data, 0)


def sum_gradients(gpt: GPT, cut: dict[str, int]) -> None:
    """Sum the gradients of what all ranks hold, in one call; those of the rest are of all tokens already."""
    common = [p.grad for name, p in gpt.named_parameters() if name not in cut and p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in common])
    distributed.all_reduce(flat)
    for gradient, summed in zip(common, flat.split([one.numel() for one in common]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def whole(
    gpt: GPT, optimizer: torch.optim.AdamW, cut: dict[str, int], mesh: DeviceMesh
) -> dict[str, dict[str, object]]:
    """What a checkpoint holds: parameters and the optimizer's moments, cut ones as parts of whole tensors.

    The tensors share their memory with the model, so restoring into them restores the model.
    """

    def part_of(name: str, tensor: Tensor) -> Tensor:
        return DTensor.from_local(tensor, mesh, [Shard(cut[name])], run_check=False) if name in cut else tensor

    state: dict[str, dict[str, object]] = {"model": {}, "optimizer": {}}
    for name, parameter in gpt.named_parameters():
        state["model"][name] = part_of(name, parameter.data)
        moments = optimizer.state[parameter]
        if not moments:  # a step of nothing: so that there is something to restore into
            moments["step"] = torch.zeros(())
            moments["exp_avg"], moments["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
        for moment, value in moments.items():
            state["optimizer"][f"{name}.{moment}"] = part_of(name, value) if value.ndim else value
    return state


def read_standard_library() -> Tensor:
    """Text to train on: some 5 MB that every machine with Python has, a number for each byte."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def windows(text: Tensor, args: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """What a step sees, and the same one byte later, (B, T): a function of seed and step alone, equal on all ranks."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - args.sequence_length - 1, (args.batch_size, 1), generator=generator)
    places = starts + torch.arange(args.sequence_length + 1)
    return text[places[:, :-1]], text[places[:, 1:]]


def train(args: argparse.Namespace, device: torch.device) -> None:
    """From the newest checkpoint to the last step."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows, kv_size = args.batch_size * args.sequence_length, args.width // args.heads * args.kv_heads
    workspace = Workspace(
        max_rows=rows, max_gather_cols=max(args.width, 2 * kv_size), max_scatter_cols=args.width, dtype=dtype,
        deadline_s=args.deadline, adaptive=not args.no_contest, device=device,
    )  # fmt: skip
    torch.manual_seed(args.seed * world_size + rank)  # what is cut must not begin alike
    gpt = GPT(args, workspace).to(device, dtype)
    cut = cut_dimensions(gpt)
    start_alike(gpt, cut)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=args.learning_rate)
    state = whole(gpt, optimizer, cut, init_device_mesh(device.type, (world_size,)))
    checkpoints = CheckpointManager.from_environment()
    finished = max(checkpoints.restore(state), 0)
    if rank == 0 and finished:
        print(f"resumed after step {finished}", flush=True)

    text = read_standard_library()
    since, losses = time.perf_counter(), []
    for step in range(finished + 1, args.steps + 1):
        sequences = windows(text, args, step)
        inputs, targets = (shard_sequence(part, rank, world_size).to(device) for part in sequences)
        scores = gpt(inputs).float().flatten(0, 1)
        # Of all tokens each rank has its share, so the sum over ranks is the mean over tokens.
        loss = nn.functional.cross_entropy(scores, targets.flatten(), reduction="sum") / rows
        (loss + args.balance * gpt.balance_loss() / world_size).backward()
        sum_gradients(gpt, cut)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.detach())
        time.sleep(args.step_sleep)
        if step % args.log_every == 0:
            mean = torch.stack(losses).mean()
            distributed.all_reduce(mean)
            now, tokens = time.perf_counter(), rows * len(losses)
            if rank == 0:
                print(f"step {step} loss {mean.item():.3f} {tokens / (now - since):.0f} tokens/s", flush=True)
            since, losses = now, []
        if step == args.steps or (args.checkpoint_every and step % args.checkpoint_every == 0):
            checkpoints.save(step, state)
    workspace.close()


def main() -> None:
    """One rank: join the others if there are any, train, leave."""
    args = parse_arguments()
    if args.mixture_every < 1:
        raise SystemExit(f"--mixture-every {args.mixture_every}: 1 or more")
    torch.set_num_threads(1)  # several ranks share the cores of a small machine
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if args.sequence_length % (2 * world_size):
        raise SystemExit(f"--sequence-length {args.sequence_length} can't be cut into {2 * world_size} equal parts")
    if args.experts % world_size:
        raise SystemExit(f"--experts {args.experts} can't be dealt out to {world_size} ranks")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        distributed.init_process_group(backend)
    else:
        distributed.init_process_group(backend, rank=0, world_size=1, store=distributed.HashStore())
    train(args, device)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
