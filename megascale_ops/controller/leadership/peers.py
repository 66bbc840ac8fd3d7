# SPDX-License-Identifier: Apache-2.0
"""What controllers tell each other, and people: who leads, and whether the database answers."""

from collections.abc import Callable

import msgspec

from megascale_ops.foreign import UNREADABLE
from megascale_ops.link.http_client import HttpClient
from megascale_ops.link.tls import ClientTls
from megascale_ops.schema.events import Leadership

Ask = Callable[[str], bool]
# 1 s: two controllers of one cluster answer in milliseconds.
PATIENCE_S = 1.0
_MOST_BYTES = 65_536


def asks(tls: ClientTls | None) -> Ask:
    """Return a question to a standby's address: is it certain that the database does not answer it either?

    Args:
        tls: whom to trust, and what to show, where standbys serve https; None: whom the system trusts.
    """

    def is_away(url: str) -> bool:
        context = tls.context if tls is not None else None
        client = HttpClient(url, {}, tls=context, most_bytes=_MOST_BYTES)
        try:
            reply = client.ask("GET", "/leader", patience_s=PATIENCE_S)
            told = msgspec.json.decode(reply.body, type=Leadership)
        except (OSError, *UNREADABLE):
            if tls is not None:
                tls.refresh()
            return False
        finally:
            client.close()
        return told.role == "standby" and told.database != "ok"

    return is_away
