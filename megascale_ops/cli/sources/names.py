# SPDX-License-Identifier: Apache-2.0
"""Names that can be typed: jobs, incidents, faults, settings of a policy, examples. For completion by the shell.

Each is asked as the verbs ask: a controller that is named, else the runs of this machine. A shell waits meanwhile, so
no controller is waited for longer than a verb would wait to see whether it is there.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from megascale_ops.cli.sources.locate import Wanted, narrowed, run_folders
from megascale_ops.errors import MegascaleError
from megascale_ops.schema.policy import ACTION_WORDS, SETTINGS

# The newest 100: more than fits on a screen.
MOST_OFFERED = 100


def names(kind: str, given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names of a kind, each with a word about it; see ``terminal.completion.Offers``."""
    if kind == "job":
        yield from _jobs(given)
    elif kind == "incident":
        yield from _incidents(given)
    elif kind == "fault":
        from megascale_ops.chaos.faults import MATRIX

        yield from ((row.name, row.text) for row in MATRIX)
    elif kind == "setting":
        from megascale_ops.schema.fault_classes import FAULTS

        yield from ((f"{name}=", str(default)) for name, default in SETTINGS.items())
        yield from ((f"{row.name}={word}", row.meaning) for row in FAULTS.values() for word in ACTION_WORDS)
    elif kind == "example":
        from megascale_ops.shipped import shipped

        yield from ((path.name, "") for path in sorted(shipped("examples").glob("*.py")))
        yield "deploy", "an agent on every node"


def _jobs(given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the jobs of a controller that is named, else the run folders of this machine, the newest first."""
    url = given.get("controller")
    if url:
        from megascale_ops.link import BlockingLink

        with suppress(MegascaleError), BlockingLink(url, _token(url, given)) as link:
            yield from ((job.job, job.state) for job in link.status().jobs)
        return
    from megascale_ops.cli.sources.runs import is_run_folder

    yield from ((folder.name, "") for folder in run_folders(Wanted()) if is_run_folder(folder))


def _incidents(given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield incidents, the newest first: of the run that is meant, or of the newest one."""
    from megascale_ops.cli.sources.history import open_history

    job = given.get("job") or ""
    wanted = Wanted(given.get("controller") or "", job, given.get("run_dir") or "")
    with open_history(narrowed(wanted, ""), given.get("token_file")) as history:
        for one in reversed(history.incidents(job or None, MOST_OFFERED).incidents):
            yield one.id, one.verdict.fault if one.verdict is not None else one.state


def _token(url: str, given: dict[str, Any]) -> str | None:
    from megascale_ops.cli.sources.locate import Place, read_token

    return read_token(given.get("token_file"), Place(url=url))
