# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT, byte by byte, on the source of Python's own standard library.

    megascale-ops run --nproc-per-node 4 -- examples/train_gpt.py --steps 500
    torchrun --nproc-per-node 4 examples/train_gpt.py --steps 500
    python examples/train_gpt.py --steps 100

Plain torch: DistributedDataParallel over NCCL when there are GPUs, over Gloo when there are none. Two things are ours:
``CheckpointManager``, which saves whole checkpoints and restores the newest that verifies, and ``recorder.phase``,
which tells the watchers that an evaluation is going on. Killed and started again, it goes on in the same text.
"""

import argparse
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from megascale_ops.checkpoint import CheckpointManager
from megascale_ops.recorder import recorder

BYTES = 256  # the vocabulary


def parse_arguments() -> argparse.Namespace:
    """The command line; its defaults make a step of about 40 ms for 4 ranks on 2 CPU cores."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the source of Python's standard library.")
    parser.add_argument("--steps", type=int, default=300, help="train until this step")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--sequence-length", type=int, default=64, help="bytes per sequence")
    for name, default in (("--layers", 2), ("--width", 64), ("--heads", 4)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps; 0 saves only at the end")
    parser.add_argument("--evaluate-every", type=int, default=100, help="steps; 0 never evaluates")
    parser.add_argument("--log-every", type=int, default=10, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-sleep", type=float, default=0.0, help="seconds to add to every step")
    return parser.parse_args()


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a byte string: item ``i`` is the window that begins at byte ``i``, and the same one byte later."""

    def __init__(self, text: bytes, length: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return len(self.bytes) - self.length - 1

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        window = self.bytes[start : start + self.length + 1].long()
        return window[:-1], window[1:]


class StepSampler(Sampler[list[int]]):
    """Which windows each step sees: a function of seed and step alone, so a resumed run continues the stream.

    All ranks draw the same windows and each takes its share, so the stream is the same for any number of ranks.
    """

    def __init__(self, text: Text, args: argparse.Namespace, first_step: int, rank: int, world_size: int) -> None:
        self.windows, self.batch_size, self.seed = len(text), args.batch_size, args.seed
        self.steps, self.share = range(first_step, args.steps + 1), slice(rank, None, world_size)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
            starts = torch.randint(self.windows, (self.batch_size,), generator=generator).tolist()
            yield starts[self.share]


class Block(nn.Module):
    """Attention over what came before, then a two-layer perceptron, each beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTC: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        batch, length, width = x_BTC.shape
        qkv = self.qkv(self.norm_attention(x_BTC)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTC = x_BTC + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x_BTC + self.mlp(self.norm_mlp(x_BTC))


class GPT(nn.Module):
    """Bytes in, the scores of each next byte out."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, args.width)
        self.position = nn.Parameter(torch.zeros(args.sequence_length, args.width))
        self.blocks = nn.Sequential(*(Block(args.width, args.heads) for _ in range(args.layers)))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, BYTES, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """(B, T) bytes to (B, T, 256) scores."""
        hidden = self.token(tokens_BT) + self.position[: tokens_BT.shape[1]]
        return self.head(self.norm(self.blocks(hidden)))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    """Mean cross entropy, in nats per byte."""
    tokens, targets = (part.to(device) for part in batch)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def mean_over_ranks(losses: list[Tensor], world_size: int) -> float:
    """The mean of the losses since the last line, over all ranks: one batch alone is too noisy to see it fall."""
    mean = torch.stack(losses).mean()
    if world_size > 1:
        distributed.all_reduce(mean)
    return mean.item() / world_size


@torch.no_grad()
def evaluate(model: nn.Module, text: Text, device: torch.device) -> float:
    """The loss on 64 evenly spaced windows of text that is never trained on; every rank computes the same."""
    starts = range(0, len(text), max(len(text) // 64, 1))[:64]
    inputs, targets = zip(*(text[start] for start in starts), strict=True)
    return loss_of(model, (torch.stack(inputs), torch.stack(targets)), device).item()


def read_standard_library(length: int) -> tuple[Text, Text]:
    """Text to train on (95 %) and text to evaluate on (the rest): some 5 MB that every machine with Python has."""
    everything = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    cut = len(everything) * 95 // 100
    return Text(everything[:cut], length), Text(everything[cut:], length)


def train(args: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> None:
    """From the newest checkpoint to the last step."""
    torch.manual_seed(args.seed)
    text, held_out = read_standard_library(args.sequence_length)
    gpt = GPT(args).to(device)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=args.learning_rate)
    checkpoints = CheckpointManager.from_environment()
    state = {"model": gpt, "optimizer": optimizer}
    finished = max(checkpoints.restore(state), 0)
    if rank == 0 and finished:
        print(f"resumed after step {finished}", flush=True)

    model = DistributedDataParallel(gpt) if distributed.is_initialized() else gpt
    batches = DataLoader(text, batch_sampler=StepSampler(text, args, finished + 1, rank, world_size))
    losses: list[Tensor] = []
    for step, batch in enumerate(batches, start=finished + 1):
        loss = loss_of(model, batch, device)
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(args.step_sleep)
        if step % args.log_every == 0:
            mean_loss = mean_over_ranks(losses, world_size)
            losses.clear()
            if rank == 0:
                print(f"step {step} loss {mean_loss:.3f}", flush=True)
        if args.evaluate_every and step % args.evaluate_every == 0:
            with recorder.phase("eval"):
                held_out_loss = evaluate(gpt, held_out, device)
            if rank == 0:
                print(f"step {step} evaluation loss {held_out_loss:.3f}", flush=True)
        if step == args.steps or (args.checkpoint_every and step % args.checkpoint_every == 0):
            checkpoints.save(step, state)


def main() -> None:
    """One rank: join the others if there are any, train, leave."""
    args = parse_arguments()
    torch.set_num_threads(1)  # several ranks share the cores of a small machine
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if args.batch_size < world_size:
        raise SystemExit(f"--batch-size {args.batch_size} leaves some of the {world_size} ranks without a sequence")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(args, rank, world_size, device)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
