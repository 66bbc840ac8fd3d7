# SPDX-License-Identifier: Apache-2.0
"""Take part under plain torchrun, given only an endpoint, a job and ``--rdzv-conf``."""

import logging
import os
import socket
import sys
import uuid
from pathlib import Path

from torch.distributed.elastic.rendezvous import RendezvousParameters

from megascale_ops.blackbox import roots
from megascale_ops.blackbox.private_folder import private_folder
from megascale_ops.errors import UsageError
from megascale_ops.link import BlockingLink
from megascale_ops.link.token_files import find_token
from megascale_ops.runner.membership import Terms, local_address
from megascale_ops.runner.rank_factory import install_factory
from megascale_ops.runner.ranks.local_workers import LocalWorkers, Place
from megascale_ops.runner.services.profiler import Profiler, has_device
from megascale_ops.schema import environment
from megascale_ops.schema.identity import check_name
from megascale_ops.schema.policy import JobPolicy

log = logging.getLogger(__name__)


def part_in(params: RendezvousParameters) -> tuple[BlockingLink, LocalWorkers, Terms]:
    """Return what takes part in the job: the way to its controller, this node's ranks, and what the node offers."""
    job = check_name("job", params.run_id)
    node = check_name("node", str(params.get("node") or socket.gethostname()))
    root = roots.take_root(str(params.get("box_root") or ""))
    if root.said:
        log.warning("%s", root.said)
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "megascale-ops" / job
    run_dir = Path(str(params.get("run_dir") or state))
    for folder in (run_dir, run_dir / "checkpoints"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with private_folder(root.path / job):
        pass  # there it is for ranks that start before the round is known
    url = params.endpoint if "//" in params.endpoint else f"http://{params.endpoint}"
    token = find_token(str(params.get("token_file") or ""), os.environ)
    place = Place(
        job=job,
        node=node,
        run_id=uuid.uuid4().hex,
        nproc=_nproc_of_torchrun(params),
        box_dir=str(root.path / job),
        run_dir=str(run_dir),
        checkpoint_dir=os.environ.get(environment.CHECKPOINT_DIR) or str(run_dir / "checkpoints"),
        stop_grace_s=30.0,  # as torchrun's own
        has_gpus=Path("/dev/nvidiactl").exists(),
    )
    profiler = Profiler(str(params.get("nccl_profiler") or "off"), os.environ, has_device=has_device())
    local_workers = LocalWorkers(place, profiler=profiler.variables)
    # torchrun does not distinguish a final stop from a restart, and gives all ranks the whole time.
    local_workers.is_ending = True
    install_factory(local_workers)
    terms = Terms(params.min_nodes, params.max_nodes, params.local_addr or local_address(url), JobPolicy())
    return BlockingLink(url, token or None), local_workers, terms


def _nproc_of_torchrun(params: RendezvousParameters) -> int:
    """Return how many ranks this node will have: torch does not pass it to a rendezvous, so parse torchrun's options.

    ``--rdzv-conf nproc=N`` gives it where the process was not started by torchrun's command line.
    """
    if params.get("nproc"):
        return int(params.get("nproc"))
    from torch.distributed.run import determine_local_world_size, parse_args

    try:
        options = parse_args(sys.argv[1:])  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return int(determine_local_world_size(options.nproc_per_node))
    except (SystemExit, ValueError) as error:
        raise UsageError("the number of ranks of this node is not known: add --rdzv-conf nproc=N") from error
