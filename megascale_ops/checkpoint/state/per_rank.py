# SPDX-License-Identifier: Apache-2.0
"""What each rank has of its own: a place in its share of the data, random generators.

    state = {"model": model, "loader": PerRank(loader), "random": RandomStates()}

A name means the same on every rank, so of two loaders under one name the place of one would be saved. Here each rank
has a key of its own below the name; a restore gives it what stands there. Importing this costs no torch.
"""

import random
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from megascale_ops.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Absent = Literal["refuse", "keep"]


class PerRank:
    """An entry of a state of which each rank has its own: a data loader, or anything else with ``state_dict``.

    Args:
        value: this rank's; what has ``state_dict`` and ``load_state_dict``.
        absent: where nothing was saved for this rank, as in a job of more ranks than before: "refuse" to restore, or
            "keep" what it is.
        process_group: by whose ranks they are told apart; None means the default one.

    Raises:
        UsageError: ``absent`` is another word, or ``value`` has no such methods.
    """

    def __init__(
        self,
        value: Any,  # noqa: ANN401  whatever has the two methods
        *,
        absent: Absent = "refuse",
        process_group: "ProcessGroup | None" = None,
    ) -> None:
        if absent not in ("refuse", "keep"):
            raise UsageError(f"absent={absent!r} means nothing: it is refuse or keep")
        if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
            kind = type(value).__qualname__
            raise UsageError(f"PerRank takes what has state_dict and load_state_dict; {kind} has not both")
        self._value, self._absent, self._process_group = value, absent, process_group

    def state_dict(self) -> dict[str, Any]:
        """This rank's, under its number."""
        return {self._key: self._value.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take what was saved for this rank.

        Raises:
            ValueError: nothing was, and that is to be refused.
        """
        if self._key in saved:
            self._value.load_state_dict(saved[self._key])
        elif self._absent == "refuse":
            raise ValueError(
                f"nothing was saved for {self._key}: restore with as many ranks as saved it, leave the entry out, or "
                'say PerRank(..., absent="keep")'
            )

    @property
    def _key(self) -> str:
        from megascale_ops.checkpoint.ranks import Ranks

        return f"rank {Ranks(self._process_group).rank}"


class RandomStates:
    """The random generators of each rank: Python's, NumPy's where it is loaded, torch's on the CPU and on all GPUs.

    A rank for which none were saved keeps its own, as does a GPU.

    Args:
        more: generators of your own by name, of ``random.Random``, ``numpy.random.Generator`` or ``torch.Generator``.
        process_group: by whose ranks they are told apart; None means the default one.

    Raises:
        UsageError: one of ``more`` is of another kind.
    """

    def __init__(self, more: Mapping[str, Any] | None = None, *, process_group: "ProcessGroup | None" = None) -> None:
        self._each = PerRank(_Generators(dict(more or {})), absent="keep", process_group=process_group)

    def state_dict(self) -> dict[str, Any]:
        """This rank's generators as they are now."""
        return self._each.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Set them as they were."""
        self._each.load_state_dict(saved)


class _Generators:
    """This process's; as plain values, so that a rank without any is no tensor that is missing."""

    def __init__(self, more: dict[str, Any]) -> None:
        self._more = more
        for name, generator in more.items():
            if not (hasattr(generator, "getstate") or hasattr(generator, "bit_generator") or _is_of_torch(generator)):
                kind = type(generator).__qualname__
                raise UsageError(f"RandomStates takes generators of random, NumPy and torch; {name!r} is a {kind}")

    def state_dict(self) -> dict[str, Any]:
        import torch

        found: dict[str, Any] = {"python": random.getstate(), "torch": _bytes(torch.get_rng_state())}
        if "numpy" in sys.modules:
            found["numpy"] = sys.modules["numpy"].random.get_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
            found["cuda"] = [_bytes(state) for state in torch.cuda.get_rng_state_all()]
        return found | {"more": {name: _state_of(generator) for name, generator in self._more.items()}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        import torch

        random.setstate(saved["python"])
        torch.set_rng_state(_tensor(saved["torch"]))
        if "numpy" in saved:
            import numpy as np

            np.random.set_state(saved["numpy"])  # noqa: NPY002  the generator that a script may draw from
        for device, state in enumerate(saved.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(state), device)
        for name, generator in self._more.items():
            if name in saved["more"]:
                _set(generator, saved["more"][name])


def _state_of(generator: Any) -> Any:  # noqa: ANN401  one of three kinds
    if hasattr(generator, "getstate"):
        return generator.getstate()
    return _bytes(generator.get_state()) if _is_of_torch(generator) else generator.bit_generator.state


def _set(generator: Any, state: Any) -> None:  # noqa: ANN401  same
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif _is_of_torch(generator):
        generator.set_state(_tensor(state))
    else:
        generator.bit_generator.state = state


def _is_of_torch(generator: object) -> bool:
    return hasattr(generator, "get_state") and hasattr(generator, "initial_seed")


def _bytes(state: Any) -> bytes:  # noqa: ANN401  a tensor of bytes
    return bytes(state.cpu().numpy().tobytes())


def _tensor(state: bytes) -> Any:  # noqa: ANN401  same
    import torch

    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
