# SPDX-License-Identifier: Apache-2.0
"""What is staged in the host buffer is what a save that waits writes to files, byte for byte."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megascale_ops.checkpoint import contents, persist, plan
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.checkpoint.background import staging
from megascale_ops.checkpoint.background.copying import Copier, written_by_steps
from megascale_ops.checkpoint.background.host_buffer import HostBuffer
from megascale_ops.checkpoint.background.staging import Stager, StagingWriter
from megascale_ops.checkpoint.ranks import Ranks
from megascale_ops.errors import CheckpointError
from tests.fakes.gpu_copier import GpuCopier

NOTHING: frozenset[int] = frozenset()


def state_of(value: float) -> dict[str, Any]:
    """Tensors of every kind that has a shape of its own in memory."""
    model = nn.Linear(7, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.full((2, 7), value)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "bf16": torch.full((3, 3), value, dtype=torch.bfloat16),
        "fp8": torch.full((5,), value).to(torch.float8_e4m3fn),
        "integers": torch.arange(11) * int(value),
        "flags": torch.tensor([True, False, True]),
        "transposed": torch.arange(12.0).reshape(3, 4).t() * value,
        "every second": torch.arange(20.0)[::2],
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "scalar": torch.tensor(value, dtype=torch.float64),
        "nothing": torch.empty(0, 3),
        "expanded": torch.tensor([value]).expand(4),
        "notes": {"step": int(value), "text": "x" * 50},
    }


def flat_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As the manager takes it apart."""
    return contents.take_apart({name: contents.capture(value) for name, value in state.items()}, Allowed())


@pytest.fixture
def buffer() -> Iterator[HostBuffer]:
    """A host buffer, given back at the end."""
    made = HostBuffer()
    yield made
    made.close()


def staged_files(writer: StagingWriter, buffer: HostBuffer) -> dict[str, bytes]:
    """What the writer process would write."""
    files = {each.name: buffer.part(each.start, each.length).numpy().tobytes() for each in writer.images}
    return files | {plan.FILE_NAME: writer.plan}


def stage(stager: Stager, flat: dict[str, torch.Tensor]) -> StagingWriter:
    """One save."""
    writer = StagingWriter(0, stager, NOTHING)
    persist.write_through(writer, flat, Ranks())
    return writer


def test_staged_bytes_are_those_of_a_save_that_waits(tmp_path: Path, buffer: HostBuffer) -> None:
    """Every dtype, views that are not contiguous, lazy conjugates, scalars and empty tensors; and the plan."""
    flat = flat_of(state_of(3.0))
    persist.write(tmp_path, flat, Ranks())

    writer = stage(Stager(buffer, Copier(overlapped=False)), flat)

    assert staged_files(writer, buffer) == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_the_buffer_is_made_once_and_used_by_every_save(buffer: HostBuffer) -> None:
    """Also when numbers in it get longer; the bytes are those of the newest state."""
    stager = Stager(buffer, Copier(overlapped=False))
    seen = set()
    for value in (1.0, 20.0, 300.0):
        flat = flat_of(state_of(value))
        writer = stage(stager, flat)
        seen.add((buffer.size_bytes, buffer.part(0, 1).data_ptr()))
        at = next(each for each in writer.images if each.name.endswith("tensors"))
        assert flat["bf16"].view(torch.uint8).numpy().tobytes() in staged_files(writer, buffer)[at.name]

    assert len(seen) == 1
    assert os.fstat(buffer.descriptor).st_size == buffer.size_bytes


