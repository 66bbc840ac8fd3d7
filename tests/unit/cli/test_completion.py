# SPDX-License-Identifier: Apache-2.0
"""What Tab offers: verbs, options, and the names that there are now; a shell is never told of an error."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import BashComplete

from megascale_ops.chaos.faults import MATRIX
from megascale_ops.cli.main import VERBS, main, program
from megascale_ops.cli.sources.names import names
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import open_store
from megascale_ops.schema.events import Incident
from megascale_ops.schema.health import Verdict


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the state folder, with a run that left two incidents, one that left none, and a folder that is none."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("MEGASCALE_CONTROLLER", raising=False)
    root = tmp_path / "megascale-ops"
    (root / "empty").mkdir(parents=True)
    (root / "llama" / "logs").mkdir(parents=True)
    (root / "gpt").mkdir()
    store = open_store(f"sqlite:///{root / 'gpt' / 'journal.db'}")
    found = [Incident(f"gpt-{number}", "gpt", 1, verdict=Verdict("killed", "", 0.9)) for number in (1, 2)]
    store.submit(Batch(incidents=tuple(found)))
    store.close()
    return root


def offered(line: str, ask: Any = names) -> list[str]:  # noqa: ANN401  any source of names
    """Return what Tab offers at the end of a line."""
    *before, last = line.split(" ")
    return [one.value for one in BashComplete(program, {"obj": ask}, "x", "_X").get_completions(before, last)]


def test_verbs_and_options_are_offered() -> None:
    """Verbs of the table, words behind a verb, options once a dash is typed."""
    assert offered("") == list(VERBS)
    assert offered("jo") == ["jobs"]
    assert offered("policy s") == ["set", "show"]
    assert "--token-file" in offered("status --to")
    assert offered("bad-hardware ") == ["forget", "list"]


def test_verbs_are_offered_without_loading_one() -> None:
    """A Tab behind the program's name costs no more than ``--help``."""
    probe = (
        "import sys\nfrom click.shell_completion import BashComplete\nfrom megascale_ops.cli.main import program\n"
        "found = BashComplete(program, {}, 'x', '_X').get_completions([], 's')\n"
        "print(len(found), sorted(name for name in sys.modules if name.startswith('megascale_ops.cli.s')))"
    )

    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == f"{sum(name.startswith('s') for name in VERBS)} []\n"


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("line", ["logs ", "status --job ", "report ", "policy set ", "clean ", "token issue --job "])
def test_jobs_are_offered(line: str) -> None:
    """Wherever a job is meant: runs that left something here, in place and by option."""
    assert sorted(offered(line)) == ["gpt", "llama"]
    assert offered(f"{line}l") == ["llama"]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("line", ["why ", "incidents --before ", "trace --incident ", "why --job gpt "])
def test_incidents_are_offered_the_newest_first(line: str) -> None:
    """Of the newest run that tells of any, or of the job that the line names."""
    assert offered(line) == ["gpt-2", "gpt-1"]


def test_faults_settings_and_examples_are_offered() -> None:
    """All faults of the matrix; settings and what may be done about each class; what can be copied."""
    assert offered("chaos run ") == [row.name for row in MATRIX]
    assert offered("chaos run sigkill sigs") == ["sigstop"]
    assert "silence_floor_s=" in offered("policy set gpt silence")
    assert "frozen=warn" in offered("run --policy frozen")
    assert offered("examples copy ") == [
        "bench_moe_gpt.py",
        "train_coded.py",
        "train_coded_admm.py",
        "train_gpt.py",
        "train_gpt_plain.py",
        "train_moe_gpt.py",
        "deploy",
    ]


@pytest.mark.parametrize("line", ["why ", "logs ", "status --controller http://127.0.0.1:9 --job "])
def test_where_nothing_is_known_nothing_is_offered(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No run, no controller, a fault of ours: silence, for the shell would write an error into the line."""

    def broken(_kind: str, _given: dict[str, Any]) -> Iterable[tuple[str, str]]:
        raise RuntimeError("a fault of ours")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("MEGASCALE_CONTROLLER", raising=False)

    assert offered(line) == []
    assert offered(line, broken) == []
    assert offered(line, None) == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_lines(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They call the program back in the way that it understands, for the name that is typed."""
    assert main(["completion", shell]) == 0

    lines = capsys.readouterr().out
    assert f"_MEGASCALE_OPS_COMPLETE={shell}_complete" in lines
    assert "megascale-ops" in lines


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence says which there are."""
    assert main(["completion", "csh"]) == 2

    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err
