# SPDX-License-Identifier: Apache-2.0
"""Orders that are carried out beside the agent's other work, each once."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine

from megascale_ops.schema.messages import Order


class Background:
    """Tasks of orders; owned by the loop of the agent.

    Args:
        remembered: so many orders are known for such, the newest; the controller repeats one until it is taken.
    """

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._known: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, order: Order, obey: Callable[[Order], Coroutine[None, None, None]]) -> bool:
        """Begin to carry an order out; return whether it is a new one."""
        if order.id in self._known:
            return False
        self._known[order.id] = None
        while len(self._known) > self._remembered:
            self._known.popitem(last=False)
        task = asyncio.create_task(obey(order), name=f"order {order.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def close(self) -> None:
        """Cancel what is not done; the controller says that no answer came."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
