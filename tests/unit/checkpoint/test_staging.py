# SPDX-License-Identifier: Apache-2.0
"""What is staged in the host buffer is what a save that waits writes to files, byte for byte."""

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megascale_ops.checkpoint import contents, persist, plan
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.checkpoint.background import staging
from megascale_ops.checkpoint.background.copying import Copier, written_by_steps
from megascale_ops.checkpoint.background.host_buffer import HostBuffer
from megascale_ops.checkpoint.background.staging import Staged, Stager
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
    return contents.take_apart(state, Allowed())


@pytest.fixture
def buffer() -> Iterator[HostBuffer]:
    """A host buffer, given back at the end."""
    made = HostBuffer()
    yield made
    made.close()


def staged_files(staged: Staged, buffer: HostBuffer) -> dict[str, bytes]:
    """What the writer process would write."""
    files = {each.name: buffer.part(each.start, each.length).numpy().tobytes() for each in staged.images}
    return files | {plan.FILE_NAME: staged.plan}


def is_bytes(key: str) -> bool:
    """Whether a key is of no tensor: it comes later than tensors."""
    return key.endswith((contents.STRUCTURE, contents.PICKLED))


def stage(stager: Stager, flat: dict[str, torch.Tensor], started: dict[str, torch.Tensor] | None = None) -> Staged:
    """One save as the manager makes it; ``started``: with what it was begun, if not with the same."""
    begun = flat if started is None else started
    stager.start({key: value for key, value in begun.items() if not is_bytes(key)}, NOTHING)
    outline = stager.outline(flat, Ranks())
    if outline is not None:
        return stager.stage_again([outline], NOTHING)
    return stager.stage(flat, Ranks(), NOTHING)


