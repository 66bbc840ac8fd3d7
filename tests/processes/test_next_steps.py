# SPDX-License-Identifier: Apache-2.0
"""Every command that is offered works where it is shown: it exits with 0 and says something.

Under a controller that several runs share and that wants a token, which is where a command without its address and
token finds nothing, and under a run's own.
"""

import html
import os
import re
import shlex
import signal
import subprocess

import pytest

from megascale_ops.link import BlockingLink
from tests.processes.launch import ENDLESS, PLAIN, Launch, all_have_made, until

pytestmark = pytest.mark.processes

# In a sentence between backticks, on a card behind "next", in `incidents` and in `top`; in a report.
OFFERED = re.compile(r"`(megascale-ops [^`]+)`|^\W*next {2,}(\S.*?)[\s│]*$|<code>(.*?)</code>", re.MULTILINE)


def offered(text: str) -> list[str]:
    """Return the commands that a text offers, each once."""
    found = (html.unescape(next(filter(None, groups))) for groups in OFFERED.findall(text))
    return list(dict.fromkeys(found))


def hold(launch: Launch, commands: list[str]) -> None:
    """Run each command as a user would; all must exit with 0 and say something."""
    launch.env["COLUMNS"] = "400"
    assert commands
    for command in commands:
        program, *arguments = shlex.split(command)
        if program == "megascale-ops":
            done = launch.command(*arguments, cwd=launch.tmp_path)
        else:
            line = [program, *arguments]
            done = subprocess.run(line, cwd=launch.tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr or done.stdout}"
        assert done.stdout.strip(), f"{command} says nothing"


def told(launch: Launch, *options: str) -> str:
    """Return what the verbs that lead on say, of a run that is found by these options."""
    launch.env["COLUMNS"] = "400"  # so that no command is cut at the screen's edge
    verbs = (("why",), ("incidents",), ("top", "--once"), ("status",), ("bad-hardware", "list"))
    page = launch.tmp_path / "report.html"
    assert launch.command("report", "toy", f"--out={page}", *options, is_cold=True).returncode == 0
    return "\n".join([*(launch.command(*verb, *options).stdout for verb in verbs), page.read_text()])


@pytest.mark.matrix
def test_under_a_shared_controller_every_offered_command_works(launch: Launch) -> None:
    """While the run lives and when it is over: address and token are named; a killed rank leads to no empty file."""
    token = launch.tmp_path / "shared token"
    assert launch.command("token", "new", str(token), is_cold=True).returncode == 0
    port_file = launch.tmp_path / "port"
    where = ("--listen=127.0.0.1:0", f"--port-file={port_file}", f"--token-file={token}")
    launch.spawn("controller", *where, f"--store=sqlite:///{launch.tmp_path}/ops.db", log="controller.log")
    until(port_file.exists, "the controller to serve")
    options = (f"--controller=http://127.0.0.1:{port_file.read_text().strip()}", f"--token-file={token}")

    run = launch.run(*ENDLESS, options=options, script=PLAIN)
    with BlockingLink(options[0].partition("=")[2], token.read_text().strip()) as link:
        until(lambda: any(all_have_made(20, job) for job in link.status().jobs), "steps")
        os.kill(launch.pid(1), signal.SIGKILL)
        until(lambda: "restarting as round 2" in launch.output(), "the verdict")
        until(lambda: any(one.state == "recovered" for one in link.incidents("toy").incidents), "the recovery")
    living = told(launch, *options)
    hold(launch, offered(launch.output() + living))
    launch.enough()
    code = launch.finish(run)

    assert code == 0, launch.output()
    watched = launch.command("status", "toy", "--watch", *options).stdout
    assert "tells the rest" in watched
    said = watched + launch.output() + told(launch, *options)
    hold(launch, [one for one in offered(said) if " page " not in one])
    card = launch.command("why", *options).stdout
    assert "kernel log" in card
    assert "who sent the signal: Linux keeps no record" in " ".join(card.split())
    assert "stderr of rank 1: it wrote nothing" in card
    assert ".kernel.txt" in offered(card)[0]


def test_under_a_run_s_own_controller_every_offered_command_works(launch: Launch) -> None:
    """Also those that are offered when it is over and the journal alone is left."""
    run = launch.run(*ENDLESS, script=PLAIN)
    launch.until_step(20)
    os.kill(launch.pid(1), signal.SIGKILL)
    until(lambda: [one for one in launch.incidents() if one.state == "recovered"], "the recovery")
    hold(launch, offered(launch.output() + told(launch)))
    launch.enough()
    code = launch.finish(run)

    assert code == 0, launch.output()
    over = launch.output().rpartition("job toy: ")[2]
    hold(launch, offered(over + launch.command("why").stdout + launch.command("incidents").stdout))
