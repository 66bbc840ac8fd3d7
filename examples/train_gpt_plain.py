# SPDX-License-Identifier: Apache-2.0
"""Train a small transformer on the source of Python's standard library, without a single import of MegaScale Ops.

    megascale-ops run --nproc-per-node 4 -- examples/train_gpt_plain.py --steps 500
    torchrun --nproc-per-node 4 examples/train_gpt_plain.py --steps 500

What a script must do to survive is its own business here: it saves one file, written beside and renamed, into the
folder that MEGASCALE_CHECKPOINT_DIR names (else ``./checkpoints``), and starts from it when it is there. Watching,
naming what broke and restarting work all the same.
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
from torch.utils.data import DataLoader, IterableDataset

BYTES = 256


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small transformer on the source of the standard library.")
    parser.add_argument("--steps", type=int, default=300, help="train until this step")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--sequence-length", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps; 0 saves only at the end")
    parser.add_argument("--evaluate-every", type=int, default=100, help="steps; 0 never evaluates")
    parser.add_argument("--log-every", type=int, default=10, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-sleep", type=float, default=0.0, help="seconds to add to every step")
    return parser.parse_args()


class Windows(IterableDataset[Tensor]):
    """This rank's windows of the text, step after step, drawn from the seed and the number of the step."""

    def __init__(self, text: Tensor, args: argparse.Namespace, first_step: int, rank: int, world_size: int) -> None:
        self.text, self.args, self.first_step = text, args, first_step
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[Tensor]:
        length = self.args.sequence_length + 1
        for step in range(self.first_step, self.args.steps + 1):
            generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + step)
            starts = torch.randint(len(self.text) - length, (self.args.batch_size,), generator=generator)
            mine = starts[self.rank :: self.world_size].tolist()
            yield torch.stack([self.text[start : start + length] for start in mine]).long()


class Transformer(nn.Module):
    """torch's own encoder layers under a causal mask."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, args.width)
        self.position = nn.Parameter(torch.zeros(args.sequence_length, args.width))
        layer = nn.TransformerEncoderLayer(
            args.width, args.heads, 4 * args.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        self.head = nn.Linear(args.width, BYTES)
        mask = nn.Transformer.generate_square_subsequent_mask(args.sequence_length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Batch x time of bytes to batch x time x 256 scores."""
        return self.head(self.layers(self.token(tokens) + self.position, mask=self.mask, is_causal=True))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy of every next byte, in nats."""
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def read_standard_library() -> Tensor:
    """Every top-level module of the standard library, as one tensor of bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write beside, then rename: a crash leaves either the former file or the new one."""
    beside = path.with_suffix(".writing")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, beside)
    beside.replace(path)


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Load what was saved; the number of finished steps, 0 when there is nothing."""
    if not path.exists():
        return 0
    saved = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def train(args: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> None:
    """From the last saved step to the end."""
    torch.manual_seed(args.seed)
    text = read_standard_library()
    held_out, text = text[-64 * (args.sequence_length + 1) :], text[: -64 * (args.sequence_length + 1)]
    held_out = held_out.view(64, -1).long().to(device)
    transformer = Transformer(args).to(device)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=args.learning_rate)
    path = Path(os.environ.get("MEGASCALE_CHECKPOINT_DIR") or "checkpoints") / "plain.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    finished = restore(path, transformer, optimizer, device)
    if rank == 0 and finished:
        print(f"resumed after step {finished}", flush=True)

    model = DistributedDataParallel(transformer) if distributed.is_initialized() else transformer
    batches = DataLoader(Windows(text, args, finished + 1, rank, world_size), batch_size=None)
    losses: list[Tensor] = []
    for step, windows in enumerate(batches, start=finished + 1):
        loss = loss_of(model, windows.to(device))
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(args.step_sleep)
        if rank == 0 and step % args.log_every == 0:
            print(f"step {step} loss {torch.stack(losses).mean().item():.3f}", flush=True)  # of rank 0's windows
            losses.clear()
        if rank == 0 and args.evaluate_every and step % args.evaluate_every == 0:
            with torch.no_grad():
                print(f"step {step} evaluation loss {loss_of(transformer, held_out).item():.3f}", flush=True)
        if rank == 0 and (step == args.steps or (args.checkpoint_every and step % args.checkpoint_every == 0)):
            save(path, step, transformer, optimizer)


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
