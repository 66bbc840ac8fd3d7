# SPDX-License-Identifier: Apache-2.0
"""``logs --controller``: what is asked of a controller, what is shown of its answers, and when following ends."""

import re
from pathlib import Path

import pytest

from megascale_ops.cli.main import main
from megascale_ops.cli.sources import agent_logs
from megascale_ops.cli.sources.agent_logs import AgentLogs, required_text
from megascale_ops.errors import MegascaleError, RefusedError, UsageError
from megascale_ops.schema.events import JobStatus, Status
from megascale_ops.schema.runs import NEWEST, LogPart, LogQuery


class FakeLink:
    """A controller with one job, whose outputs are lines by round, rank and stream, on node ``n``."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.states = ["running"]  # the last one stays
        self.printed: dict[tuple[int, int, str], list[str]] = {}
        self.asked: list[LogQuery] = []
        self.silent: set[int] = set()
        self.then: list[tuple[tuple[int, int, str], str]] = []  # printed one by one, before each answer

    def status(self, _job: str | None = None) -> Status:
        """Say what state the job is in."""
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return Status(1, 0.0, 0.0, (JobStatus("gpt", state, 1, self.size, 0, 0.1, 0, 0.0),))

    def logs(self, _job: str, query: LogQuery) -> LogPart:
        """Answer as agents do; ``end`` counts lines."""
        self.asked.append(query)
        if query.rank in self.silent:
            raise RefusedError(f"the agent of node n, where rank {query.rank} ran, is not heard")
        if self.then:
            place, line = self.then.pop(0)
            self.printed.setdefault(place, []).append(line)
        rounds = sorted({at[0] for at in self.printed if at[1:] == (query.rank, query.stream)}, reverse=True)
        number = query.round if query.round != NEWEST else rounds[0]
        lines = self.printed[number, query.rank, query.stream]
        new = [line for line in lines[query.after :] if query.grep.lower() in line.lower()]
        shown = tuple(new[-query.lines :])
        is_cut = len(shown) < len(new)
        return LogPart(query.rank, number, query.stream, shown, tuple(rounds), len(lines), is_cut, node="n")


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> FakeLink:
    """A job of two ranks that have printed in two rounds; nothing waits."""
    monkeypatch.setattr(agent_logs.time, "sleep", lambda _: None)
    made = FakeLink()
    made.printed = {(1, 1, "stdout"): ["loss 9"], (2, 1, "stdout"): ["loss 8", "loss 7"], (2, 0, "stdout"): ["begin"]}
    return made


def logs_of(link: FakeLink, *ranks: int, round_: int = NEWEST) -> AgentLogs:
    """Return what is under test."""
    return AgentLogs(link, "gpt", ranks, ("stdout",), round_)  # type: ignore[arg-type]  # a fake


def test_the_end_of_each_output_is_shown_with_its_node(link: FakeLink, capsys: pytest.CaptureFixture[str]) -> None:
    """All ranks where none is named; what a script prints moves no cursor."""
    link.printed[2, 0, "stdout"].append("\x1b[2Jred")

    read = logs_of(link).show_end(1)

    assert read == 2
    assert capsys.readouterr().out == (
        "==> rank 0 on n, round 2, stdout <==\n\\x1b[2Jred\n==> rank 1 on n, round 2, stdout <==\nloss 7\n"
    )


def test_a_search_asks_for_a_plain_text_and_matches_here(link: FakeLink, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every round; the expression itself never leaves this machine."""
    logs_of(link, 1).search(re.compile(r"loss [79]$"))

    assert capsys.readouterr().out.splitlines() == ["round 1 rank 1 stdout: loss 9", "round 2 rank 1 stdout: loss 7"]
    assert {(query.grep, query.round) for query in link.asked} == {("", NEWEST), ("", 1)}
    link.asked.clear()
    logs_of(link, 1, round_=2).search(re.compile("loss .*7"))
    assert [(query.grep, query.round) for query in link.asked] == [("loss ", 2)]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("CUDA error", "CUDA error"),
        (r"loss=nan\.", "loss=nan."),
        (r"step \d+ of rank", " of rank"),
        ("^Traceback.*", "Traceback"),
        ("colou?r", "colo"),
        ("no+", "no"),
        ("a{2,3}bc", "bc"),
        ("a|b", ""),
        ("(?i)error", ""),
        ("[ab]c", ""),
        ("", ""),
        (".*", ""),
    ],
)
def test_what_a_match_must_hold_is_found_in_the_expression(pattern: str, text: str) -> None:
    """Nothing rather than too much: a controller passes over lines without it."""
    re.compile(pattern)

    assert required_text(pattern) == text


