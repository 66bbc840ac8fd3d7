# SPDX-License-Identifier: Apache-2.0
"""Where the nodes of a run meet: the controller's address, from any of the options that can name it. Pure.

torchrun's line names a rendezvous backend and an endpoint, or rank 0's address and port. The controller is our
rendezvous, whatever the backend's name. A single node has no other to meet, so such an endpoint is not needed there,
and may be in use by another process. On several nodes it becomes the controller's address, and the node that has this
address starts the controller: as it would have started torchrun's store. Rank 0's address and port stay rank 0's, since
a script may use ``tcp://ADDR:PORT`` itself; the controller is on the same node then, at a port that all can work out.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from megascale_ops.errors import UsageError
from megascale_ops.runner.config import RunConfig

OURS = "megascale"
_C10D_PORT = 29400  # torchrun's, where an endpoint names none
_MASTER_PORT = 29500
_TOP_PORT = 65535
# 10,000 below: the next ports are those of the next jobs on these nodes (29500, 29501, ...), and below 32768 the kernel
# gives none away by itself (ip_local_port_range). Ports that are too low for that go up.
_APART = 10_000
_FIRST_PORT = 1024  # lower ones are for root


class Meeting(NamedTuple):
    """``controller``: its URL, "" for one of this run's own; ``serve``: HOST:PORT where this run brings it up.

    ``max_nodes`` is what is left of ``--nnodes``; ``said`` are sentences for the user. ``in_place``: the address was
    torchrun's store's, so others may still be on their way there. ``master_port``: where rank 0 serves although no
    ``--master-port`` is given; ``node_rank``: the place among the nodes that the line asks for, -1 for any.
    """

    controller: str = ""
    serve: str = ""
    max_nodes: int = 1
    said: tuple[str, ...] = ()
    in_place: bool = False
    master_port: int = 0
    node_rank: int = -1


def meet(
    config: RunConfig, nodes: tuple[int, int], is_here: Callable[[str], bool], *, is_shared: bool = False
) -> Meeting:
    """Return where the nodes meet.

    Args:
        config: The effective configuration.
        nodes: Least and most nodes.
        is_here: Whether a host name or address is this machine's.
        is_shared: Whether the nodes most likely share the run folder, as those of a Slurm job share its user's home:
            then the token that the controller gets is found there.

    Raises:
        UsageError: several nodes are asked for without a meeting point, or it can't be read.
    """
    least, most = nodes
    endpoint, backend = config.rdzv_endpoint, config.rdzv_backend or OURS
    if endpoint and backend == OURS:
        return Meeting(endpoint if "//" in endpoint else f"http://{endpoint}", max_nodes=most)
    if config.controller or most == 1:
        why = "nodes meet at the controller" if config.controller else "one node meets nobody"
        return Meeting(
            config.controller, max_nodes=most, said=tuple(_needless(config, why)), node_rank=config.node_rank
        )
    # torchrun's static rendezvous takes no range, so with one the master's address and port are for the ranks alone.
    if endpoint:
        return _in_place_of(config, _split(endpoint), most, is_here, is_shared=is_shared)
    if config.master_addr and least > 1:
        return _beside_master(config, most, is_here, is_shared=is_shared)
    if least == 1:
        said = f"--nnodes {config.nnodes} starts with one node and stays so: no controller is given for others to join"
        return Meeting(said=(said,))
    raise UsageError(
        f"--nnodes {config.nnodes} needs a controller that all nodes reach: start `megascale-ops controller` "
        "and give each node --controller http://HOST:PORT"
    )


def _needless(config: RunConfig, why: str) -> Iterator[str]:
    """Yield a sentence for each of torchrun's rendezvous options that is not needed."""
    foreign = config.rdzv_backend if config.rdzv_backend != OURS else ""
    if config.rdzv_endpoint:
        yield f"--rdzv-endpoint {config.rdzv_endpoint} ({foreign}) is not needed: {why}"
    elif foreign:
        yield f"--rdzv-backend {foreign} is not needed: the controller is the rendezvous"
    if config.master_addr and not config.master_port:
        yield "--master-addr is not needed without --master-port: every round gets a free port of rank 0's node"


def _in_place_of(
    config: RunConfig,
    where: tuple[str, int],
    most: int,
    is_here: Callable[[str], bool],
    why: str = "",
    *,
    is_shared: bool = False,
) -> Meeting:
    """Put the controller where torchrun's line has its store."""
    host, port = where
    # Under torchrun's static rendezvous, its default, node rank 0 serves; under c10d the node with the address.
    by_rank = config.rdzv_backend in ("", "static") and config.node_rank >= 0
    serves = config.node_rank == 0 if by_rank else is_here(host)
    address = _joined(host, port)
    if not is_loopback(host) and not config.token_file and not is_shared:
        raise UsageError(
            f"the nodes meet at {address}, which other machines reach: anybody there could stop the job; "
            "make a token by `megascale-ops token new FILE` and give that file to every node as --token-file FILE"
        )
    said = f"the nodes meet at {address}: the controller is there{', brought up by this run' if serves else ''}{why}"
    return Meeting(
        f"http://{address}", address if serves else "", most, (said,), in_place=True, node_rank=config.node_rank
    )


def _beside_master(config: RunConfig, most: int, is_here: Callable[[str], bool], *, is_shared: bool) -> Meeting:
    """Put the controller on rank 0's node, at another port than the one where torchrun's static line has its store."""
    port = config.master_port or _MASTER_PORT
    host = config.master_addr.strip("[]")
    where = host, port - _APART if port - _APART >= _FIRST_PORT else port + _APART
    found = _in_place_of(config, where, most, is_here, f"; rank 0 serves at {_joined(host, port)}", is_shared=is_shared)
    first = 0 if found.serve else -1  # scripts look for rank 0 on the node that serves
    return found._replace(master_port=port, node_rank=max(config.node_rank, first))


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _split(endpoint: str) -> tuple[str, int]:
    """Read HOST, HOST:PORT or [ADDRESS]:PORT."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint, str(_C10D_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) <= _TOP_PORT:
        raise UsageError(f"--rdzv-endpoint {endpoint!r} can't be used by several nodes: give HOST:PORT")
    return host, int(port)


def _joined(host: str, port: int) -> str:
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"
