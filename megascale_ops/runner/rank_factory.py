# SPDX-License-Identifier: Apache-2.0
"""Torch's elastic engine starts ranks by way of ours: the one place where it is given another factory."""

import os

from megascale_ops.runner.ranks.local_workers import LocalWorkers
from megascale_ops.runner.ranks.worker import Worker


def install_factory(local_workers: LocalWorkers) -> None:
    """Let torch's elastic engine start ranks through ``local_workers``.

    The engine looks its factory up by this name at every start; there is no public way to give it another.
    """
    from torch.distributed.elastic.multiprocessing import api

    def start(  # the engine's keywords; numa_options and the like are not used here
        entrypoint: str,
        args: tuple[str, ...],
        env: dict[str, str],
        stdout: str,
        stderr: str,
        local_rank_id: int,
        **_: object,
    ) -> Worker:
        merged = {**os.environ, **env}
        return local_workers.start((entrypoint, *map(str, args)), merged, (stdout or "", stderr or ""), local_rank_id)

    vars(api)["get_subprocess_handler"] = start
