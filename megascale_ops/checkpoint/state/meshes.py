# SPDX-License-Identifier: Apache-2.0
"""Find the mesh of the job in what a rank saves: that of its sharded tensors, or of which theirs is a part."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from megascale_ops.checkpoint.state.layout import Layout, laid_out

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def layout_of(mesh: "DeviceMesh") -> Layout:
    """How a device mesh lays out its ranks."""
    sizes, ranks = tuple(mesh.mesh.shape), mesh.mesh.flatten().tolist()
    return laid_out(mesh.mesh_dim_names or (None,) * len(sizes), sizes, ranks)


def mesh_in(tensors: Iterable[torch.Tensor]) -> Layout | None:
    """The largest mesh that sharded tensors are on; None: none is sharded."""
    meshes: dict[int, Any] = {}
    for tensor in tensors:
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None and id(mesh) not in meshes:
            meshes[id(mesh)] = mesh
    layouts = [layout_of(_whole(mesh)) for mesh in meshes.values()]
    return max(layouts, key=lambda layout: (layout.count, len(layout.sizes)), default=None)


def _whole(mesh: Any) -> Any:  # noqa: ANN401  a device mesh
    """The mesh that this one was cut out of: torch tells it by a method of its own, where it has one."""
    root = getattr(mesh, "_get_root_mesh", None)
    return root() if callable(root) else mesh
