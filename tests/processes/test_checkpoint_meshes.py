# SPDX-License-Identifier: Apache-2.0
"""Eight real ranks of pipeline stages, shards (FSDP2) and tensor-parallel halves; restored on them and on other meshes.

One process imports torch and forks the ranks of all jobs: eight, three and two.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megascale_ops.checkpoint import latest, storage
from megascale_ops.checkpoint.manifest import Manifest, saved_by
from tests.matrix import wide
from tests.processes.warmed import env_of_programs, play_module

pytestmark = pytest.mark.processes

Reports = list[dict[str, Any]]


class Played(NamedTuple):
    """Where was saved, and what the ranks of each job reported."""

    folder: Path
    modes: list[str]
    jobs: dict[str, Reports]


# How each mode writes is test_checkpoint_modes'; the one that stays has a writer process, and moments by their names.
@pytest.fixture(scope="module", params=wide(["async", "sync async overlapped"], keep=["async"]))
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """All jobs, in one mode or in each."""
    folder = tmp_path_factory.mktemp("meshes")
    env = env_of_programs() | {"MEGASCALE_RECORDER": "0"}
    done = play_module("tests.fixtures.checkpoint_meshes", [str(folder), *request.param.split()], env, deadline_s=400)
    assert done.returncode == 0, done.stderr
    return Played(folder, request.param.split(), json.loads(done.stdout))


def test_every_rank_gets_its_shards_of_its_stage_back(played: Played) -> None:
    """Weights and moments to the bit, also where a plan was used again; what stands under a stage's own key, too."""
    for rank, report in enumerate(played.jobs["save"]):
        stage = rank // 4
        for mode in played.modes:
            restored = report[mode]
            assert (restored["step"], restored["unlike"], restored["same"]) == (2, True, True)
            assert restored["seen"] == {f"stage {stage}": stage + 10, "all": 7}
    assert not any(report["alarms"] for report in played.jobs["save"])


@pytest.mark.parametrize("job", ["no stages", "other stages"])
def test_another_mesh_with_other_stages_gets_the_same_numbers(played: Played, job: str) -> None:
    """Three ranks that share all layers; two stages that are cut after the third layer. Saved in each mode."""
    for report in played.jobs[job]:
        assert {(report[mode]["step"], report[mode]["same"]) for mode in played.modes} == {(2, True)}


@pytest.mark.parametrize("job", ["save", "no stages", "other stages"])
def test_each_file_is_read_by_one_rank(played: Played, job: str) -> None:
    """Whatever is replicated, and however it is cut: all ranks together read each byte once."""
    for mode in played.modes:
        sealed = latest.read_manifest(storage.final_folder(played.folder / mode, 2))
        assert isinstance(sealed, Manifest)
        sizes = {entry.name: entry.size_bytes for entry in sealed.files if entry.name.startswith("__")}
        read: dict[str, int] = {}
        for report in played.jobs[job]:
            for name, count in report[mode]["read"].items():
                read[name] = read.get(name, 0) + count
        assert read == sizes


def test_the_manifest_names_the_dimensions_of_the_mesh(played: Played) -> None:
    """As the job has called them."""
    for mode in played.modes:
        sealed = latest.read_manifest(storage.final_folder(played.folder / mode, 2))
        assert isinstance(sealed, Manifest)
        assert saved_by(sealed) == "8 ranks (pp=2 dp=2 tp=2)"


def test_a_flipped_bit_is_told_by_the_ranks_that_hold_the_same_shard(played: Played) -> None:
    """The two tensor-parallel ranks of one shard of one stage, with their places; the six others hold other things."""
    ((fault, ranks, text),) = played.jobs["save"][0]["flipped"]

    assert (fault, ranks) == ("replicas_differ", [4, 5])
    assert text.startswith("the replicas on ranks 4 (pp=1 dp=0 tp=0) and 5 (pp=1 dp=0 tp=1) differ in 1 of ")
    assert "model.2.norm.weight (1 of 4 elements differs, the first is number 0; 1 bit)" in text
    assert all(report["flipped"] == played.jobs["save"][0]["flipped"] for report in played.jobs["save"])


def test_an_optimizer_that_numbers_the_parameters_of_each_stage_is_refused(played: Played) -> None:
    """On every rank, before anything is written: the moments of one stage would take the place of the other's."""
    sentences = {report["refused"] for report in played.jobs["save"]}

    assert len(sentences) == 1
    assert "'optimizer' numbers its parameters, and number 0 is model.0.norm.weight on rank 0 and" in sentences.pop()
    assert not list((played.folder / "refused").glob("*step*"))