def test_what_comes_is_followed_into_the_next_round_until_the_job_is_over(
    link: FakeLink, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line once, the next round from its first, and nothing of what was shown."""
    logs = logs_of(link, 1)
    logs.show_end(1)
    link.states = ["running", "running", "finished"]
    link.then = [((2, 1, "stdout"), "loss 6"), ((3, 1, "stdout"), "anew"), ((3, 1, "stdout"), "loss 5")]

    logs.follow(None)

    out, err = capsys.readouterr()
    assert out.splitlines()[1:] == ["loss 7", "[1] loss 6", "[1] anew", "[1] loss 5"]
    assert err.splitlines() == ["--- round 2 ---", "--- round 3 ---"]


def test_a_node_that_does_not_answer_is_said_once_and_costs_nothing(
    link: FakeLink, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others' lines are shown."""
    link.silent = {0}
    logs = logs_of(link)

    assert logs.show_end(5) == 1
    link.states = ["finished"]
    logs.follow(None)

    out, err = capsys.readouterr()
    assert out == "==> rank 1 on n, round 2, stdout <==\nloss 8\nloss 7\n"
    assert err == "megascale-ops: the agent of node n, where rank 0 ran, is not heard\n"


def test_following_gives_up_after_a_minute_without_any_answer(link: FakeLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job lives, and no agent does."""
    now_s = iter(range(0, 1000, 10))
    monkeypatch.setattr(agent_logs.time, "monotonic", lambda: float(next(now_s)))
    link.silent = {0, 1}

    with pytest.raises(MegascaleError, match="no log of job gpt could be read for 60 s"):
        logs_of(link).follow(None)


def test_what_cannot_be_asked_is_one_sentence() -> None:
    """An unknown rank, too many ranks, a job that is not there."""
    for size, ranks, job, sentence in (
        (2, (5,), "gpt", "there is no rank 5: job gpt has ranks 0-1"),
        (12_288, (), "gpt", "12,288 ranks are too many at once: name 64 at most"),
        (0, (), "gpt", "job gpt has no ranks yet"),
        (2, (), "gtp", "unknown job 'gtp': did you mean 'gpt'?"),
    ):
        link = FakeLink(size)
        with pytest.raises(UsageError, match=re.escape(sentence)):
            AgentLogs(link, job, ranks, ("stdout",))  # type: ignore[arg-type]  # a fake


def test_files_of_this_node_come_before_a_controller_that_is_only_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With MEGASCALE_CONTROLLER only ranks without output here are asked of it; --controller asks it in any case."""
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("MEGASCALE_CONTROLLER", "http://127.0.0.1:9")
    folder = tmp_path / "megascale-ops/gpt"
    (folder / "logs/round-1/rank-0").mkdir(parents=True)
    (folder / "logs/round-1/rank-0/stdout.log").write_text("here\n")
    (folder / "journal.db").touch()

    assert main(["logs", "gpt", "--rank", "0"]) == 0
    assert "here" in capsys.readouterr().out
    for arguments in (["--rank", "1"], ["--rank", "0", "--controller", "http://127.0.0.1:9"]):
        assert main(["logs", "gpt", *arguments]) == 1
        assert "no controller answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert main(["logs", "gpt", "--controller", "http://127.0.0.1:9", "-n", "5000"]) == 2
    assert "--lines 5000 is too much for agents, which give 1,000" in capsys.readouterr().err
