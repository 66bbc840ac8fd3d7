# SPDX-License-Identifier: Apache-2.0
"""The one client of the controller: typed requests, one kept-open connection pool, clear errors. See README.md.

``Link`` is for asyncio programs (the agent), ``BlockingLink`` for threads (the runner, the command line). ``Backoff``
and ``Spool`` are the patience of a program whose controller is away.
"""

from megascale_ops.link.away import Backoff, Spool
from megascale_ops.link.blocking import BlockingLink
from megascale_ops.link.connection import addresses
from megascale_ops.link.requests import Link

__all__ = ["Backoff", "BlockingLink", "Link", "Spool", "addresses"]
