# SPDX-License-Identifier: Apache-2.0
"""The rank that the benchmark of restart stages launches: it writes down when each stage of its start was over.

One line a stage, ``<clock> <pid> <rank> <generation> <stage>``, in ``BENCH_DIR/rank-R`` (CLOCK_MONOTONIC, the same for
all processes of a machine). A launcher starts it as any script: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. With
``--spare LEVEL`` it prepares as far as LEVEL (none, imports, context, nccl) and takes its environment from a line of
JSON on its standard input, as a warm worker does.

On its standard input it is also told that a rank has died, ``{"survive": ..., "generation": ..., "port": ...}``: then
it aborts its communicator in a second thread, since the first waits in a collective that never ends, and goes on in the
same process, with a new process group (``abort``) or with a smaller one (``shrink``). No import of ours.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

BORN_BOOT_S = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]) / os.sysconf(
    "SC_CLK_TCK"
)
SAVED_AT, STEP_S = 3, 0.05
MARKS: list[tuple[float, str]] = []


def mark(stage: str) -> None:
    """Note that a stage is over; what was noted before the rank is known is written with the first that follows."""
    MARKS.append((time.monotonic(), stage))
    if "RANK" not in os.environ or "BENCH_DIR" not in os.environ:
        return
    rank, generation = os.environ["RANK"], os.environ.get("GENERATION", "0")
    with (Path(os.environ["BENCH_DIR"]) / f"rank-{rank}").open("a") as log:
        log.write("".join(f"{clock:.6f} {os.getpid()} {rank} {generation} {name}\n" for clock, name in MARKS))
    MARKS.clear()


MARKS.append((BORN_BOOT_S - (time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()), "started"))
LEVEL = sys.argv[2] if sys.argv[1:2] == ["--spare"] else ""
ORDER = json.loads(sys.stdin.readline()) if LEVEL == "none" else {}
os.environ.update(ORDER)
mark("entered")

import torch  # noqa: E402  when Python itself was up is noted first
import torch._dynamo  # noqa: E402  as above
from torch import distributed  # noqa: E402  as above

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = {"cuda": "nccl", "cpu": "gloo"}[DEVICE]
mark("imported")


def make_context(local_rank: int) -> torch.device:
    """Make the CUDA context, load cuBLAS and the kernels of a step, and return the device."""
    device = torch.device(DEVICE, local_rank) if DEVICE == "cuda" else torch.device(DEVICE)
    if DEVICE == "cuda":
        torch.cuda.set_device(device)
    a = torch.ones(256, 256, device=device, requires_grad=True)
    (a @ a).relu().sum().backward()
    wait(device)
    return device


def wait(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spare() -> torch.device | None:
    """Prepare as far as asked, say so, and wait for the order."""
    device = make_context(int(sys.argv[3])) if LEVEL in ("context", "nccl") else None
    if LEVEL == "nccl" and device is not None:
        store = distributed.HashStore()
        distributed.init_process_group(BACKEND, store=store, rank=0, world_size=1)
        distributed.all_reduce(torch.ones(1, device=device))
        wait(device)
        distributed.destroy_process_group()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    line = sys.stdin.readline()
    if not line:
        raise SystemExit
    os.environ.update(json.loads(line))
    mark("ordered")
    return device


class Training:
    """A model with AdamW, and its steps until the process is killed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step = 0
        self.told: dict[str, str] = {}
        layers, width = int(os.environ.get("LAYERS", "8")), int(os.environ.get("WIDTH", "4096"))
        with torch.device(device):
            self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.x = torch.ones(64, width, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        mark("model")

    @property
    def place(self) -> Path:
        """Return where the checkpoint lies."""
        return Path(os.environ["BENCH_DIR"]) / "state.pt"

    def one_step(self) -> None:
        """Make one step; gradients are all-reduced as one tensor each."""
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            distributed.all_reduce(parameter.grad)
        self.optimizer.step()
        wait(self.device)
        self.step += 1

    def load(self) -> None:
        """Take the checkpoint, where there is one."""
        if self.place.exists():
            kept = torch.load(self.place, map_location=self.device, mmap=True, weights_only=True)
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            self.step = kept["step"]
            wait(self.device)
        mark("loaded")

    def save(self) -> None:
        """Save what a restart loads; rank 0 of the first life does."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        torch.save(state, self.place.with_suffix(".part"))
        self.place.with_suffix(".part").rename(self.place)
        mark("saved")

    def train(self) -> None:
        """Make steps until a rank dies; return when this process is to go on without it."""
        first = True
        while not self.told:
            try:
                self.one_step()
            except (RuntimeError, ValueError):  # aborted; ValueError: and its process group is gone
                if not self._is_told():
                    raise
                return
            if self.told:
                return
            if first:
                first = False
                mark("stepped")
            if self.step == SAVED_AT and os.environ["RANK"] == "0" and not self.place.exists():
                self.save()
            time.sleep(STEP_S)

    def _is_told(self) -> bool:
        """Wait a moment for the word that a rank has died: Gloo's collective fails before it comes."""
        end = time.monotonic() + 5.0
        while not self.told and time.monotonic() < end:
            time.sleep(0.001)
        return bool(self.told)


def meet() -> None:
    """Join the process group of this generation."""
    from torch.distributed import PrefixStore, TCPStore

    if "STORE_PORT" in os.environ:  # a store that outlives ranks, as every launcher has one
        outer = TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), is_master=False)
        store = PrefixStore(os.environ["GENERATION"], outer)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        distributed.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
    else:
        distributed.init_process_group(BACKEND)
    mark("rendezvous")


