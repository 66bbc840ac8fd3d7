# SPDX-License-Identifier: Apache-2.0
"""See when a model that trains is put into evaluation mode, and when it goes back: ``Module.eval``, ``Module.train``.

These are functions of the class that a script calls by itself, no hooks on modules: a compiled graph does not change.
What follows from it is decided by what happens in between (see ``anatomy``). ``eval`` is called once and hands on to
``train`` for each part of a model, so only a model in training mode counts, and ``train`` looks at one attribute first.
"""

import functools
from typing import Any

from megascale_ops.recorder.hook_guard import guarded_about
from megascale_ops.recorder.recording.recording import Recording

NAME = "the hook on evaluation"


def watch(recording: Recording) -> None:
    """Put the two hooks in."""
    from torch.compiler import is_compiling
    from torch.nn import Module

    evaluates, trains = guarded_about(NAME, recording.model_evaluates), guarded_about(NAME, recording.model_trains)
    evaluate, train = Module.eval, Module.train

    @functools.wraps(evaluate)
    def eval_seen(self: Any) -> Any:  # noqa: ANN401  as the function itself
        if not is_compiling() and getattr(self, "training", False):
            evaluates(self)
        return evaluate(self)

    @functools.wraps(train)
    def train_seen(self: Any, mode: bool = True) -> Any:  # noqa: ANN401  as the function itself
        if not is_compiling() and recording.evaluated is not None and mode:
            trains(self)
        return train(self, mode)

    Module.eval = eval_seen  # type: ignore[method-assign]  # as all hooks do
    Module.train = train_seen  # type: ignore[method-assign]  # as all hooks do
