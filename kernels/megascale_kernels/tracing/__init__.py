# SPDX-License-Identifier: Apache-2.0
"""What every CTA did and when, for all ranks on one clock: recorded by kernels, shown by Perfetto.

    workspace = Workspace(..., trace=True)
    ...                                                       # launches
    offsets = measure_offsets(workspace)                      # of `tracing.clock_ping`: all ranks call it together
    save_trace(workspace, f"rank{rank}.trace", config=config, offset=offsets[rank])

    python -m megascale_kernels.tracing rank*.trace -o out.json     # then open it at https://ui.perfetto.dev

The pieces, from the words in device memory to the file:

    rings           words to events, however the kernel ended
    slices          events to spans of time
    flows           which notification released which wait
    clock           the clocks of several GPUs brought to one
    dump            the trace of one rank in a file
    chrome          all of it as JSON
"""

from megascale_kernels.tracing.chrome import chrome_trace
from megascale_kernels.tracing.clock import Exchange, Offset, align, offset_of
from megascale_kernels.tracing.dump import Chunk, Shape, TraceDump, chunk_of, load_trace, save_trace
from megascale_kernels.tracing.rings import Event, Ring, decode_ring, decode_rings

__all__ = [
    "Chunk",
    "Event",
    "Exchange",
    "Offset",
    "Ring",
    "Shape",
    "TraceDump",
    "align",
    "chrome_trace",
    "chunk_of",
    "decode_ring",
    "decode_rings",
    "load_trace",
    "offset_of",
    "save_trace",
]
