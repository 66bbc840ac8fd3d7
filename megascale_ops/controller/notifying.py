# SPDX-License-Identifier: Apache-2.0
"""Hand incidents to the notifications: a look a second at those that have changed, and nothing that waits.

What is sent, and how often, ``notify`` decides; it sends from a thread of its own. A bug here is told once a minute and
harms no judgement.
"""

import asyncio
import logging
import socket
from collections import Counter

from megascale_ops.controller.config import ControllerConfig, parse_listen
from megascale_ops.controller.loop import Loop
from megascale_ops.notify.choose import Choice
from megascale_ops.notify.message import compose
from megascale_ops.notify.outbox import Outbox

log = logging.getLogger(__name__)

LOOK_S = 1.0
_SICK_S = 60.0
# 2 s: the run that brought a controller up gives it three to end.
_LAST_WORDS_S = 2.0


class Notifying:
    """The notifications of one controller.

    Args:
        config: whose targets are told.
        loop: whose incidents they are told of.

    Raises:
        UsageError: a file with an address or a password can't be used.
    """

    def __init__(self, config: ControllerConfig, loop: Loop) -> None:
        self._loop = loop
        self._page = config.notify.page
        self._choice = Choice(config.notify.targets)
        self._outbox = Outbox(config.notify.targets)
        self._kinds = {name: target.kind for name, target in config.notify.targets.items()}
        self._is_on = False
        self.left_out: Counter[str] = Counter()  # by kind of target: its queue was full, or its hour

    @property
    def counts(self) -> dict[str, Counter[str]]:
        """What became of messages, by kind of target."""
        return {"sent": self._outbox.sent, "failed": self._outbox.failed, "left_out": self.left_out}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its targets."""
        return tuple(sorted(set(self._kinds.values())))

    def begin(self, page: str) -> None:
        """Begin; incidents that are known by now were told by the controller before. ``page``: where it listens."""
        self._page = self._page or page
        self._choice.know(self._loop.incidents.values(), self._loop.clock())
        if self._kinds:
            self._outbox.start()
            self._is_on = True
            log.info("incidents are told to %s", ", ".join(f"{name} ({kind})" for name, kind in self._kinds.items()))

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                self.poll()
            except Exception:  # a boundary: a fault here must not end the controller, and is logged
                log.exception("incidents could not be told; it is tried again in %g s", _SICK_S)
                await asyncio.sleep(_SICK_S)
            await asyncio.sleep(LOOK_S)

    def poll(self, *, is_last: bool = False) -> None:
        """Hand over what is to be told now."""
        if not self._is_on:
            return
        wall_s = self._loop.wall()
        for notice in self._choice.poll(self._loop.incidents, self._loop.clock(), is_last=is_last):
            message = compose(
                notice.event,
                notice.severity,
                notice.incident,
                link=self._page,
                wall_s=wall_s,
                left_out=notice.left_out,
            )
            if not self._outbox.put(notice.target, message):
                self._choice.refuse(notice)
        for name, count in self._choice.take_left_out().items():
            self.left_out[self._kinds[name]] += count

    async def close(self) -> None:
        """Tell what has not settled yet, and give what waits a moment to go."""
        if self._is_on:
            self.poll(is_last=True)
            await asyncio.to_thread(self._outbox.stop, _LAST_WORDS_S)


def page_address(listen: str, port: int, *, is_tls: bool) -> str:
    """Return where the page is as seen from here: the address listened on, the host's name where it is all."""
    host = parse_listen(listen)[0]
    if host in ("0.0.0.0", "::"):  # noqa: S104  nothing is bound here
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{shown}:{port}"
