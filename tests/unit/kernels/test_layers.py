# SPDX-License-Identifier: Apache-2.0
"""The layers as modules: how they are made, cut, printed, saved and copied; results: tests/processes/."""

import copy
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

import torch.distributed as dist  # noqa: E402 - after the skips
from megascale_kernels.errors import Unsupported  # noqa: E402
from megascale_kernels.memory.workspace import Workspace  # noqa: E402
from megascale_kernels.torch_api.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megascale_kernels.torch_api.parallel_styles import OverlapColwise, OverlapRowwise  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor.parallel import ParallelStyle  # noqa: E402


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def workspace(group: None) -> Workspace:  # noqa: ARG001 - it must be there
    """A workspace for float32."""
    return Workspace(max_rows=64, max_gather_cols=32, max_scatter_cols=32, dtype=torch.float32, device="cpu")


@pytest.fixture
def third_of_four(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """The same, as rank 2 of four would see it; nothing is sent."""
    monkeypatch.setattr(workspace, "world_size", 4)
    monkeypatch.setattr(workspace, "rank", 2)
    return workspace


def test_a_rank_holds_its_share(third_of_four: Workspace) -> None:
    """Weights are cut as [out/W, in] and [out, in/W]; a row-parallel bias is whole. Types and devices as asked."""
    first = ColumnParallelLinear(8, 16, third_of_four, dtype=torch.float64)
    second = RowParallelLinear(16, 8, third_of_four, device="meta")

    assert {name: tuple(p.shape) for name, p in first.named_parameters()} == {"weight": (4, 8), "bias": (4,)}
    assert {name: tuple(p.shape) for name, p in second.named_parameters()} == {"weight": (8, 4), "bias": (8,)}
    assert (first.weight.dtype, second.weight.dtype) == (torch.float64, torch.float32)
    assert second.weight.device.type == "meta"


def test_a_whole_layer_is_cut(third_of_four: Workspace) -> None:
    """`from_linear` takes this rank's part, its type, and what is frozen."""
    linear = nn.Linear(8, 16, dtype=torch.bfloat16)
    linear.bias.requires_grad_(requires_grad=False)

    first = ColumnParallelLinear.from_linear(linear, third_of_four)
    second = RowParallelLinear.from_linear(linear, third_of_four)

    assert torch.equal(first.weight, linear.weight[8:12])
    assert torch.equal(first.bias, linear.bias[8:12])
    assert torch.equal(second.weight, linear.weight[:, 4:6])
    assert torch.equal(second.bias, linear.bias)
    assert (first.weight.dtype, first.weight.requires_grad, first.bias.requires_grad) == (torch.bfloat16, True, False)
    assert first.weight.data_ptr() != linear.weight[8:12].data_ptr()


def test_without_bias(workspace: Workspace) -> None:
    """A layer without a bias has none, in its state and when it is called."""
    layers = [
        ColumnParallelLinear(8, 16, workspace, bias=False),
        RowParallelLinear.from_linear(nn.Linear(16, 8, bias=False), workspace),
    ]

    assert [list(layer.state_dict()) for layer in layers] == [["weight"], ["weight"]]
    assert layers[1](layers[0](torch.randn(4, 8))).shape == (4, 8)


def test_features_that_cannot_be_shared_are_refused(third_of_four: Workspace) -> None:
    """The message names the number and the ranks."""
    with pytest.raises(ValueError, match="out_features=18 cannot be shared evenly by 4 ranks"):
        ColumnParallelLinear(8, 18, third_of_four)
    with pytest.raises(ValueError, match="in_features=18 cannot be shared evenly by 4 ranks"):
        RowParallelLinear(18, 8, third_of_four)


def test_a_layer_says_what_it_is(third_of_four: Workspace) -> None:
    """The whole layer's sizes, and which part this is."""
    text = repr(RowParallelLinear(16, 8, third_of_four, bias=False))

    assert text == "RowParallelLinear(in_features=16, out_features=8, bias=False, weight=[8, 4] of rank 2/4)"


def test_a_layer_is_saved_and_copied(workspace: Workspace) -> None:
    """Its state is plain tensors; a copy has parameters of its own and the same workspace."""
    layer = ColumnParallelLinear(8, 16, workspace)

    twin = copy.deepcopy(layer)
    twin.load_state_dict(layer.state_dict())

    assert all(type(tensor) is torch.Tensor for tensor in layer.state_dict().values())
    assert twin.workspace is workspace
    assert twin.weight.data_ptr() != layer.weight.data_ptr()


@pytest.mark.parametrize("sequence_dim", [0, 1])
def test_a_pair_is_the_whole_mlp(workspace: Workspace, sequence_dim: int) -> None:
    """On one rank two layers cut from whole ones compute the same, whichever dimension is the sequence."""
    up, down = nn.Linear(8, 16), nn.Linear(16, 8)
    x = torch.randn(3, 5, 8)

    first = ColumnParallelLinear.from_linear(up, workspace, sequence_dim=sequence_dim, save_gathered=True)
    second = RowParallelLinear.from_linear(down, workspace, sequence_dim=sequence_dim)

    torch.testing.assert_close(second(torch.relu(first(x))), down(torch.relu(up(x))))


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize(("shape", "sequence_dim"), [((8,), 0), ((8, 8), 1), ((8, 8), -1), ((2, 8, 8), 2), ((8, 8), 5)])
def test_features_are_never_taken_for_the_sequence(
    workspace: Workspace, layer: type[nn.Module], shape: tuple[int, ...], sequence_dim: int
) -> None:
    """An input without the dimension that the sequence should be is refused, also where it is square."""
    made = layer(8, 8, workspace, sequence_dim=sequence_dim)

    with pytest.raises(Unsupported, match=rf"x is \[.*its sequence should be dimension {sequence_dim}"):
        made(torch.randn(*shape))


def test_a_sequence_that_cannot_be_dealt_out_is_named_as_the_layer_sees_it(third_of_four: Workspace) -> None:
    """The dimension in the message is that of the layer's own input, not of the matrix that it makes of it."""
    layer = RowParallelLinear(32, 8, third_of_four, sequence_dim=1)

    with pytest.raises(Unsupported, match=r"dimension 1 of x, 6 of \[2, 6, 8\], cannot be dealt out to 4 ranks"):
        layer(torch.randn(2, 6, 8))


def test_autocast_does_what_it_does_to_linear(group: None) -> None:  # noqa: ARG001 - it must be there
    """Under autocast a float32 layer runs in bfloat16, in a workspace for that."""
    half = Workspace(max_rows=64, max_gather_cols=32, dtype=torch.bfloat16, device="cpu")
    layer = ColumnParallelLinear(8, 16, half, dtype=torch.float32)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(torch.randn(4, 8))

    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("style", [OverlapColwise, OverlapRowwise])
def test_styles_refuse_what_they_cannot_do(
    workspace: Workspace, style: type[ParallelStyle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only linear layers, and only with a workspace for the mesh's ranks."""
    mesh = init_device_mesh("cpu", (1,))

    with pytest.raises(TypeError, match=r"parallelizes nn\.Linear, got Embedding"):
        style(workspace)._apply(nn.Embedding(4, 4), mesh)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    with pytest.raises(ValueError, match=r"the workspace serves ranks \[0, 1\], the mesh holds \[0\]"):
        style(workspace)._apply(nn.Linear(4, 4), mesh)