def waited(folder: Path, flat: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """What a save that waits writes."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    persist.write(folder, flat, Ranks())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_staged_bytes_are_those_of_a_save_that_waits(tmp_path: Path, buffer: HostBuffer) -> None:
    """Every dtype, views that are not contiguous, lazy conjugates, scalars and empty tensors; and the plan."""
    flat = flat_of(state_of(3.0))

    staged = stage(Stager(buffer, Copier(overlapped=False)), flat)

    assert staged_files(staged, buffer) == waited(tmp_path, flat)


def test_the_plan_of_a_state_that_is_cut_as_before_is_used_again(
    tmp_path: Path, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With structures that have grown and shrunk; the files are those of a plan made anew."""
    stager = Stager(buffer, Copier(overlapped=False))
    state = state_of(1.0)
    stage(stager, flat_of(state))
    monkeypatch.setattr(Stager, "stage", None)  # no plan is made any more
    for value, text in ((2.0, "y" * 5000), (3.0, "")):
        state |= {name: each for name, each in state_of(value).items() if name not in {"model", "optimizer"}}
        state["notes"]["text"] = text
        flat = flat_of(state)

        staged = stage(stager, flat)

        assert staged_files(staged, buffer) == waited(tmp_path, flat)


@pytest.mark.parametrize("change", ["dtype", "shape", "one more", "one less", "another entry", "another world"])
def test_a_state_that_is_cut_otherwise_is_planned_anew(tmp_path: Path, buffer: HostBuffer, change: str) -> None:
    """And its files are right; so are those of the next one, which is cut as before."""
    stager, flat = Stager(buffer, Copier(overlapped=False)), flat_of({"a": [torch.ones(6), torch.zeros(4)], "b": 1})
    stage(stager, flat)
    ranks = Ranks()
    changed = {
        "dtype": {"a": [torch.ones(6, dtype=torch.int32), torch.zeros(4)], "b": 1},
        "shape": {"a": [torch.ones(2, 3), torch.zeros(4)], "b": 1},
        "one more": {"a": [torch.ones(6), torch.zeros(4), torch.ones(1)], "b": 1},
        "one less": {"a": [torch.ones(6)], "b": 1},
        "another entry": {"a": [torch.ones(6), torch.zeros(4)], "b": 1, "c": 2},
        "another world": {"a": [torch.ones(6), torch.zeros(4)], "b": 1},
    }
    ranks.world_size = 2 if change == "another world" else 1
    new = flat_of(changed[change])
    tensors = {key: value for key, value in new.items() if not is_bytes(key)}
    stager.start(tensors, NOTHING)

    assert stager.outline(new, ranks) is None
    assert staged_files(stager.stage(new, Ranks(), NOTHING), buffer) == waited(tmp_path, new)
    stager.start(tensors, NOTHING)
    assert stager.outline(new, Ranks()) is not None
    assert staged_files(stage(stager, new), buffer) == waited(tmp_path, new)


def test_a_tensor_of_an_unknown_kind_is_planned_each_time(buffer: HostBuffer) -> None:
    """How it is cut is its own matter."""

    class Own(torch.Tensor):
        """One that is cut as no other."""

    stager, flat = Stager(buffer, Copier(overlapped=False)), {"t": torch.ones(3).as_subclass(Own)}
    stage(stager, flat)
    stager.start(flat, NOTHING)

    assert stager.outline(flat, Ranks()) is None


def test_what_was_staged_keeps_no_tensor_alive(buffer: HostBuffer) -> None:
    """The training may have freed its state when the next save comes."""
    stager = Stager(buffer, Copier(overlapped=False))
    for _ in range(3):
        memory = np.ones(3)
        flat, watched = {"t": torch.from_numpy(memory)}, weakref.ref(memory)
        del memory
        stage(stager, flat)
        assert watched() is not None  # the control: a tensor keeps it
        flat.clear()

        assert watched() is None


def test_the_buffer_is_made_once_and_used_by_every_save(buffer: HostBuffer) -> None:
    """Also when numbers in it get longer; the bytes are those of the newest state."""
    stager = Stager(buffer, Copier(overlapped=False))
    seen = set()
    for value in (1.0, 20.0, 300.0):
        flat = flat_of(state_of(value))
        files = staged_files(stage(stager, flat), buffer)
        seen.add((buffer.size_bytes, buffer.part(0, 1).data_ptr()))
        assert flat["bf16"].view(torch.uint8).numpy().tobytes() in files["__0_0.tensors"]

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


def test_a_state_of_the_same_shape_is_copied_from_the_beginning(
    on_gpu: tuple[Stager, GpuCopier], buffer: HostBuffer
) -> None:
    """Started before all else, finished at the end, and copied once; the first save has no plan to go by."""
    stager, copier = on_gpu
    first = flat_of(state_of(2.0))
    stage(stager, first)
    assert [what for what, _ in copier.told] == ["start", "finish"]
    copier.told.clear()
    first["bf16"].fill_(9.0)
    second = first | {contents.structure_key("notes"): contents.as_bytes(b"y" * 500)}

    files = staged_files(stage(stager, second), buffer)

    copies = sum(value.is_floating_point() for value in second.values())
    assert copier.told == [("start", copies), ("finish", copies)]
    assert b"y" * 500 in files["__0_0.msgpack"]
    assert second["bf16"].view(torch.uint8).numpy().tobytes() in files["__0_0.tensors"]


def test_another_view_of_the_same_memory_is_copied_anew(on_gpu: tuple[Stager, GpuCopier]) -> None:
    """It begins at the same byte and has as many; the same view needs no second copy."""
    stager, copier = on_gpu
    memory = torch.arange(16.0).reshape(4, 4)
    stage(stager, {"t": memory.t()})
    for now, told in ((memory.t(), ["start", "finish"]), (memory, ["start", "end", "start", "finish"])):
        copier.told.clear()

        stage(stager, {"t": now}, started={"t": memory.t()})

        assert [what for what, _ in copier.told] == told


@pytest.mark.parametrize("change", ["another tensor", "one more", "one less", "larger"])
def test_a_state_that_is_not_what_was_begun_is_copied_anew(
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
    staged = stager.stage(changed, Ranks(), NOTHING)

    assert [what for what, _ in copier.told] == ["start", "end", "start", "finish"]
    assert staged_files(staged, buffer) == waited(tmp_path, changed)


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
