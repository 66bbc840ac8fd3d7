# SPDX-License-Identifier: Apache-2.0
"""The loop on the page about checkpoints runs as it stands there: ended in the middle, it goes on to the same bits."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "checkpoints.md"


def loop() -> str:
    """The first block of Python below its heading."""
    found = re.search(r"## In a loop of your own\n+```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found.group(1)


class Loader:
    """Knows where it is."""

    def __init__(self) -> None:
        self._position = 0

    def batch(self) -> float:
        """The next number."""
        self._position += 1
        return float(self._position)

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"position": self._position}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        """Go there."""
        self._position = saved["position"]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int = -1) -> list[torch.Tensor]:
    """Run it with a small model that drops out; its weights."""
    monkeypatch.setenv("MEGASCALE_CHECKPOINT_DIR", str(folder))
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    loader = Loader()

    def train(step: int) -> None:
        if step == fails_at:
            raise InterruptedError
        model(torch.randn(4, 3) + loader.batch()).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    names: dict[str, Any] = {"steps": 10, "every": 3, "loader": loader}
    exec(loop(), names | {"model": model, "optimizer": optimizer, "scheduler": scheduler, "train": train})  # noqa: S102
    return [parameter.detach() for parameter in model.parameters()]


def test_the_loop_of_the_page_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From step 6 of 10, with its generators, and at the end nothing is left to do."""
    whole = run(tmp_path / "whole", monkeypatch)
    with pytest.raises(InterruptedError):
        run(tmp_path / "halves", monkeypatch, fails_at=8)

    halves = run(tmp_path / "halves", monkeypatch)

    assert all(map(torch.equal, whole, halves))
    assert all(map(torch.equal, whole, run(tmp_path / "halves", monkeypatch, fails_at=0)))
