# SPDX-License-Identifier: Apache-2.0
"""What copy engines take for columns of a matrix between two GPUs, against the same matrix in one piece.

    python kernels/benchmarks/strided_copies.py

One process, two GPUs, both ways at once, `cuMemcpy2DAsync`; microseconds, the slower way, the median of ten. It tells
what a gather of K and V would take that travels head by head, so that the first tiles need not wait for all heads.
"""

import ctypes
import sys
from collections.abc import Callable
from statistics import median

import torch

WIDTHS = (256, 512, 1024, 2048, 4096)  # bytes of a row of one copy
MATRICES = ((8192, 2048), (8192, 8192), (2048, 8192), (3584, 8192), (16896, 2048))  # rows, bytes of a row
SLEEP_CYCLES = 600_000  # the host queues the copies meanwhile
TURNS = 10
ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of <cuda.h>."""

    _fields_ = [
        *((f"source_{name}", kind) for name, kind in (
            ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("type", ctypes.c_int), ("host", ctypes.c_void_p),
            ("device", ctypes.c_uint64), ("array", ctypes.c_void_p), ("pitch", ctypes.c_size_t),
        )),
        *((f"target_{name}", kind) for name, kind in (
            ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("type", ctypes.c_int), ("host", ctypes.c_void_p),
            ("device", ctypes.c_uint64), ("array", ctypes.c_void_p), ("pitch", ctypes.c_size_t),
        )),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    ]  # fmt: skip


def copy_columns(driver: ctypes.CDLL, target: int, source: int, width: int, rows: int, pitch: int, stream: int) -> None:
    """Queue one copy of `width` bytes of each of `rows` rows that are `pitch` bytes apart on both sides.

    Raises:
        RuntimeError: the driver refuses it.
    """
    copy = Copy2D(
        source_type=ON_DEVICE, target_type=ON_DEVICE, source_device=source, target_device=target, source_pitch=pitch,
        target_pitch=pitch, width=width, height=rows,
    )  # fmt: skip
    failed = driver.cuMemcpy2DAsync_v2(ctypes.byref(copy), ctypes.c_void_p(stream))
    if failed:
        raise RuntimeError(f"cuMemcpy2DAsync of {rows} rows of {width} bytes: error {failed}")


def microseconds(act: Callable[[int, int], None], streams: list[torch.cuda.Stream]) -> float:
    """The time of `act(GPU, stream handle)` on both GPUs at once."""
    found = []
    for _ in range(TURNS):
        events = []
        for gpu, stream in enumerate(streams):
            with torch.cuda.device(gpu), torch.cuda.stream(stream):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(SLEEP_CYCLES)  # noqa: SLF001 - it has no public name
                begin.record()
                act(gpu, stream.cuda_stream)
                end.record()
                events.append((begin, end))
        for gpu in range(2):
            torch.cuda.synchronize(gpu)
        found.append(max(begin.elapsed_time(end) for begin, end in events))
    return 1e3 * median(found)


def main() -> int:
    """Print the table: 0 when it worked, 2 where there are no two GPUs."""
    if torch.cuda.device_count() < 2:
        print("strided_copies: it needs two CUDA GPUs", file=sys.stderr)
        return 2
    driver = ctypes.CDLL("libcuda.so.1")
    most = max(rows * pitch for rows, pitch in MATRICES)
    here, there = ([torch.zeros(most, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in range(2)] for _ in range(2))
    for gpu in range(2):
        there[1 - gpu].copy_(here[gpu])  # torch opens the way between the two
        torch.cuda.synchronize(gpu)
    streams = [torch.cuda.Stream(gpu) for gpu in range(2)]
    print(f"2 x {torch.cuda.get_device_name(0)}, torch {torch.__version__}; us by bytes of a row of each copy")
    print(f"{'rows':>6} {'pitch':>6} {'one piece':>10}" + "".join(f" {width:>8}" for width in WIDTHS))
    for rows, pitch in MATRICES:

        def whole(gpu: int, _: int, size: int = rows * pitch) -> None:
            there[1 - gpu][:size].copy_(here[gpu][:size], non_blocking=True)

        def cut(gpu: int, stream: int, width: int, rows: int = rows, pitch: int = pitch) -> None:
            for at in range(0, pitch, width):
                addresses = (there[1 - gpu].data_ptr() + at, here[gpu].data_ptr() + at)
                copy_columns(driver, *addresses, width, rows, pitch, stream)

        times = [
            microseconds(lambda gpu, stream, width=width: cut(gpu, stream, width), streams) if width <= pitch else None
            for width in WIDTHS
        ]
        cells = "".join(f" {'-' if time is None else f'{time:.0f}':>8}" for time in times)
        print(f"{rows:>6} {pitch:>6} {microseconds(whole, streams):>10.0f}{cells}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
