# SPDX-License-Identifier: Apache-2.0
"""How the black box writes down what NCCL names by words: one table for the plugin in C and for readers in Python.

A code is the place of its word in the row. Code 0 is anything else, code ``n + 1`` is NCCL's own number ``n`` where it
has one (interface v1 of the profiler gives numbers, the later ones words).
"""

FUNCTIONS = (
    *("Unknown", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce", "SendRecv", "Send", "Recv"),
    # Words only: interfaces from v6 on.
    *("AlltoAll", "Scatter", "Gather", "AllGatherV", "PutSignal", "Signal", "WaitSignal"),
)
SEND, ALL_GATHER, REDUCE_SCATTER = map(FUNCTIONS.index, ("Send", "AllGather", "ReduceScatter"))
# NCCL's own table of words has none for unsigned bytes: they arrive as "Unknown".
DATATYPES = (
    *("Unknown", "ncclInt8", "ncclUint8", "ncclInt32", "ncclUint32", "ncclInt64", "ncclUint64", "ncclFloat16"),
    *("ncclFloat32", "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2"),
)
DATATYPE_BYTES = (1, 1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
ALGORITHMS = ("Unknown", "TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
PROTOCOLS = ("Unknown", "LL", "LL128", "SIMPLE")

FLAG_DONE = 1  # nothing more is expected
FLAG_UNTIMED = 2  # GPU times were not requested: the interface has none, or the overhead budget excluded them
FLAG_HOST_CLOCK = 4  # start or end is the host's clock in NCCL's callback, later than the GPU by its polling
FLAG_DOUBTFUL = 8  # the GPU's end lay before its start
FLAG_UNMATCHED = 16  # point-to-point after a time without: its number need not be the peer's
FLAG_EXACT_CHANNELS = 32  # "channels" is how many will report, not how many may
FLAG_COPY_ENGINE = 64  # moved by copy engines, without a kernel


def word(row: tuple[str, ...], code: int) -> str:
    """Return the word for a code; one that this version does not know is "Unknown"."""
    return row[code] if 0 <= code < len(row) else row[0]


def render() -> list[str]:
    """Return the tables as lines of ``blackbox.h``."""
    lines = [f"#define MEGASCALE_NCCL_FLAG_{name[5:]} {value}u" for name, value in globals().items() if "FLAG_" in name]
    rows = {"FUNCTIONS": FUNCTIONS, "DATATYPES": DATATYPES, "ALGORITHMS": ALGORITHMS, "PROTOCOLS": PROTOCOLS}
    for name, row in rows.items():
        words = [f'    "{text}",' for text in row]
        lines += ["", f"#define MEGASCALE_NCCL_{name} \\", *(f"{text} \\" for text in words[:-1]), words[-1]]
    sizes = ", ".join(map(str, DATATYPE_BYTES))
    numbers = {"SEND": SEND, "ALL_GATHER": ALL_GATHER, "REDUCE_SCATTER": REDUCE_SCATTER}
    lines += ["", *(f"#define MEGASCALE_NCCL_FUNCTION_{name} {code}u" for name, code in numbers.items())]
    return [*lines, f"#define MEGASCALE_NCCL_DATATYPE_BYTES {sizes}"]