def communicate(device: torch.device) -> None:
    """Make the communicator: NCCL does at the first collective."""
    distributed.all_reduce(torch.ones(1, device=device))
    wait(device)
    mark("communicator")


def share_state(training: Training) -> None:
    """Give the new rank what the survivor has: it was never lost. Rank 0 has it."""
    step = torch.tensor([float(training.step)], device=training.device)
    distributed.broadcast(step, 0)
    training.step = int(step.item())
    for parameter in training.model.parameters():
        kept = training.optimizer.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            kept.setdefault(name, torch.zeros_like(parameter))
        kept.setdefault("step", torch.tensor(float(training.step)))
        for tensor in (parameter.detach(), kept["exp_avg"], kept["exp_avg_sq"]):
            distributed.broadcast(tensor, 0)
    wait(training.device)
    mark("loaded")


def go_on(training: Training, listener: threading.Thread) -> None:
    """Form the next process group in this process; training goes on in it."""
    told = training.told
    listener.join(20.0)
    os.environ["GENERATION"] = told["generation"]
    if told["survive"] == "shrink":
        os.environ["WORLD_SIZE"] = "1"
        communicate(training.device)
        return
    if DEVICE == "cpu":
        distributed.destroy_process_group()
    meet()
    communicate(training.device)
    share_state(training)


def train_within_nvrx() -> None:
    """Train inside NVIDIA's in-process restart, with its defaults: what is left of the ranks goes on."""
    from nvidia_resiliency_ext import inprocess

    @inprocess.Wrapper(health_check=inprocess.health_check.CudaHealthCheck() if DEVICE == "cuda" else None)
    def life(call: inprocess.CallWrapper | None = None) -> None:
        assert call is not None
        os.environ["GENERATION"] = f"nvrx-{call.iteration}"
        mark("ordered" if call.iteration else "nvrx")
        device = make_context(int(os.environ["LOCAL_RANK"]))
        mark("context")
        meet()
        communicate(device)
        training = Training(device)
        training.load()
        training.train()

    life()


def main() -> None:
    """Start, and go on after each death that this process survives."""
    if os.environ.get("WITHIN") == "nvrx":
        train_within_nvrx()
        return
    device = spare() if LEVEL not in ("", "none") else None
    if device is None:
        device = make_context(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    mark("context")
    meet()
    communicate(device)
    training = Training(device)
    if os.environ.get("SHARED_BY_SURVIVOR"):
        share_state(training)
    else:
        training.load()
    while True:
        training.told = {}
        listener = threading.Thread(target=one_word, args=(training,), name="listen", daemon=True)
        if LEVEL:
            listener.start()
        training.train()
        go_on(training, listener)


def one_word(training: Training) -> None:
    """Take one line of standard input and act on it; in a thread."""
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    told = json.loads(line)
    mark("told")
    training.told = told
    try:
        if told["survive"] == "shrink":
            if DEVICE == "cuda":  # else torch files the smaller group under the CPU, where no tensor of a GPU finds it
                distributed.group.WORLD.bound_device_id = training.device
            distributed.shrink_group([1], shrink_flags=1)
        elif DEVICE == "cuda":
            distributed.distributed_c10d._abort_process_group()  # noqa: SLF001  there is no public one
    except Exception as error:  # noqa: BLE001  it is what this way came to
        mark(f"failed:{type(error).__name__}:{str(error).splitlines()[0] if str(error) else ''}".replace(" ", "_"))
        os._exit(1)
    mark("aborted")


if __name__ == "__main__":
    main()
