# SPDX-License-Identifier: Apache-2.0
"""The 3D-parallel neighbourhood of a suspect: its peers in tensor, pipeline, data and expert groups.

A slow or hung rank delays those it communicates with, so its groups distinguish a culprit from a victim.
Where the mesh is not known, only the neighbours on its node are shown, with a note.

Pure: places in, groups of ranks out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.schema.history import Place
from megascale_ops.schema.identity import Mesh

AXES = {"tp": "tensor", "pp": "pipeline", "dp": "data", "ep": "expert"}
# 64 ranks of a group are drawn; of a data group of thousands the nearest suffice.
MOST_DRAWN = 64


class Group(NamedTuple):
    """Ranks that communicate with the suspect along one axis, itself among them; ``size`` counts those not drawn."""

    name: str
    ranks: tuple[int, ...]
    size: int


class Neighbourhood(NamedTuple):
    """A suspect with its groups; ``mesh`` is None where its place is not known."""

    rank: int
    node: str
    mesh: Mesh | None
    groups: tuple[Group, ...]


def neighbourhood(rank: int, places: Sequence[Place]) -> Neighbourhood:
    """Return a rank's groups in the mesh, or its node's ranks where the mesh is not known."""
    own = next((place for place in places if place.rank == rank), None)
    if own is None:
        return Neighbourhood(rank, "", None, ())
    node = _group("same node", rank, [place.rank for place in places if place.node == own.node])
    known = [axis for axis in AXES if getattr(own.mesh, axis) >= 0]
    if not known:
        return Neighbourhood(rank, own.node, None, (node,))
    groups = [_group(f"{AXES[axis]} group ({axis.upper()})", rank, _along(axis, own, places, known)) for axis in known]
    return Neighbourhood(rank, own.node, own.mesh, (*groups, node))


def _along(axis: str, own: Place, places: Sequence[Place], known: Sequence[str]) -> list[int]:
    """Return the ranks that differ along ``axis`` only.

    Expert groups are mostly cut out of the data axis, so that its place follows from the data place and is no axis of
    its own: then neighbours of a run of data places as long as the expert axis form one.
    """
    axes = [other for other in known if other != "ep"]
    derived = "ep" in known and len({_at(place, axes) for place in places}) == len(places)
    if axis == "ep" and derived:
        length = 1 + max(place.mesh.ep for place in places)
        fixed = [other for other in axes if other != "dp"]
        return [
            place.rank
            for place in places
            if _at(place, fixed) == _at(own, fixed) and place.mesh.dp // length == own.mesh.dp // length
        ]
    fixed = [other for other in (axes if derived else known) if other != axis]
    return [place.rank for place in places if _at(place, fixed) == _at(own, fixed)]


def _at(place: Place, axes: Sequence[str]) -> tuple[int, ...]:
    return tuple(getattr(place.mesh, axis) for axis in axes)


def _group(name: str, rank: int, ranks: Sequence[int]) -> Group:
    ordered = sorted(ranks)
    first = max(0, min(ordered.index(rank) - MOST_DRAWN // 2, len(ordered) - MOST_DRAWN))
    return Group(name, tuple(ordered[first : first + MOST_DRAWN]), len(ordered))
