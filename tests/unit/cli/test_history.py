# SPDX-License-Identifier: Apache-2.0
"""``incidents`` and ``why`` after a run has ended: they read the journal that it left."""

import json
from pathlib import Path

import pytest

from megascale_ops.cli.main import main
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import open_store
from megascale_ops.schema.events import Event, Incident, Marks
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import EvidenceItem


def incident(number: int) -> Incident:
    """Return a recovered incident of the job gpt."""
    return Incident(
        id=f"gpt-{number}",
        job="gpt",
        round=number,
        state="recovered",
        marks=Marks(detected=1_790_000_000.0 + number),
        verdict=Verdict("killed", "exit status -9", 0.9, culprits=(number,), nodes=("node-a",)),
        evidence=(EvidenceItem("stderr", ok=True, rank=number, text="bye"),),
    )


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run that has ended after two incidents."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("MEGASCALE_CONTROLLER", raising=False)
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    folder = tmp_path / "megascale-ops" / "gpt"
    folder.mkdir(parents=True)
    store = open_store(f"sqlite:///{folder / 'journal.db'}")
    event = Event(wall_s=1.0, job="gpt", kind="verdict", text="rank 2", incident="gpt-2")
    store.submit(Batch(events=(event,), incidents=(incident(1), incident(2))))
    store.close()
    return folder


@pytest.mark.usefixtures("state")
def test_incidents_are_listed_from_the_journal(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has both, newest last, and says how to go on."""
    code = main(["incidents"])

    out = capsys.readouterr().out
    assert code == 0
    assert out.index("gpt-1") < out.index("gpt-2")
    assert out.endswith("`megascale-ops why gpt-2` explains the last one\n")


@pytest.mark.usefixtures("state")
def test_json_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs get defaults too, which messages leave out on the wire."""
    main(["incidents", "--json"])
    listed = json.loads(capsys.readouterr().out)
    main(["why", "gpt-2", "--json"])
    whole = json.loads(capsys.readouterr().out)

    assert [found["id"] for found in listed["incidents"]] == ["gpt-1", "gpt-2"]
    assert whole["step_before"] == -1
    assert whole["evidence"][0]["text"] == "bye"
    assert [event["kind"] for event in whole["events"]] == ["verdict"]


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize(("line", "title"), [(["why"], "gpt-2"), (["why", "gpt-1"], "gpt-1")])
def test_why_explains_the_one_named_or_the_newest(
    line: list[str], title: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a name it is the newest; in a pipe the card is plain text."""
    code = main(line)

    assert code == 0
    assert capsys.readouterr().out.startswith(f"incident {title} · recovered\n")


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize("asked", ["gpt-3", "gtp-2"])
def test_an_unknown_incident_is_one_sentence(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest incident that exists is named."""
    code = main(["why", asked])

    assert code == 2
    assert capsys.readouterr().err.startswith(f"megascale-ops: unknown incident '{asked}': did you mean 'gpt-")


def test_a_run_without_incidents(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing happened: ``incidents`` says so, ``why`` has nothing to explain."""
    (state / "journal.db").unlink()
    open_store(f"sqlite:///{state / 'journal.db'}").close()

    assert main(["incidents"]) == 0
    assert capsys.readouterr().out == f"no incidents (the run in {state})\n"
    assert main(["why"]) == 1
    assert "no incident has happened" in capsys.readouterr().err


def test_a_journal_that_is_not_ours_is_refused(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that only has the right name is one sentence, and left as it was."""
    (state / "journal.db").write_bytes(b"not a database at all, but long enough to be looked at" * 20)

    code = main(["incidents"])

    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("megascale-ops: store ")


def test_looking_changes_nothing(state: Path) -> None:
    """Reading a finished run's journal leaves its bytes as they were."""
    before = (state / "journal.db").read_bytes()

    main(["incidents"])
    main(["why", "gpt-1"])

    assert (state / "journal.db").read_bytes() == before
