# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the libraries that scripts train with: modules whose classes have the functions that are hooked."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


class Broken(Exception):  # noqa: N818  it is what a library raises here, not an error of ours
    """What a stand-in's function raises when it is told to."""


def stand_in(module: str, owner: str, functions: tuple[str, ...], answer: Callable[[], object]) -> ModuleType:
    """Return a module with a class ``owner`` (or, where that is "", functions of its own) that returns ``answer()``."""

    def work(*_: object, fail: bool = False) -> object:
        if fail:
            raise Broken(str(answer()))
        return answer()

    made = ModuleType(module)
    if owner:
        setattr(made, owner, type(owner, (), dict.fromkeys(functions, work)))
    else:
        for function in functions:
            setattr(made, function, work)
    return made


class Counter:
    """A trainer that counts its steps as a library does, and the optimizer that it steps."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.global_step = self.global_steps = 0
        self._step = step

    def advance(self, *_: object) -> None:
        """Make one step: the optimizer's first, then the trainer's own count."""
        self._step()
        self.global_step += 1
        self.global_steps += 1

    _take_model_step = advance


class Handler:
    """What tells a trainer's callbacks: it takes the state, and returns what it was given to control."""

    def on_train_begin(self, args: object, state: object, control: object, **_: Any) -> object:  # noqa: ANN401  the library's own
        """Training begins."""
        del args, state
        return control

    def on_step_end(self, args: object, state: object, control: object, **_: Any) -> object:  # noqa: ANN401  same
        """A step has ended."""
        del args, state
        return control


def holding(module: str, **owners: object) -> ModuleType:
    """Return a module with these names."""
    made = ModuleType(module)
    vars(made).update(owners)
    return made


def compiler(module: str) -> ModuleType:
    """Return the module in which torch says that it compiles; the handler's context is taken and given back."""
    from contextlib import nullcontext

    return holding(module, callback_handler=SimpleNamespace(install_callbacks=lambda *_: nullcontext()))
