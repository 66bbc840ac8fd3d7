# SPDX-License-Identifier: Apache-2.0
"""The launcher in C: built when it is needed first, by what builds Triton's own launchers, and kept in their cache."""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

LOG = logging.getLogger("megascale_kernels")
SOURCE = Path(__file__).with_name("launcher.c")


class Launcher(NamedTuple):
    """The functions of `launcher.c`.

    Attributes:
        make: a launch from its parameters.
        launch: copies, announcements and the kernel, on a stream; of several launches, one after another.
        product: a launch that is a product of cuBLAS's, from its plan.
    """

    make: Callable[..., Any]
    launch: Callable[..., None]
    product: Callable[..., Any]


@cache
def launcher() -> Launcher | None:
    """The launcher, or None where it cannot be built: Triton launches then, at ten times the host's time."""
    try:
        from triton.backends.nvidia.driver import include_dirs
        from triton.runtime.build import compile_module_from_src

        module = compile_module_from_src(SOURCE.read_text(), "megascale_launcher", include_dirs=list(include_dirs))
    except Exception as error:  # noqa: BLE001 - any failure means the same: there is a slower way, and it is taken
        LOG.warning(
            "the launcher of the kernels cannot be built, so each call costs the host some 400 us more: %s: %s. It "
            "takes a C compiler and Python's headers",
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        return None
    return Launcher(module.make, module.launch, module.product)
