# SPDX-License-Identifier: Apache-2.0
"""Frameworks' phases and steps are told without a change to the script; the libraries here are stand-ins."""

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.recorder import hook_guard
from megascale_ops.recorder.frameworks import table
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.torch_hooks import import_hook
from tests.fakes.frameworks import Broken, Counter, Handler, compiler, holding, stand_in

# By module: the class (or "" for the module itself), and what its functions are.
DECLARED = [
    ("torch.distributed.checkpoint.state_dict_saver", "", "checkpoint", ("save", "async_save", "save_state_dict")),
    (
        "torch.distributed.checkpoint.state_dict", "", "checkpoint",
        tuple(f"{verb}_{what}state_dict" for verb in ("get", "set") for what in ("", "model_", "optimizer_")),
    ),
    ("torch.export", "", "export", ("export", "draft_export")),
    ("torch.onnx", "", "export", ("export",)),
    ("transformers.trainer", "Trainer", "eval", ("evaluate", "predict", "evaluation_loop", "prediction_loop")),
    ("transformers.trainer", "Trainer", "checkpoint", ("save_model", "_save_checkpoint")),
    ("transformers.trainer", "Trainer", "upload", ("push_to_hub",)),
    ("transformers.modeling_utils", "PreTrainedModel", "checkpoint", ("save_pretrained",)),
    ("accelerate.accelerator", "Accelerator", "checkpoint", ("save_state", "save_model", "save")),
    ("safetensors.torch", "", "checkpoint", ("save_file", "save_model")),
    ("lightning.pytorch.trainer.trainer", "Trainer", "eval", ("validate", "test", "predict")),
    ("pytorch_lightning.trainer.trainer", "Trainer", "checkpoint", ("save_checkpoint",)),
    ("lightning.pytorch.loops.evaluation_loop", "_EvaluationLoop", "eval", ("run",)),
    ("pytorch_lightning.loops.prediction_loop", "_PredictionLoop", "eval", ("run",)),
    ("lightning.fabric.fabric", "Fabric", "checkpoint", ("save",)),
    ("lightning_fabric.fabric", "Fabric", "checkpoint", ("save",)),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "checkpoint", ("save_checkpoint", "save_16bit_model")),
    ("deepspeed.runtime.pipe.engine", "PipelineEngine", "eval", ("eval_batch",)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins with nothing said yet."""
    monkeypatch.setattr(hook_guard, "_said", set())


@pytest.fixture
def box(tmp_path: Path) -> tuple[Recording, BoxReader]:
    """Return a recording and what reads its box."""
    identity = BoxIdentity(job="j", node="n", rank=0, local_rank=0, world_size=1, pid=1, start_ticks=1, round=1)
    return Recording(BoxWriter.create(tmp_path, identity)), BoxReader(tmp_path / "0.box")


@pytest.fixture
def put(box: tuple[Recording, BoxReader], monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], ModuleType]:
    """Return a function that takes a module as imported just now, and hooks it."""

    def hook(module: ModuleType) -> ModuleType:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        table._put(module.__name__, table.HOOKS[module.__name__], box[0])
        return module

    return hook


@pytest.mark.parametrize(("module", "owner", "phase", "functions"), DECLARED)
def test_a_function_is_a_phase(
    box: tuple[Recording, BoxReader],
    put: Callable[[ModuleType], ModuleType],
    module: str,
    owner: str,
    phase: str,
    functions: tuple[str, ...],
) -> None:
    """Inside the phase is shown, afterwards what was before; results and exceptions are the function's own."""
    recording, reader = box
    every = tuple(name for at, of, _, names in DECLARED for name in names if (at, of) == (module, owner))
    made = put(stand_in(module, owner, every, lambda: reader.progress().phase))
    target: Any = getattr(made, owner)() if owner else made

    recording.phase_begin("epoch")
    for function in functions:
        assert getattr(target, function)() == phase
        assert reader.progress().phase == "epoch"
        with pytest.raises(Broken, match=phase):
            getattr(target, function)(fail=True)
        assert reader.progress().phase == "epoch"


def test_a_checkpoint_inside_an_evaluation(
    box: tuple[Recording, BoxReader], put: Callable[[ModuleType], ModuleType]
) -> None:
    """A phase inside another is shown as long as it lasts; then the outer one goes on."""
    reader = box[1]
    phases = []
    saving = put(stand_in("accelerate.accelerator", "Accelerator", ("save_state",), lambda: reader.progress().phase))

    def evaluate() -> str:
        phases.extend([reader.progress().phase, saving.Accelerator().save_state(), reader.progress().phase])
        return "scores"

    trainer = put(stand_in("transformers.trainer", "Trainer", ("evaluate", "predict", "save_model"), evaluate))

    assert trainer.Trainer().evaluate() == "scores"
    assert phases == ["eval", "checkpoint", "eval"]


def test_another_threads_save_is_not_the_ranks_phase(
    box: tuple[Recording, BoxReader], put: Callable[[ModuleType], ModuleType]
) -> None:
    """A background save neither begins a phase nor ends the one of the thread that trains."""
    recording, reader = box
    seen = []
    made = put(stand_in("safetensors.torch", "", ("save_file",), lambda: seen.append(reader.progress().phase)))
    recording.phase_begin("eval")

    thread = threading.Thread(target=made.save_file)
    thread.start()
    thread.join(10)

    assert [*seen, reader.progress().phase] == ["eval", "eval"]


def test_a_compilation_is_a_phase(box: tuple[Recording, BoxReader], put: Callable[[ModuleType], ModuleType]) -> None:
    """Compilations nest, and one that fails ends."""
    recording, reader = box
    handler = put(compiler("torch._dynamo.callback")).callback_handler
    recording.backward_begin()

    with pytest.raises(Broken), handler.install_callbacks("dynamo", "0/0"):  # noqa: PT012  the phase inside is the matter
        with handler.install_callbacks("lazy", "0/1"):
            pass
        inside = reader.progress().phase
        raise Broken

    assert (inside, reader.progress().phase) == ("compile", "backward")


def test_a_library_of_another_shape_is_left_alone(
    box: tuple[Recording, BoxReader], put: Callable[[ModuleType], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    """What it lacks is said in one line each; what it has is seen all the same."""
    reader = box[1]

    made = put(stand_in("transformers.trainer", "Trainer", ("evaluate", "save_model"), lambda: reader.progress().phase))

    assert made.Trainer().evaluate() == "eval"
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(
        "megascale-ops recorder: the hook on transformers's Trainer.predict steps aside: AttributeError"
    )


def test_a_library_without_the_class_is_left_alone(
    box: tuple[Recording, BoxReader], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says so, and the import goes on."""
    monkeypatch.setitem(sys.modules, "accelerate.accelerator", ModuleType("accelerate.accelerator"))
    monkeypatch.setattr(table, "HOOKS", {"accelerate.accelerator": table.HOOKS["accelerate.accelerator"]})

    table.watch(box[0])

    assert capsys.readouterr().err.startswith(
        "megascale-ops recorder: the hook on accelerate.accelerator steps aside: AttributeError"
    )


class Optimizer:
    """Something that steps; the recording knows it by identity only."""


def handlers() -> ModuleType:
    """Return the module with what tells a trainer's callbacks, of its own for each test."""
    return holding("transformers.trainer_callback", CallbackHandler=type("CallbackHandler", (Handler,), {}))


def stepper(recording: Recording) -> Callable[[], None]:
    """Return a function that is what the hooks see of a step."""
    optimizer = Optimizer()

    def step() -> None:
        recording.backward_begin()
        recording.backward_end()
        recording.optimizer_begin(optimizer)
        recording.optimizer_end(optimizer)

    return step


def test_the_trainers_steps_are_the_ranks(
    box: tuple[Recording, BoxReader], put: Callable[[ModuleType], ModuleType]
) -> None:
    """A new run's first step is number 1, as the trainer counts; what the callbacks return is theirs."""
    recording, reader = box
    handler = put(handlers()).CallbackHandler()
    trainer, numbers = Counter(stepper(recording)), []

    assert handler.on_train_begin("args", trainer, "control", model=None) == "control"
    before = reader.progress().step
    for _ in range(3):
        trainer.advance()
        numbers.append((reader.progress().step, trainer.global_step))
        handler.on_step_end("args", trainer, "control")

    assert before == -1
    assert numbers == [(1, 1), (2, 2), (3, 3)]
    assert (reader.progress().step_is_absolute, reader.progress().steps_seen) == (True, 3)


@pytest.mark.parametrize(
    ("module", "owner", "function"),
    [
        ("lightning.pytorch.loops.training_epoch_loop", "_TrainingEpochLoop", "advance"),
        ("pytorch_lightning.loops.training_epoch_loop", "_TrainingEpochLoop", "advance"),
        ("deepspeed.runtime.engine", "DeepSpeedEngine", "_take_model_step"),
    ],
)
def test_steps_after_a_restart_are_the_frameworks(
    box: tuple[Recording, BoxReader],
    put: Callable[[ModuleType], ModuleType],
    capsys: pytest.CaptureFixture[str],
    module: str,
    owner: str,
    function: str,
) -> None:
    """A trainer that went on from step 40 makes step 41 first; a step that is left out is counted as it counts it."""
    recording, reader = box
    loop = type(owner, (Counter,), {"save_checkpoint": lambda _: None})
    put(holding(module, **{owner: loop}))
    trainer = loop(stepper(recording))
    trainer.global_step = trainer.global_steps = 40

    getattr(trainer, function)()
    first = reader.progress().step
    trainer.global_step = trainer.global_steps = 42  # the scaler has left one out
    getattr(trainer, function)()

    assert (first, reader.progress().step, reader.progress().step_is_absolute) == (41, 43, True)
    assert capsys.readouterr().err == ""


def test_a_second_trainer_takes_no_step_back(
    box: tuple[Recording, BoxReader], put: Callable[[ModuleType], ModuleType]
) -> None:
    """A cross validation of three folds with two steps each makes six steps."""
    recording, reader = box
    handler = put(handlers()).CallbackHandler()

    for _ in range(3):
        trainer = Counter(stepper(recording))
        handler.on_train_begin("args", trainer, "control")
        for _ in range(2):
            trainer.advance()
            handler.on_step_end("args", trainer, "control")

    assert (reader.progress().step, reader.progress().steps_seen) == (6, 6)


def test_a_state_without_a_number_is_left_alone(
    box: tuple[Recording, BoxReader],
    put: Callable[[ModuleType], ModuleType],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A trainer that counts in another way trains on; the recorder counts by itself, and says so once."""
    recording, reader = box
    handler = put(handlers()).CallbackHandler()
    step = stepper(recording)

    for _ in range(2):
        handler.on_step_end("args", object(), "control")
        step()

    assert (reader.progress().step, reader.progress().step_is_absolute) == (1, False)
    assert capsys.readouterr().err.count("the steps of transformers steps aside") == 1


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a package that asks for itself while it is imported, as one does that imports torch in its first line."""
    folder = tmp_path / "megascale_early"
    folder.mkdir()
    (folder / "__init__.py").write_text("from megascale_early import core\nfrom megascale_early import later\n")
    (folder / "core.py").write_text("import megascale_asks\nclass Saver:\n    pass\n")
    (folder / "later.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield tmp_path / "megascale_asks.py"
    sys.meta_path[:] = before
    import_hook._under_way.clear()
    for name in [name for name in sys.modules if name.startswith("megascale_early")]:
        del sys.modules[name]


def test_a_package_that_imports_torch_first_is_hooked(package: Path) -> None:
    """Its own module is under way when the hooks are put in place: it is hooked when it is whole, and not before."""
    seen: list[bool] = []
    package.write_text("import builtins\nbuiltins.megascale_ask()\n")
    sys.modules["builtins"].megascale_ask = lambda: import_hook.once_imported(  # type: ignore[attr-defined]
        "megascale_early.core", lambda: seen.append(hasattr(sys.modules["megascale_early.core"], "Saver"))
    )

    try:
        importlib.import_module("megascale_early")
    finally:
        del sys.modules["builtins"].megascale_ask  # type: ignore[attr-defined]
        sys.modules.pop("megascale_asks", None)

    assert seen == [True]
