# SPDX-License-Identifier: Apache-2.0
"""What every CTA did and when, for all ranks on one clock: recorded by kernels, shown by Perfetto.

    workspace = Workspace(..., trace=True)
    ...                                                       # launches
    save_trace(workspace, "rank0.trace", config=config, offset=offsets[0])

    python -m megascale_kernels.trace rank*.trace -o out.json     # then open it at https://ui.perfetto.dev

The pieces, from the words in device memory to the file:

    trace_rings     words to events, however the kernel ended
    trace_slices    events to spans of time
    trace_arrows    which notification released which wait
    trace_clock     the clocks of several GPUs brought to one
    trace_dump      the trace of one rank in a file
    trace_chrome    all of it as JSON
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megascale_kernels.trace_chrome import chrome_trace
from megascale_kernels.trace_clock import Exchange, Offset, align, offset_of
from megascale_kernels.trace_dump import Chunk, Shape, TraceDump, chunk_of, load_trace, save_trace
from megascale_kernels.trace_rings import Event, Ring, decode_ring, decode_rings

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge dumps of several ranks into one file for Perfetto; the exit code is 2 when that cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m megascale_kernels.trace",
        description="Merge the traces of several ranks into one file for https://ui.perfetto.dev.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="what save_trace wrote, one per rank")
    parser.add_argument("-o", "--output", required=True, metavar="JSON", help="the file to write")
    options = parser.parse_args(arguments)
    try:
        trace = chrome_trace(load_trace(file) for file in dict.fromkeys(options.files))
        _write(Path(options.output), json.dumps(trace))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    facts = trace["otherData"]
    sys.stdout.write(f"{options.output}: {', '.join(f'{name}: {value}' for name, value in facts.items())}\n")
    return 0


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        beside.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
