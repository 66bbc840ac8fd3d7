# SPDX-License-Identifier: Apache-2.0
"""``diagnose`` for a stranger: odd names, places that take no file, a machine without room; one sentence each."""

import json
import tempfile

import jsonschema
import msgspec
import pytest
from click.testing import CliRunner

from megascale_ops.cli.diagnose import remote, verb
from megascale_ops.cli.diagnose.telling import is_watched
from megascale_ops.diagnostics.children import Child
from megascale_ops.diagnostics.report import CheckResult, Fact, Figure, NodeReport
from megascale_ops.errors import ControllerUnreachableError, MegascaleError, UsageError
from megascale_ops.link import BlockingLink
from megascale_ops.schema.health import CheckAsk, SelfCheck, SelfCheckView


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--check", "frobnicate"), r"unknown check 'frobnicate'.*there are paths|there are cpu"),
        (("--name", "a\nb"), "can't be used: take 1 to 100 letters"),
        (("--name", "x" * 3000), "can't be used: take 1 to 100 letters"),
        (("--out", "/dev/null"), "is a device, a pipe or a folder"),
        (("--between", "127.0.0.1:7100", "--nnodes", "2", "--node-rank", "0", "--name", "\x1b[31m"), "can't be used"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_measured(words: tuple[str, ...], sentence: str) -> None:
    """A name is shown on a terminal and becomes a label; ten minutes of measuring must not end at a device."""
    told = CliRunner().invoke(verb.diagnose, ["--check", "limits", *words] if "--between" not in words else [*words])

    assert isinstance(told.exception, UsageError)
    with pytest.raises(UsageError, match=sentence):
        raise told.exception


def test_a_machine_without_a_temporary_folder_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finds none where no folder takes a file; the folder of runs is measured alone."""

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "gettempdir", none)
        patched.setattr("megascale_ops.diagnostics.examination.look_at", lambda paths: dict.fromkeys(paths, ("", 1)))
        chosen = verb._usual_folders()

    assert len(chosen) == 1


def test_too_few_descriptors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback, and no process is left."""

    def full(_name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.memfd_create", full)

    with pytest.raises(MegascaleError, match=r"Too many open files\): raise the limit of open files \(ulimit -n\)"):
        Child()


@pytest.mark.parametrize(("kind", "watched"), [("xterm-256color", True), ("dumb", False), ("unknown", False)])
def test_a_terminal_that_can_not_go_back_is_not_written_over(
    kind: str, *, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines would stand behind each other with the codes between them."""
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)

    assert is_watched() == watched


def test_what_is_printed_as_json_follows_a_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, and nothing that the schema does not name; the control: a report without a member is refused."""
    figure = Figure("swap_used", "node", 0.0, (1.0,), "equals")
    results = (CheckResult("swap", "good", 1.0, (), (figure,), (Fact("how", "node", "so"),)),)
    report = NodeReport(1, "program", "node", "quick", 0.0, 1.0, results)
    monkeypatch.setattr("megascale_ops.diagnostics.examination.examine", lambda *_: report)
    told = CliRunner().invoke(verb.diagnose, ["--json"], catch_exceptions=False)
    schema = msgspec.json.schema(NodeReport)
    for described in schema["$defs"].values():
        described["additionalProperties"] = False
        described["required"] = list(described["properties"])

    jsonschema.validate(json.loads(told.stdout), schema)
    short = json.loads(told.stdout)
    del short["results"][0]["figures"]

    with pytest.raises(jsonschema.ValidationError, match="figures"):
        jsonschema.validate(short, schema)


class Away(BlockingLink):
    """A controller that is away for a while, as a client sees it."""

    def __init__(self, answers: list[SelfCheckView | None]) -> None:
        self.answers = answers

    def checked_node(self, node: str) -> SelfCheckView:
        """Answer, or be away."""
        answer = self.answers.pop(0)
        if answer is None:
            raise ControllerUnreachableError(f"no controller answers for {node}")
        return answer


@pytest.mark.parametrize(
    ("answers", "trouble"),
    [
        ([None, None, SelfCheckView("b", "done", "id", check=SelfCheck("b", "quick", "good"))], ""),
        ([None, SelfCheckView("b", "done", "older", check=SelfCheck("b", "quick", "good"))], "started again meanwhile"),
        ([None] * 9, "no end in 130 s; the controller is away"),
    ],
)
def test_a_controller_that_is_away_for_a_while_ends_no_check(
    answers: list[SelfCheckView | None], trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again until the check's deadline; one that has forgotten the check, or stays away, is a sentence."""
    passed = iter(range(0, 1000, 30))
    monkeypatch.setattr(remote.time, "sleep", lambda _s: None)
    monkeypatch.setattr(remote.time, "monotonic", lambda: float(next(passed)))
    asked = SelfCheckView("b", "waiting", "id")

    if trouble:
        with pytest.raises(MegascaleError, match=trouble):
            remote._wait_for(Away(answers), asked, CheckAsk())
    else:
        assert remote._wait_for(Away(answers), asked, CheckAsk()).status == "good"
