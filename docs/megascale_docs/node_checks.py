# SPDX-License-Identifier: Apache-2.0
"""The reference of ``diagnose``: its checks with their deadlines, and what is expected of each model of GPU."""

from megascale_docs.markdown import code, page, prose, table
from megascale_ops.diagnostics.expected import models
from megascale_ops.diagnostics.figures import KINDS, shown
from megascale_ops.diagnostics.table import modules

_NEEDS = {"gpu": "a GPU", "gpus": "two GPUs", "torch": "torch"}


def node_checks() -> str:
    """Return the page: the checks, the figures that are compared, the models."""
    checks = (
        (
            code(name),
            prose(module.CHECK.about),
            ", ".join(_NEEDS[need] for need in module.CHECK.needs) or "-",
            f"{module.CHECK.quick_s:g} s",
            f"{module.CHECK.full_s:g} s",
            "alone" if module.CHECK.alone else "side by side",
        )
        for name, (_, module) in modules().items()
    )
    compared = (
        (code(kind.name), prose(kind.what), f"{kind.bar:.0%}", f"{kind.spread:.1%}", kind.severity)
        for kind in KINDS.values()
        if kind.bar
    )
    expected = (
        (
            model.title,
            code(name) + (f", {row.gpus} GPUs" if row.gpus else ""),
            shown(name, row.value),
            shown(name, row.value * row.floor),
            prose(row.source),
        )
        for model in models()
        for name, row in model.figures.items()
    )
    return page(
        "Checks of a node",
        "What `megascale-ops diagnose` measures; [how to use it](../how-to/check-a-node.md).",
        "## Checks",
        "A check is killed at its deadline, and that is its result then.",
        table(("check", "of", "needs", "deadline, quick", "deadline, full", "made"), checks),
        "## Figures that are compared with their equals",
        "One that falls short of its equals' median by the bar is named, or by more where equals differ by more than "
        "their usual spread (standard deviation) or its own repetitions do.",
        table(("figure", "what", "bar", "usual spread", "then it is"), compared),
        "## What is expected of a model",
        "Asked second: below the floor is a warning, below half bad.",
        table(("model", "figure", "expected", "floor", "source"), expected),
    )
