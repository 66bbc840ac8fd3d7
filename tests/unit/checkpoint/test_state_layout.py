# SPDX-License-Identifier: Apache-2.0
"""A mesh by the names of its dimensions: told with each rank, kept in the manifest, and not believed blindly."""

from math import prod
from types import SimpleNamespace

import msgspec
import pytest
import torch

from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.checkpoint.manifest import Manifest, ManifestError
from megascale_ops.checkpoint.state.layout import Layout, laid_out, named, of_job
from megascale_ops.checkpoint.state.meshes import mesh_in
from megascale_ops.checkpoint.state.variants import Variants
from megascale_ops.checkpoint.trust.verdicts import judge, odd_ones

CUBE = laid_out(("pp", "dp", "tp"), (2, 3, 4), range(24))


def test_a_rank_has_its_place_in_the_mesh() -> None:
    """The last dimension varies fastest; ranks in another order are told as they stand; one outside has no place."""
    turned = laid_out(("dp", "tp"), (2, 2), (4, 6, 5, 7))

    assert CUBE.spelled() == "pp=2 dp=3 tp=4"
    assert [CUBE.place_of(rank) for rank in (0, 5, 23, 24, -1)] == [
        "pp=0 dp=0 tp=0",
        "pp=0 dp=1 tp=1",
        "pp=1 dp=2 tp=3",
        "",
        "",
    ]
    assert [turned.place_of(rank) for rank in (6, 5, 0)] == ["dp=0 tp=1", "dp=1 tp=0", ""]
    assert CUBE.ranks == ()
    assert laid_out((None, "tp"), (1, 1), (0,)).spelled() == "dim0=1 tp=1"


def test_of_several_meshes_the_largest_is_the_jobs_and_each_rank_is_found() -> None:
    """Pipeline stages that made a mesh each; a rank in none is told by its number."""
    first, second = laid_out(("tp",), (2,), (0, 1)), laid_out(("tp",), (3,), (2, 3, 4))

    layouts = of_job([first, first, second, None, second])

    assert layouts == (second, first)
    assert [named(rank, layouts) for rank in (1, 4, 7)] == ["1 (tp=1)", "4 (tp=2)", "7"]
    assert of_job([None]) == ()


class Mesh:
    """What a device mesh tells of itself, and the one that it was cut out of."""

    def __init__(self, shape: tuple[int, ...], names: tuple[str, ...] | None, root: "Mesh | None" = None) -> None:
        self.mesh, self.mesh_dim_names, self._root = torch.arange(prod(shape)).reshape(shape), names, root

    def _get_root_mesh(self) -> "Mesh":
        return self._root or self


def test_the_mesh_of_the_job_is_found_in_what_is_saved() -> None:
    """That of which a tensor's is a part; the one that the user gives comes first."""
    whole = Mesh((2, 2, 3), ("pp", "dp", "tp"))
    tensors = [SimpleNamespace(device_mesh=Mesh((3,), ("tp",), whole)), torch.ones(2)]

    found = mesh_in(tensors)  # type: ignore[arg-type]  # as sharded ones
    given = Variants(Mesh((4, 3), ("dp", "cp")))  # type: ignore[arg-type]  # as a device mesh

    assert found == Layout(("pp", "dp", "tp"), (2, 2, 3))
    assert given.take_apart({"x": 1}, Allowed(), {}).layout == Layout(("dp", "cp"), (4, 3))
    assert mesh_in([torch.ones(2)]) is None


def test_who_is_blamed_is_told_with_its_place() -> None:
    """A person looks for a rank by its place in the mesh."""
    (one,) = odd_ones([{("layout", "model.w"): digest} for digest in (b"a", b"a", b"b")])
    (pair,) = odd_ones([{("layout", "model.w"): digest} for digest in (b"a", b"b")])

    (corrupt,) = judge([one], {}, 1, [5, 6, 7], [CUBE])
    (differ,) = judge([pair], {}, 1, [5, 6], [CUBE])

    assert corrupt.text.startswith("rank 7 (pp=0 dp=1 tp=3) holds other values than the 2 other replicas")
    assert differ.text.startswith("the replicas on ranks 5 (pp=0 dp=1 tp=1) and 6 (pp=0 dp=1 tp=2) differ")


def test_a_manifest_keeps_the_mesh_and_one_without_reads_as_before() -> None:
    """With its names; a manifest that says nothing of one has no such field."""
    sealed = Manifest(7, 24, 0.0, (), mesh=CUBE)
    plain = Manifest(7, 24, 0.0, ())

    assert manifests.decode(manifests.encode(sealed)) == sealed
    assert manifests.saved_by(sealed) == "24 ranks (pp=2 dp=3 tp=4)"
    assert manifests.saved_by(plain) == "24 ranks"
    assert b"mesh" not in manifests.encode(plain)


@pytest.mark.parametrize(
    "mesh",
    [
        Layout(("dp",), (2, 2)),
        Layout(("dp",), (0,)),
        Layout(("dp",), (2,), (1,)),
        Layout(("d" * 41,), (2,)),
        Layout(("d",) * 17, (1,) * 17),
    ],
)
def test_a_mesh_that_cannot_be_is_a_fault_of_its_manifest(mesh: Layout) -> None:
    """Whoever may write the folder may write a manifest, too."""
    with pytest.raises(ManifestError, match="its mesh can't be one"):
        manifests.decode(manifests.encode(Manifest(7, 24, 0.0, (), mesh=mesh)))


def test_what_stands_in_a_foreign_mesh_acts_on_no_terminal() -> None:
    """Its names are shown without control characters."""
    sealed = msgspec.structs.replace(Manifest(7, 1, 0.0, ()), mesh=Layout(("\x1b[2J",), (1,)))

    assert manifests.mesh_of(manifests.decode(manifests.encode(sealed))) == "?[2J=1"
