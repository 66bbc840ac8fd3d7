# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a state on a real GPU, saved in the background: what is saved is the state at the call."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

torch = pytest.importorskip("torch")

from megascale_ops.checkpoint import CheckpointManager  # noqa: E402  torch may be missing
from megascale_ops.checkpoint.background.copying import Copier  # noqa: E402  same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Cycles of the GPU's clock: more than half a second on any, so that what is queued behind comes late for certain.
LATE_CYCLES = 1_500_000_000


def trained(size: int = 1_000_000) -> dict[str, Any]:
    """A module and its optimizer after one step, all on the GPU."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(1000, size // 1000), torch.nn.BatchNorm1d(size // 1000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step({"model": model, "optimizer": optimizer})
    return {"model": model, "optimizer": optimizer}


def step(state: dict[str, Any]) -> None:
    """One training step; without a synchronisation, as a training has none."""
    state["model"](torch.ones(8, 1000, device="cuda")).square().sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def copied(state: dict[str, Any]) -> list[torch.Tensor]:
    """Everything that is saved, as it is now, on the CPU."""
    torch.cuda.synchronize()
    moments = [value for held in state["optimizer"].state.values() for value in held.values()]
    return [each.detach().cpu().clone() for each in (*state["model"].state_dict().values(), *moments)]


def restored(folder: Path) -> list[torch.Tensor]:
    """What comes back into a fresh state."""
    state = trained()
    for each in state["model"].parameters():
        each.data.zero_()
    assert CheckpointManager(folder).restore(state) >= 0
    return copied(state)


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether they agree in every bit."""
    return len(some) == len(others) and all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.fixture
def overlapped(tmp_path: Path) -> Iterator[CheckpointManager]:
    """A manager whose copies come late: its first save is made, and its stream has something else to do."""
    manager = CheckpointManager(tmp_path, mode="overlapped", keep=5)
    manager.save(1, trained())
    manager.wait()
    yield manager
    manager.close()


def delay(manager: CheckpointManager) -> Copier:
    """Let the copies of the next save begin half a second late."""
    background = manager._background
    assert background is not None
    for stream in background._copier._streams.values():
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE_CYCLES)
    return background._copier


@pytest.mark.parametrize("mode", ["sync", "async", "overlapped"])
def test_tensors_of_every_kind_come_back_from_a_gpu(
    tmp_path: Path, mode: Literal["sync", "async", "overlapped"]
) -> None:
    """In three saves: the later ones start their copies where the first one's plan had them."""
    manager = CheckpointManager(tmp_path, mode=mode)
    for value in (1, 2, 3):
        state = {
            "bf16": torch.full((1000, 7), value, dtype=torch.bfloat16, device="cuda"),
            "fp8": torch.full((999,), value, device="cuda").to(torch.float8_e4m3fn),
            "integers": torch.arange(1001, device="cuda") * value,
            "transposed": (torch.arange(12.0, device="cuda").reshape(3, 4) * value).t(),
            "every second": torch.arange(20, device="cuda")[::2] * value,
            "conjugate": (torch.tensor([1 + 2j, 3 - 1j], device="cuda") * value).conj(),
            "scalar": torch.tensor(float(value), device="cuda"),
            "nothing": torch.empty(0, 3, device="cuda"),
            "on the CPU": torch.full((50,), float(value)),
            "random": torch.cuda.get_rng_state(),
            "notes": {"value": value},
        }
        tensors = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
        wanted = {name: each.cpu().resolve_conj().clone() for name, each in tensors.items()}
        manager.save(value, state)
        for each in tensors.values():
            each.untyped_storage().fill_(0)
    manager.close()
    back = {name: torch.zeros_like(each) for name, each in wanted.items()} | {"notes": {}}

    assert CheckpointManager(tmp_path).restore(back) == 3

    assert back["notes"] == {"value": 3}
    for name, each in wanted.items():
        assert back[name].dtype == each.dtype
        bits = [one.contiguous().reshape(-1).view(torch.uint8) for one in (back[name], each)]
        assert torch.equal(*bits), name


def test_the_next_step_waits_for_what_it_overwrites(overlapped: CheckpointManager) -> None:
    """The save returns while nothing is copied yet; the step that follows at once spoils nothing."""
    state = trained()
    wanted = copied(state)
    copier = delay(overlapped)

    state["model"].eval()  # batch norm's statistics would be overwritten by the forward: those are waited for
    overlapped.save(2, {"model": state["model"][0], "optimizer": state["optimizer"]})
    is_late = not all(end.query() for end in copier.pending.values())
    step(state)
    overlapped.wait()

    assert is_late
    back = trained()
    CheckpointManager(overlapped.path).restore({"model": back["model"][0], "optimizer": back["optimizer"]})
    linear = [back["model"][0].weight.detach().cpu(), back["model"][0].bias.detach().cpu()]
    assert equal(linear, wanted[:2])
    assert not torch.equal(state["model"][0].weight.detach().cpu(), wanted[0])


def test_without_the_hook_a_step_would_spoil_the_copy(overlapped: CheckpointManager) -> None:
    """The control: what is saved then are the numbers after the step."""
    state = trained()
    wanted = copied(state)
    copier = delay(overlapped)
    assert copier._hook is not None
    copier._hook.remove()

    overlapped.save(2, {"model": state["model"][0], "optimizer": state["optimizer"]})
    step(state)
    overlapped.wait()

    back = trained()
    CheckpointManager(overlapped.path).restore({"model": back["model"][0], "optimizer": back["optimizer"]})
    assert not torch.equal(back["model"][0].weight.detach().cpu(), wanted[0])


def test_a_conjugate_is_right_however_late_its_copy_comes(overlapped: CheckpointManager) -> None:
    """It is turned on the GPU: the host would turn what is not there yet."""
    values = [(torch.tensor([1 + 2j, 3 - 1j], device="cuda") * factor).conj() for factor in (1, 3)]
    overlapped.save(2, {"value": values[0]})
    overlapped.wait()
    delay(overlapped)

    overlapped.save(3, {"value": values[1]})
    overlapped.wait()

    back = {"value": torch.zeros(2, dtype=torch.complex64)}
    assert CheckpointManager(overlapped.path).restore(back) == 3
    assert back["value"].tolist() == [3 - 6j, 9 + 3j]


def test_what_no_optimizer_holds_is_copied_when_the_save_returns(overlapped: CheckpointManager) -> None:
    """Batch norm's statistics, which a forward overwrites, and tensors of the user's."""
    state = trained() | {"mean": torch.ones(1000, device="cuda")}
    wanted = copied(state)
    delay(overlapped)

    overlapped.save(2, state)
    for buffer in state["model"].buffers():
        buffer.zero_()
    state["mean"].zero_()
    overlapped.wait()

    back = trained() | {"mean": torch.zeros(1000)}
    CheckpointManager(overlapped.path).restore(back)
    assert equal(copied(back), wanted)
    assert back["mean"].tolist() == [1.0] * 1000


def test_the_host_buffer_is_pinned_and_used_again(tmp_path: Path) -> None:
    """One copy, however many saves; the whole state comes back from the last one."""
    manager, state, seen = CheckpointManager(tmp_path, mode="overlapped"), trained(), set()
    for number in range(4):
        manager.save(number, state)
        background = manager._background
        assert background is not None
        buffer = background._buffer
        seen.add((buffer.is_pinned, buffer.size_bytes, buffer.part(0, 1).data_ptr()))
        wanted = copied(state)
        step(state)
    manager.close()

    assert len(seen) == 1
    assert next(iter(seen))[0]
    assert equal(restored(tmp_path), wanted)
