# SPDX-License-Identifier: Apache-2.0
"""What of a heartbeat is reading HTTP, and what is left for the one process that judges: CPU time, by part.

The same heartbeats as ``load.py``, handed to the same loop without a network: read from JSON, folded and judged,
answered. The rest of what ``load.py`` measures is sockets, HTTP and Python's event loop, which more processes can
share; this part is what one of them has to do, unless it is spread by job. Reading them from MessagePack, as an intake
process could hand them on, is measured beside it.

    python benchmarks/load/intake.py --nodes 1536
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence

import msgspec
from fleet import NPROC, Fleet

from megascale_ops.controller.embedded import Embedded
from megascale_ops.schema.messages import Heartbeat, HeartbeatReply, Join


def _us_each(work: Callable[[], object], count: int) -> float:
    began_s = time.process_time()
    work()
    return (time.process_time() - began_s) / count * 1e6


async def _join(embedded: Embedded, fleet: Fleet) -> None:
    joins = [msgspec.json.decode(fleet.join(node)[1], type=Join) for node in range(fleet.nodes)]
    joining = [asyncio.create_task(embedded.join(join, 60.0)) for join in joins]
    while not all(task.done() for task in joining):
        embedded.tick()
        await asyncio.to_thread(embedded.settle)
        await asyncio.sleep(0)


def _all(embedded: Embedded, fleet: Fleet, beats: Sequence[Heartbeat]) -> list[HeartbeatReply]:
    replies = [embedded.heartbeat(beat) for beat in beats]
    for node, reply in enumerate(replies):
        fleet.take(node, msgspec.json.encode(reply))
    return replies


def main() -> None:
    """Measure, and print a line for each turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1536)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--step", type=float, default=2.0)
    options = parser.parse_args()
    read = msgspec.json.Decoder(Heartbeat).decode
    read_packed = msgspec.msgpack.Decoder(Heartbeat).decode
    fleet = Fleet(options.nodes, 1, options.step, 1.0)
    print(f"{options.nodes:,} nodes of {NPROC} ranks; us of CPU for each heartbeat")
    with tempfile.TemporaryDirectory(prefix="megascale-load-") as folder:
        embedded = Embedded(f"sqlite:///{folder}/ops.db", clock=time.monotonic, wall=time.time)
        asyncio.run(_join(embedded, fleet))
        for turn in range(options.turns):
            bodies = [fleet.beat(node) for node in range(options.nodes)]
            from_json = _us_each(lambda: [read(body) for body in bodies], len(bodies))  # noqa: B023  called here
            beats = [read(body) for body in bodies]
            packed = [msgspec.msgpack.encode(beat) for beat in beats]
            from_packed = _us_each(lambda: [read_packed(body) for body in packed], len(bodies))  # noqa: B023  same
            judged = _us_each(lambda: _all(embedded, fleet, beats), len(bodies))  # noqa: B023  same
            ticked = _us_each(lambda: [embedded.tick() for _ in range(10)], len(bodies))
            size, packed_size = (sum(map(len, all_)) / len(bodies) for all_ in (bodies, packed))
            print(
                f"| {turn} | JSON {size:,.0f} bytes {from_json:.1f} | MessagePack {packed_size:,.0f} bytes "
                f"{from_packed:.1f} | folded, judged, answered {judged:.1f} | ten ticks {ticked:.1f} |",
                flush=True,
            )
            embedded.settle()
            time.sleep(max(0.0, fleet.step_s / 2))
        embedded.close()


if __name__ == "__main__":
    main()
