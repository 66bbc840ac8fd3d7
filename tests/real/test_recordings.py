# SPDX-License-Identifier: Apache-2.0
"""What happened to real jobs, replayed: the controller of today says what is right.

A file of ``recordings`` is a test by being there: right is what was said when it happened. Where that was wrong, or is
said otherwise since, ``NAME.toml`` beside it has the right verdicts (``right.verdicts``, as ``recording show`` prints
them), and ``wrong_today`` as anywhere here.
"""

from pathlib import Path

import pytest

from megascale_ops.replay.drive import replay
from megascale_ops.replay.export import contents
from megascale_ops.replay.files import Recording, read_recording
from megascale_ops.replay.verdicts import judged, recorded_incidents
from tests.real.cases import HERE, Case, read_case

RECORDINGS = HERE / "recordings"
FILES = sorted(RECORDINGS.glob("*.recording"))
# 16 kB: an incident of a few ranks; what is larger is thinned, cut shorter, or belongs to a benchmark.
MOST_BYTES = 16_000


def case_of(path: Path) -> Case | None:
    """Return what a person has said of a recording, if anything."""
    told = path.with_suffix(".toml")
    return read_case(told) if told.exists() else None


def right_of(path: Path, recording: Recording) -> list[str]:
    """Return the right verdicts of a recording, as people read them."""
    case = case_of(path)
    if case is not None:
        return [str(one) for one in case.right["verdicts"]]
    return [str(one) for one in judged(recorded_incidents(recording))]


def _row(path: Path) -> object:
    case = case_of(path)
    wrong = case.wrong_today if case is not None else ""
    return pytest.param(path, id=path.stem, marks=[pytest.mark.xfail(reason=wrong, strict=True)] if wrong else [])


@pytest.mark.parametrize("path", [_row(path) for path in FILES])
def test_a_real_job_is_judged_rightly_when_it_is_replayed(path: Path) -> None:
    """By the class, the ranks, the nodes and what is done; nothing else is said."""
    recording = read_recording(path)

    done = replay(recording)

    assert sorted(map(str, judged(done.incidents))) == sorted(right_of(path, recording))
    assert not done.refused


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recording_that_is_kept_is_small_and_names_nothing(path: Path) -> None:
    """It was made anonymous, by ``recording export`` or ``recording anonymize``."""
    held = contents(read_recording(path))

    assert path.stat().st_size <= MOST_BYTES
    assert held.is_anonymous
    assert held.job == "job"
    assert all(node.startswith("node-") for node in held.nodes)


def test_the_recordings_have_what_stops_what_slows_and_what_is_nothing() -> None:
    """Deaths, hangs, a lost node, a slow rank; and long waits of which nothing is said."""
    said = {str(one).split()[0] for path in FILES for one in judged(recorded_incidents(read_recording(path)))}

    assert {"killed", "exception", "frozen", "collective_order", "node_lost", "straggler"} <= said
    assert any(not judged(recorded_incidents(read_recording(path))) for path in FILES)


def test_what_a_person_says_is_right_counts_more_than_what_was_said(tmp_path: Path) -> None:
    """A recording of a wrong verdict is a test of the right one."""
    path = tmp_path / "killed.recording"
    path.write_bytes((RECORDINGS / "killed.recording").read_bytes())
    recording = read_recording(path)
    recorded = right_of(path, recording)

    path.with_suffix(".toml").write_text(
        'source = "here"\nshows = "a test"\n[given]\n[right]\nverdicts = ["frozen of rank 1 on node-1, restart"]\n'
    )

    assert recorded == ["killed of rank 1 on node-1, restart"]
    assert right_of(path, recording) == ["frozen of rank 1 on node-1, restart"]
