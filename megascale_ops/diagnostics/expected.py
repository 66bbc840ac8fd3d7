# SPDX-License-Identifier: Apache-2.0
"""What a GPU of a model is expected to do: one table of numbers a model, each with its source (``models/*.toml``).

Second to its equals (``equals.py``): the median of a fleet moves with power, cooling and versions, these do not. So a
figure below its ``floor`` is a warning, below half of what is expected it is bad; above nothing is said.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megascale_ops.diagnostics.figures import KINDS, shown
from megascale_ops.diagnostics.report import CheckFinding, Figure

MODELS = Path(__file__).parent / "models"
# Half: no clock, no power limit that is set on purpose and no version costs as much.
_BAD = 0.5


class Expected(NamedTuple):
    """One number.

    Attributes:
        value: In base units.
        floor: Share of it below which something is said.
        source: Where it is from, with its date.
        gpus: It holds for so many GPUs together; 0: for whatever number.
    """

    value: float
    floor: float
    source: str
    gpus: int = 0


class Model(NamedTuple):
    """One model, as NVML names it: the first whose ``names`` contain it."""

    title: str
    names: tuple[str, ...]
    figures: dict[str, Expected]


@cache
def models() -> tuple[Model, ...]:
    """Return all models that there is a table for."""
    return tuple(_read(path) for path in sorted(MODELS.glob("*.toml")))


def _read(path: Path) -> Model:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    figures = {name: Expected(**row) for name, row in table["figures"].items()}
    return Model(table["title"], tuple(table["names"]), figures)


def model_of(name: str) -> Model | None:
    """Return the table of a GPU by NVML's name of it; None where there is none."""
    return next((model for model in models() if any(known == name for known in model.names)), None)


def judge(figure: Figure) -> CheckFinding | None:
    """Hold one figure against its model's; ``peers`` of a GPU's figure begins with NVML's name of the model."""
    model = model_of(figure.peers.partition(",")[0])
    expected = model.figures.get(figure.name) if model is not None else None
    if model is None or expected is None or (expected.gpus and f", {expected.gpus} GPUs" not in figure.peers):
        return None
    share = figure.value / expected.value
    if share >= expected.floor:
        return None
    text = (
        f"{figure.of}: {KINDS[figure.name].what} at {shown(figure.name, figure.value)}, {share:.0%} of the "
        f"{shown(figure.name, expected.value)} of {model.title} ({expected.source})"
    )
    return CheckFinding(
        "bad" if share < _BAD else "warn",
        figure.of,
        text,
        "compare with other nodes (`diagnose --compare`), look at power limit and clocks: nvidia-smi -q -d PERFORMANCE",
    )
