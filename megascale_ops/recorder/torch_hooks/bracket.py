# SPDX-License-Identifier: Apache-2.0
"""Put two events around a function, the way every hook of the recorder does it."""

import functools
from collections.abc import Callable
from typing import Any

Event = Callable[[], None]


def bracket(function: Callable[..., Any], begin: Event, end: Event, failed: Event | None = None) -> Callable[..., Any]:
    """Return ``function`` with ``begin`` before it, and after it ``end``, or ``failed`` when it raises.

    torch.compile traces the function itself.
    """
    from torch.compiler import is_compiling

    if_raised = failed or end

    @functools.wraps(function)
    def bracketed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the function itself
        if is_compiling():
            return function(*args, **kwargs)
        begin()
        try:
            result = function(*args, **kwargs)
        except BaseException:
            if_raised()
            raise
        end()
        return result

    return bracketed
