# SPDX-License-Identifier: Apache-2.0
"""Styles for `torch.distributed.tensor.parallel.parallelize_module` that overlap.

They stand where `ColwiseParallel` and `RowwiseParallel` stand in a plan with sequence parallelism:

    parallelize_module(mlp, mesh, {"up": OverlapColwise(workspace), "down": OverlapRowwise(workspace)})

Parameters become DTensors laid out as torch's styles lay them out, so checkpoints and FSDP see no difference; only the
forward of the linear layer is another: it takes the local tensors and runs `ag_gemm` and `gemm_rs`.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.torch_api.layers import column_parallel, row_parallel, share


class _Overlap(ParallelStyle):
    """What both styles do: check, distribute the parameters, replace the forward.

    Args:
        workspace: symmetric memory of the mesh's ranks, made for the sizes that will pass.
        sequence_dim: dimension along which sequence-parallel tensors are cut (torch's examples cut dimension 1).
        use_local_output: return a plain tensor, as torch's styles do by default, else a DTensor.

    Raises (when applied):
        TypeError: the module is no linear layer.
        ValueError: the workspace serves other ranks than the mesh, which cannot share the features evenly, or the
            module's parameters are already laid out in another way.
    """

    def __init__(self, workspace: Workspace, *, sequence_dim: int = 0, use_local_output: bool = True) -> None:
        super().__init__()
        self.workspace = workspace
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def _check(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Linear:
        name = type(self).__name__
        if not isinstance(module, nn.Linear):
            raise TypeError(f"{name} parallelizes nn.Linear, got {type(module).__name__}")
        ours = dist.get_process_group_ranks(self.workspace.group)
        theirs = device_mesh.mesh.flatten().tolist()
        if device_mesh.ndim != 1 or ours != theirs:
            raise ValueError(
                f"{name}: the workspace serves ranks {ours}, the mesh holds {theirs} in {device_mesh.ndim} dimensions: "
                "make the workspace for the group of the mesh, Workspace(mesh.get_group(), ...)"
            )
        return module

    def _distribute(
        self, module: nn.Linear, mesh: DeviceMesh, weight: Shard, bias: Placement, forward: Callable[..., Any]
    ) -> nn.Linear:
        # torch would give the last ranks less; the operators want the same sizes on all.
        share(module.weight.shape[weight.dim], self.workspace, ("out_features", "in_features")[weight.dim])
        for name, placement in (("weight", weight), ("bias", bias)):
            parameter = getattr(module, name)
            if parameter is not None:
                if not isinstance(parameter, DTensor):
                    parameter = distribute_tensor(parameter, mesh, [placement], src_data_rank=self.src_data_rank)
                elif parameter.placements != (placement,) or parameter.device_mesh != mesh:
                    raise ValueError(
                        f"{type(self).__name__}: the {name} is already laid out as {parameter.placements} on "
                        f"{parameter.device_mesh}, and this style wants {placement} on {mesh}: one style a module"
                    )
                module.register_parameter(name, nn.Parameter(parameter, requires_grad=parameter.requires_grad))
        module.forward = MethodType(forward, module)  # type: ignore[method-assign]  # the point of a style
        return module

    def _enter(self, x: Tensor, mesh: DeviceMesh, layout: Placement) -> Tensor:
        """The local tensor of an input laid out as `layout`; a plain tensor is taken to be one."""
        if not isinstance(x, DTensor):
            return x
        if x.placements != (layout,):
            x = x.redistribute(mesh, [layout])
        return x.to_local()

    def _exit(self, out: Tensor, mesh: DeviceMesh, layout: Placement) -> Tensor:
        return out if self.use_local_output else DTensor.from_local(out, mesh, [layout], run_check=False)


class OverlapColwise(_Overlap):
    """The input is cut along the sequence and gathered; the weight is cut along its output features."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(linear: nn.Linear, x: Tensor) -> Tensor:
            x = self._enter(x, device_mesh, Shard(self.sequence_dim))
            out = column_parallel(
                x, _local(linear.weight), _local(linear.bias), self.workspace, sequence_dim=self.sequence_dim
            )
            return self._exit(out, device_mesh, Shard(out.ndim - 1))

        return self._distribute(self._check(module, device_mesh), device_mesh, Shard(0), Shard(0), forward)


class OverlapRowwise(_Overlap):
    """The weight is cut along its input features; the output is summed and cut along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(linear: nn.Linear, x: Tensor) -> Tensor:
            x = self._enter(x, device_mesh, Shard(x.ndim - 1))
            out = row_parallel(
                x, _local(linear.weight), _local(linear.bias), self.workspace, sequence_dim=self.sequence_dim
            )
            return self._exit(out, device_mesh, Shard(self.sequence_dim))

        return self._distribute(self._check(module, device_mesh), device_mesh, Shard(1), Replicate(), forward)


def _local(parameter: Tensor | None) -> Any:
    """This rank's part of a parameter, gradients included."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
