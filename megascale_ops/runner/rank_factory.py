# SPDX-License-Identifier: Apache-2.0
"""Torch's elastic engine starts ranks through our crew: the one place where it is given another factory."""

import os

from megascale_ops.runner.crew import Crew
from megascale_ops.runner.worker import Worker


def install_factory(crew: Crew) -> None:
    """Let torch's elastic engine start ranks through ``crew``.

    The engine looks its factory up by this name at every start; there is no public way to give it another.
    """
    from torch.distributed.elastic.multiprocessing import api

    def start(  # the engine's keywords; numa_options and the like are not for us
        entrypoint: str,
        args: tuple[str, ...],
        env: dict[str, str],
        stdout: str,
        stderr: str,
        local_rank_id: int,
        **_: object,
    ) -> Worker:
        merged = {**os.environ, **env}
        return crew.start((entrypoint, *map(str, args)), merged, (stdout or "", stderr or ""), local_rank_id)

    vars(api)["get_subprocess_handler"] = start
