# SPDX-License-Identifier: Apache-2.0
"""The controller of a run: a given one, or one that it starts for itself or for all nodes of its line.

A client of a controller can stop its jobs, and every user of the machine reaches loopback. So a controller that a run
starts requires a token: the user's when one is given, else one of its own, made at each start and kept in
``controller.token`` of the run folder, mode 0600. ``controller.json`` beside it holds both places, by which other
runners of the same launch line on this machine find it. On other machines they can't: nodes that meet at an address
beyond loopback must be given the same file.
"""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megascale_ops.errors import ControllerUnreachableError, MegascaleError, RefusedError, StrangerError, UsageError
from megascale_ops.link.whereabouts import state_root, token_file_of
from megascale_ops.runner.config import RunConfig
from megascale_ops.runner.meeting import Meeting, is_loopback
from megascale_ops.runner.preflight import check_controller, is_free
from megascale_ops.runner.services import companions

log = logging.getLogger(__name__)

# 60 s: nodes of one launch line start some seconds apart, and torchrun waits a minute for its store, too.
_MEETING_S = 60.0
_MEETING_POLL_S = 0.5


class Found(NamedTuple):
    """Where the controller is, the file with its token ("": none is known), and its process when we brought it up."""

    url: str
    token_file: str
    own: companions.Companion | None = None


def find_controller(config: RunConfig, meeting: Meeting, run_dir: Path, env: dict[str, str]) -> Found:
    """Return the controller of this run, brought up where there is none yet.

    Raises:
        MegascaleError: there is none and none could be brought up; one sentence.
    """
    if not meeting.controller:
        return _bring_up(run_dir, env, "127.0.0.1:0", config.token_file)
    host, _, port = meeting.serve.rpartition(":")
    # On one machine, another runner of the same launch line may have been faster, also since the test above.
    if meeting.serve and is_free(int(port)):
        listen = meeting.serve if is_loopback(host) else f"0.0.0.0:{port}"
        try:
            return _bring_up(run_dir, env, listen, config.token_file, meeting.controller)
        except MegascaleError:
            if is_free(int(port)):
                raise
    # torchrun's own line has no word for it: nodes of one launch start some seconds apart.
    wait_s = max(config.controller_wait_s, _MEETING_S) if meeting.in_place else config.controller_wait_s
    return wait_for_controller(
        meeting.controller, config.token_file, run_dir, wait_s, makes_token=meeting.in_place and not config.token_file
    )


def _bring_up(run_dir: Path, env: dict[str, str], listen: str, token_file: str, url: str = "") -> Found:
    companion, found = companions.start_controller(run_dir, env, listen, token_file, url)
    return Found(found.url, found.token_file, companion)


def wait_for_controller(
    url: str, token_file: str, run_dir: Path, deadline_s: float, *, makes_token: bool = False
) -> Found:
    """Wait for a controller that is being restarted, or that another runner of the same launch line brings up.

    Args:
        url: where it is.
        token_file: with its token; "": looked for in the run folders of this user, each time anew.
        run_dir: this run's folder.
        deadline_s: how long; 0: it is asked once.
        makes_token: the runner that brings it up makes a token, too, so a refused runner waits for that as well.

    Raises:
        ControllerUnreachableError: none answered in time; one sentence.
        StrangerError: another program is there.
        RefusedError: it is there and refuses.
        UsageError: it is there, and the token that was made is not to be found from here.
    """
    end_s = time.monotonic() + deadline_s
    is_told = False
    while True:
        file = token_file or token_file_of(url, _run_folders(run_dir))
        try:
            check_controller(url, file)
        except ControllerUnreachableError as error:
            if isinstance(error, StrangerError) or time.monotonic() >= end_s:
                raise _given_up(error, deadline_s) from error
            if not is_told:
                log.warning("%s; this run waits for it, for %g s", error, deadline_s)
                is_told = True
        except RefusedError as error:
            if not makes_token:
                raise
            if time.monotonic() >= end_s:
                raise UsageError(
                    f"the controller at {url} wants a token, and no run folder of this user on this machine says "
                    "which: give all runs of this job the same --token-file FILE (`megascale-ops token new FILE` makes "
                    "one)"
                ) from error
        else:
            if is_told:
                log.info("the controller at %s answers", url)
            return Found(url, file)
        time.sleep(_MEETING_POLL_S)


def _given_up(error: ControllerUnreachableError, waited_s: float) -> ControllerUnreachableError:
    """Return the error with how long was waited: not at all for a stranger, which becomes no controller."""
    if isinstance(error, StrangerError):
        return StrangerError(str(error))
    return ControllerUnreachableError(f"{error}; waited for {waited_s:g} s" if waited_s else str(error))


def _run_folders(run_dir: Path) -> Iterator[Path]:
    """Yield the folders where the runs of this user on this machine record their controllers."""
    yield run_dir
    try:
        yield from (folder for folder in state_root().iterdir() if folder.is_dir())
    except OSError:
        return
