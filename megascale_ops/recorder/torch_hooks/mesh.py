# SPDX-License-Identifier: Apache-2.0
"""Where in the device mesh this rank is, so that only ranks of the same kind are compared.

Every ``torch.distributed.DeviceMesh`` that the script makes with names for its dimensions gives some of the rank's
coordinates (``init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))``). The first mesh that names an axis
decides it: slices and flattened meshes come later. Hybrid sharding has two data-parallel dimensions, of which
the rank's place is one number, as in ``mesh["dp_replicate", "dp_shard"]`` flattened.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megascale_ops.recorder.hook_guard import guarded
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.torch_hooks.import_hook import after_import

NAME = "the hook on device meshes"
_MODULE = "torch.distributed.device_mesh"
# What torchtitan, DTensor's tutorials, Megatron, NeMo and Accelerate call their dimensions.
AXES = {
    "tp": "tp", "tensor": "tp", "tensor_parallel": "tp", "model": "tp",
    "pp": "pp", "pipe": "pp", "pipeline": "pp", "stage": "pp",
    "dp": "dp", "data": "dp", "data_parallel": "dp", "fsdp": "dp", "ddp": "dp", "replicate": "dp", "shard": "dp",
    "dp_replicate": "dp", "dp_shard": "dp",
    "ep": "ep", "expert": "ep",
}  # fmt: skip


def coordinates(names: Sequence[str], place: Sequence[int], sizes: Sequence[int]) -> dict[str, int]:
    """Return this rank's place on each known axis.

    Args:
        names: of the mesh's dimensions, outermost first.
        place: this rank's index in each of them.
        sizes: how many there are in each of them.
    """
    found: dict[str, int] = {}
    for name, index, size in zip(names, place, sizes, strict=True):
        axis = AXES.get(name.lower())
        if axis is not None:
            found[axis] = found.get(axis, 0) * size + index
    return found


def watch(recording: Recording) -> None:
    """Look at each device mesh that the script makes, once it imports them."""
    if _MODULE in sys.modules:
        _patch(recording)
    else:
        after_import(_MODULE, lambda: _patch(recording))


def _patch(recording: Recording) -> None:
    kind = sys.modules[_MODULE].DeviceMesh
    note = guarded(NAME, lambda mesh: recording.place(_read(mesh)))
    kind.__init__ = _noted(kind.__init__, note)


def _noted(original: Callable[..., None], note: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  as the function itself
        original(self, *args, **kwargs)
        note(self)

    return made


def _read(mesh: Any) -> dict[str, int]:  # noqa: ANN401  a DeviceMesh, which is not imported here
    names, place = mesh.mesh_dim_names, mesh.get_coordinate()
    if not names or place is None:
        return {}
    return coordinates(names, place, tuple(mesh.shape))
