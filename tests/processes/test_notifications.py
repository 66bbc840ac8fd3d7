# SPDX-License-Identifier: Apache-2.0
"""A real run tells people: a killed rank's card arrives at a web server and a mail server, and no secret in any log."""

import os
import signal
from pathlib import Path

import pytest

from tests.fakes.notified import MailTarget, WebTarget
from tests.processes.launch import ENDLESS, PLAIN, Launch, until

pytestmark = pytest.mark.processes


def test_a_killed_rank_is_told_to_all_targets_but_those_that_want_worse(launch: Launch, tmp_path: Path) -> None:
    """`run --config FILE` alone: its own controller tells of the kill, once, and of the end where that is asked for."""
    with WebTarget() as web, WebTarget() as pager, MailTarget() as mail:
        config = tmp_path / "ops.toml"
        config.write_text(f"""
[controller.notify.targets.chat]
kind = "slack"
url = "{web.url}"
solved = true
[controller.notify.targets.pager]
kind = "webhook"
url = "{pager.url}"
severity = "critical"
[controller.notify.targets.list]
kind = "email"
server = "{mail.server}"
security = "none"
sender = "ops@h.example"
to = ["a@h.example"]
""")
        tried = launch.command("notify", "test", "--config", str(config), is_cold=True)
        assert tried.returncode == 0, tried.stderr + tried.stdout
        assert tried.stdout.count("sent in") == 3

        run = launch.run(*ENDLESS, options=(f"--config={config}",), script=PLAIN)
        launch.until_step(20)
        os.kill(launch.pid(1), signal.SIGKILL)
        # The kill, and its end: a run that is back within a second sends both at once.
        until(lambda: "solved" in web.got[-1]["text"] and len(web.got) > 1, f"the end to be told: {web.got}")
        until(lambda: len(mail.got) > 1, f"the mail of it: {mail.got}")
        launch.enough()
        code = launch.finish(run)

    assert code == 0, launch.output()
    assert "rank 1" in web.got[1]["text"]
    assert web.got[-1]["text"].startswith(("solved: ", "error, solved: "))
    assert len(web.got) in (2, 3)
    assert web.got[1]["attachments"][0]["title_link"].endswith("/#incident=toy-1")
    assert [one["event"] for one in pager.got] == ["test"]
    told = [str(one["Subject"]).removeprefix("[megascale-ops] ").partition(":")[0] for one in mail.got]
    assert told in (["test", "error"], ["test", "error, solved"])
    for path in [*launch.run_dir().rglob("*.log"), tmp_path / "run.log"]:
        assert "SECRET" not in path.read_text(errors="replace"), path
    launch.assert_nothing_left()