def test_a_buffer_grows_with_its_state_and_is_gone_with_its_close() -> None:
    """In place of the former one: never two of them."""
    buffer = HostBuffer()
    buffer.reserve(10, pinned=False)
    first = buffer.size_bytes
    buffer.reserve(first, pinned=False)
    assert buffer.size_bytes == first
    buffer.reserve(first + 1, pinned=False)
    assert buffer.size_bytes > first
    buffer.part(first, 1).fill_(7)
    handle = buffer.descriptor

    buffer.close()
    buffer.close()

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_memory_that_is_not_there_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch, buffer: HostBuffer) -> None:
    """Before anything is copied, and the next save may find some."""

    def refuse(*_: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(CheckpointError, match=r"no memory for a copy of this rank's state \(0.0 GB\): Cannot allo"):
            stage(Stager(buffer, Copier(overlapped=False)), flat_of(state_of(1.0)))
    assert buffer.size_bytes == 0

    stage(Stager(buffer, Copier(overlapped=False)), flat_of(state_of(1.0)))
    assert buffer.size_bytes > 0


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, buffer: HostBuffer) -> tuple[Stager, GpuCopier]:
    """A stager that takes floating-point tensors for ones on a GPU."""
    monkeypatch.setattr(staging, "_is_on_gpu", lambda tensor: tensor.is_floating_point())
    monkeypatch.setattr("megascale_ops.checkpoint.background.host_buffer._register", lambda _: True)
    monkeypatch.setattr(HostBuffer, "_let_go", lambda _: None)
    copier = GpuCopier()
    return Stager(buffer, copier), copier


def test_a_state_of_the_same_shape_is_copied_while_it_is_planned(
    on_gpu: tuple[Stager, GpuCopier], buffer: HostBuffer
) -> None:
    """Begun before the plan, finished after it, and copied once; the first save has no plan to go by."""
    stager, copier = on_gpu
    first = flat_of(state_of(2.0))
    stager.start(first, NOTHING)
    stage(stager, first)
    assert [what for what, _ in copier.told] == ["start", "finish"]
    copier.told.clear()
    first["bf16"].fill_(9.0)
    second = first | {contents.structure_key("notes"): contents.as_bytes(b"y" * 500)}

    stager.start(second, NOTHING)
    writer = stage(stager, second)

    copies = sum(value.is_floating_point() for value in second.values())
    assert copier.told == [("start", copies), ("finish", copies)]
    assert b"y" * 500 in staged_files(writer, buffer)["__0_0.msgpack"]
    assert second["bf16"].view(torch.uint8).numpy().tobytes() in staged_files(writer, buffer)["__0_0.tensors"]


def test_another_view_of_the_same_memory_is_copied_anew(on_gpu: tuple[Stager, GpuCopier]) -> None:
    """It begins at the same byte and has as many; the same view needs no second copy."""
    stager, copier = on_gpu
    memory = torch.arange(16.0).reshape(4, 4)
    stage(stager, {"t": memory.t()})
    for now, told in ((memory.t(), ["start", "finish"]), (memory, ["start", "end", "start", "finish"])):
        copier.told.clear()
        stager.start({"t": memory.t()}, NOTHING)

        stage(stager, {"t": now})

        assert [what for what, _ in copier.told] == told


@pytest.mark.parametrize("change", ["another tensor", "one more", "one less", "larger"])
def test_a_state_that_has_changed_its_shape_is_copied_anew(
    on_gpu: tuple[Stager, GpuCopier], buffer: HostBuffer, tmp_path: Path, change: str
) -> None:
    """What was begun too early ends first, and does no harm."""
    stager, copier = on_gpu
    flat = {f"t{number}": torch.full((100,), float(number)) for number in range(5)}
    stage(stager, flat)
    copier.told.clear()
    changed = dict(flat)
    if change == "another tensor":
        changed["t2"] = torch.full((100,), 77.0)
    elif change == "one more":
        changed["a new one"] = torch.full((100,), 77.0)
    elif change == "one less":
        del changed["t1"]
    else:
        changed["t3"] = torch.full((2_000_000,), 77.0)

    stager.start(flat, NOTHING)
    writer = stage(stager, changed)

    assert [what for what, _ in copier.told] == ["start", "end", "start", "finish"]
    persist.write(tmp_path, changed, Ranks())
    assert staged_files(writer, buffer) == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_save_that_will_not_be_leaves_no_copy_running(on_gpu: tuple[Stager, GpuCopier]) -> None:
    """Its copies end before the buffer is used again."""
    stager, copier = on_gpu
    flat = {"t": torch.ones(10)}
    stage(stager, flat)
    stager.start(flat, NOTHING)
    copier.told.clear()

    stager.drop()
    stager.drop()

    assert copier.told == [("end", 1)]


def test_only_what_an_optimizer_of_the_state_holds_may_be_copied_late() -> None:
    """On the CPU nothing is: its copies are over when the save returns."""
    assert written_by_steps(state_of(1.0)) == NOTHING
