# SPDX-License-Identifier: Apache-2.0
"""The map of a black box: which field stands where. The one table from which Python and C take their offsets.

A box is a row of *rings*. A ring is an array of slots of equal size, and has one writer. Every slot begins with its
own sequence number, and the n-th record (from 0) of a ring with N slots lives in slot ``n % N``:

    sequence = 0          never written
    sequence = 2 * n + 1  the n-th record is being written: nothing in the slot can be trusted
    sequence = 2 * n + 2  the n-th record is whole

A record that is written again (an end that becomes known later) counts that in the upper 16 bits of its sequence: no
two contents of a slot ever stand under the same even number.

A writer stores the odd number, the fields, then the even number. A reader copies the slot twice and believes it when
both copies are equal and the number is even (``slots`` explains why that suffices). A ring has at least two slots, so a
writer that is killed in the middle of a record leaves the record before it whole. A ring without a sequence is a
*plain* region: it is written once before the file has its name (the header), or before anything speaks of it (the names
of phases), or each of its fields is one aligned 8-byte word of its own (the pulse, the passages), which x86-64 and
AArch64 never tear.

Everything is little-endian, every field is aligned to its own size (at most 8), and slots are padded to 8 bytes.
Later versions only add: new fields at the end of a slot's padding, new rings at the end of the file.
"""

import struct
from dataclasses import dataclass
from functools import cached_property

from megascale_ops.blackbox import nccl_codes

MAGIC = b"MGSCLBOX"
HEADER_BYTES = 4096

# What a field may be: struct code, bytes (0: an array of characters, length in the table), C type.
_KINDS = {
    "u64": ("Q", 8, "uint64_t"),
    "i64": ("q", 8, "int64_t"),
    "f64": ("d", 8, "double"),
    "u32": ("I", 4, "uint32_t"),
    "i32": ("i", 4, "int32_t"),
    "chars": ("s", 0, "char"),
}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a slot: ``offset`` and ``size`` in bytes from the slot's beginning."""

    name: str
    kind: str
    offset: int
    size: int

    @property
    def code(self) -> str:
        """The field in the language of :mod:`struct`."""
        code = _KINDS[self.kind][0]
        return f"{self.size}{code}" if self.kind == "chars" else code

    @property
    def c_declaration(self) -> str:
        """The field as a member of a C struct."""
        c_type = _KINDS[self.kind][2]
        return f"{c_type} {self.name}[{self.size}];" if self.kind == "chars" else f"{c_type} {self.name};"


@dataclass(frozen=True)
class Ring:
    """``slots`` slots of ``stride`` bytes, the first at ``offset`` of the file."""

    name: str
    offset: int
    slots: int
    stride: int
    fields: tuple[Field, ...]

    @property
    def size(self) -> int:
        """Bytes of the whole ring."""
        return self.slots * self.stride

    @cached_property
    def codec(self) -> struct.Struct:
        """Packs and unpacks all fields of a slot, the sequence (if any) first."""
        return struct.Struct("<" + "".join(field.code for field in self.fields))

    @cached_property
    def body(self) -> struct.Struct:
        """Packs all fields but the sequence; they begin 8 bytes into the slot."""
        return struct.Struct("<" + "".join(field.code for field in self.fields[1:]))

    @cached_property
    def sequence_codec(self) -> struct.Struct:
        """Unpacks the sequence alone of a slot."""
        return struct.Struct(f"<Q{self.stride - 8}x")

    def field(self, name: str) -> Field:
        """Return the field called ``name``."""
        return next(field for field in self.fields if field.name == name)


def _ring(name: str, offset: int, slots: int, stride: int, *fields: str) -> Ring:
    """Lay ``fields`` ("name:kind" or "name:bytes") one after the other; tests and the C compiler check alignment."""
    laid: list[Field] = []
    at = 0
    for text in fields:
        label, _, kind = text.partition(":")
        length = int(kind) if kind.isdigit() else 0
        kind = "chars" if length else kind
        size = length or _KINDS[kind][1]
        laid.append(Field(label, kind, at, size))
        at += size
    return Ring(name, offset, slots, stride, tuple(laid))


# Strings end at their first NUL or at their length. Points in time: CLOCK_MONOTONIC, except wall_s.
#                 offset  slots  stride
HEADER = _ring("header", 0, 1, 1536,
    "magic:8", "version:u32", "header_bytes:u32", "file_bytes:u64", "round:i64", "pid:i64", "start_ticks:u64",
    "started_mono_s:f64", "started_wall_s:f64", "rank:i32", "local_rank:i32", "world_size:i32",
    "tp:i32", "pp:i32", "dp:i32", "ep:i32", "reserved:u32", "job:104", "node:104", "stderr_path:1024")  # fmt: skip
# The last three stand in what was the end of "message", which is cut so that it always ends before them: an older
# reader finds its NUL there. "told" is TOLD_ERROR where they are set: an older writer left text there.
ERROR = _ring("error", 1536, 2, 1280,
    "sequence:u64", "step:i64", "type:96", "where:384", "message:712", "told:u64", "raised_mono_s:f64",
    "thread:56")  # fmt: skip
# The second page holds all that an agent looks at ten times a second.
NOW = _ring("now", 4096, 4, 128,
    "sequence:u64", "step:i64", "steps_seen:u64", "flags:u64", "phase_since_mono_s:f64", "phase:32")  # fmt: skip
BEAT = _ring("beat", 4608, 4, 128,
    "sequence:u64", "enqueued:i64", "completed:i64", "beat_mono_s:f64", "name:64")  # fmt: skip
# The last two stand in what was padding: while nothing moves, when the training thread's stack was last seen in another
# place than at the heartbeat before, and how often since it moved.
PULSE = _ring("pulse", 5120, 1, 64,
    "state:u64", "moved_mono_s:f64", "wandered_mono_s:f64", "wandered:u64")  # fmt: skip
SERVER = _ring("server", 5184, 2, 128,
    "sequence:u64", "worker_server_path:112")  # fmt: skip
# What the rank knows of its checkpoints. It stands in the rest of that page, which was zeros in every box of version 3:
# that is "never written", and no byte moved. Not looked at ten times a second, so not among HOT_BYTES.
SAVES = _ring("saves", 5440, 3, 64,
    "sequence:u64", "step:i64", "stall_s:f64", "write_s:f64", "sealed_step:i64", "sealed_wall_s:f64", "in_flight:u64",
    "failed:u64")  # fmt: skip
# What a rank's own checks have found, newest last: a record tells of one class of fault all that is so since then, one
# without text that it is over. With each change all that stands is written again, three records at most, so that five
# slots never lose one. Behind "saves", in the same way, to the end of that page.
FINDINGS = _ring("findings", 5632, 5, 512,
    "sequence:u64", "step:i64", "told_mono_s:f64", "fault:32", "text:456")  # fmt: skip
STEPS = _ring("steps", 8192, 256, 80,
    "sequence:u64", "step:i64", "ended_mono_s:f64", "wall_s:f64", "data_s:f64", "forward_s:f64", "backward_s:f64",
    "optimizer_s:f64", "checkpoint_s:f64", "waiting_s:f64")  # fmt: skip
COLLECTIVES = _ring("collectives", 28672, 1024, 104,
    "sequence:u64", "seq:i64", "bytes_moved:i64", "enqueued_mono_ns:i64", "started_mono_ns:i64", "ended_mono_ns:i64",
    # The last stands in what was the end of "function", whose names are shorter: an older reader finds a NUL before it.
    "communicator:24", "function:28", "passage:u32")  # fmt: skip
# Through which phases and steps the training thread went: one word a passage, so that it costs little and there is
# room for many. Its lower 32 bits are the passage's number, from 1, whose slot is that number modulo the slots; then 24
# bits of the last finished step, and 8 of the phase's place in "phases", from 1; 0: it has none. "passage" of a
# collective is the newest when the training thread called it; 0: another thread did. Both stand in a page that was
# zeros in every box of version 3: no byte moved, so a reader or writer without them is of the same version.
PASSAGES = _ring("passages", 135168, 384, 8, "word:u64")
PHASES = _ring("phases", 138240, 26, 32, "name:32")  # a letter for each, in a trail
# Since version 2: what else is known of a finished step, in the slot of the same number as in "steps". Written first,
# so a reader that sees the step sees this as well.
EFFORTS = _ring("efforts", 139264, 256, 40,
    "sequence:u64", "gc_s:f64", "cpu_s:f64", "loss:f64", "has_loss:u64")  # fmt: skip
# Since version 3: what the NCCL profiler plugin sees. It alone writes these three. The first holds its own state and
# the numbers of the next records, in groups of eight words by how often they change: a group is a cache line.
PROFILER = _ring("profiler", 151552, 1, 512,
    "abi:u64", "inits:u64", "mask:u64", "level:u64", "budget_ppm:u64", "share_ppm:u64", "judged_mono_ns:i64",
    "opened_mono_ns:i64",
    "nccl_next:u64", "communicators_next:u64", "dropped_late:u64", "dropped_busy:u64", "dropped_no_box:u64",
    "dropped_no_context:u64", "unsampled:u64", "chain_lost:u64",
    "events:u64", "own_ns:u64", "chained:u64", "contexts_open:u64", "has_complaint:u64", "complaint:256",
    # In what was padding: 0 from a plugin without them.
    "untimed:u64", "timed_one_in:u64")  # fmt: skip
COMMUNICATORS = _ring("communicators", 155648, 64, 128,
    "sequence:u64", "id:u64", "opened_mono_ns:i64", "closed_mono_ns:i64", "nranks:i32", "rank:i32", "nnodes:i32",
    "reserved:u32", "name:72")  # fmt: skip
NCCL = _ring("nccl", 163840, 2048, 120,
    "sequence:u64", "seq:i64", "bytes_moved:i64", "enqueued_mono_ns:i64", "gpu_started_mono_ns:i64",
    "gpu_ended_mono_ns:i64", "gpu_clock_ns:u64", "communicator:u64", "step:i64", "started_channels:u64",
    "ended_channels:u64", "function:u32", "datatype:u32", "algorithm:u32", "protocol:u32", "channels:u32", "peer:i32",
    "root:i32", "flags:u32")  # fmt: skip

# The script's device mesh is known only after the box was made.
MESH = _ring("mesh", 409600, 2, 32,
    "sequence:u64", "tp:i32", "pp:i32", "dp:i32", "ep:i32")  # fmt: skip
# What the GPU needed for a step, known a step or two later. Both stand in what was padding of the last page: no byte of
# version 3 moved and the file did not grow, so a reader or writer without them is of the same version. ``number`` is
# the step's in "steps". A declared phase has a slot of its own.
GPU_STEPS = _ring("gpu_steps", 409664, 32, 72,
    "sequence:u64", "number:u64", "step:i64", "wall_s:f64", "data_s:f64", "forward_s:f64", "backward_s:f64",
    "optimizer_s:f64", "checkpoint_s:f64")  # fmt: skip
GPU_PHASES = _ring("gpu_phases", 411968, 28, 56,
    "sequence:u64", "number:u64", "gpu_s:f64", "phase:32")  # fmt: skip
# What the rank knows of its restores: the newest one's step, seconds and bytes, then counts, the last four by where
# they came from. To the end of the last page, in the same way.
RESTORES = _ring("restores", 413536, 2, 80,
    "sequence:u64", "step:i64", "restore_s:f64", "read_bytes:u64", "passed_over:u64", "failed:u64", "node:u64",
    "buddy:u64", "shared:u64", "store:u64")  # fmt: skip

RINGS = (
    *(HEADER, ERROR, NOW, BEAT, PULSE, SERVER, SAVES, FINDINGS, STEPS, COLLECTIVES, PASSAGES, PHASES, EFFORTS),
    *(PROFILER, COMMUNICATORS, NCCL, MESH, GPU_STEPS, GPU_PHASES, RESTORES),
)
HOT_OFFSET = NOW.offset
HOT_BYTES = SERVER.offset + SERVER.size - NOW.offset
FILE_BYTES = MESH.offset + 4096

STATES = ("starting", "running", "exited")
FLAG_ABSOLUTE = 1
TOLD_ERROR = 1  # no text of eight bytes reads as this number
# Of a sequence the lower 48 bits give the record, the upper 16 how often it was written again.
NUMBER_BITS = 48
# Where in the word of a passage its number, step and phase are.
PASSAGE_BITS, PASSAGE_STEP_BITS = 32, 24


def render_header(version: int) -> str:
    """Return ``blackbox.h``: the same map as C structs, with assertions that the compiler agrees."""
    lines = [
        "/* SPDX-License-Identifier: Apache-2.0 */",
        "/*",
        " * The map of a black box for C and CUDA. Printed from layout.py by",
        " *     python -m megascale_ops.blackbox.layout > megascale_ops/blackbox/blackbox.h",
        " * and compared with it by a test. Little-endian; layout.py explains rings and sequence numbers.",
        " */",
        "#ifndef MEGASCALE_BLACKBOX_H",
        "#define MEGASCALE_BLACKBOX_H",
        "",
        "#include <stddef.h>",
        "#include <stdint.h>",
        "",
        f'#define MEGASCALE_BOX_MAGIC "{MAGIC.decode()}"',
        f"#define MEGASCALE_BOX_VERSION {version}u",
        f"#define MEGASCALE_BOX_HEADER_BYTES {HEADER_BYTES}u",
        f"#define MEGASCALE_BOX_FILE_BYTES {FILE_BYTES}u",
        f"#define MEGASCALE_BOX_FLAG_ABSOLUTE {FLAG_ABSOLUTE}u",
        f"#define MEGASCALE_BOX_NUMBER_BITS {NUMBER_BITS}u",
    ]
    lines += [f"#define MEGASCALE_BOX_STATE_{state.upper()} {number}u" for number, state in enumerate(STATES)]
    lines += nccl_codes.render()
    for ring in RINGS:
        lines += _render_ring(ring)
    lines += [
        "",
        "#if defined(__cplusplus)",
        "#define MEGASCALE_BOX_ASSERT(what) static_assert(what, #what)",
        "#else",
        "#define MEGASCALE_BOX_ASSERT(what) _Static_assert(what, #what)",
        "#endif",
    ]
    for ring in RINGS:
        c_type = f"struct megascale_box_{ring.name}"
        lines.append(f"MEGASCALE_BOX_ASSERT(sizeof({c_type}) == {ring.stride});")
        lines += [f"MEGASCALE_BOX_ASSERT(offsetof({c_type}, {field.name}) == {field.offset});" for field in ring.fields]
    lines += ["#undef MEGASCALE_BOX_ASSERT", "", "#endif"]
    return "\n".join(lines) + "\n"


def _render_ring(ring: Ring) -> list[str]:
    """Return the ring's place and its slot as a C struct, padded to its stride."""
    prefix = f"MEGASCALE_BOX_{ring.name.upper()}"
    lines = [
        "",
        f"#define {prefix}_OFFSET {ring.offset}u",
        f"#define {prefix}_SLOTS {ring.slots}u",
        f"struct megascale_box_{ring.name} {{",
    ]
    lines += [f"    {field.c_declaration}" for field in ring.fields]
    padding = ring.stride - ring.fields[-1].offset - ring.fields[-1].size
    if padding:
        lines.append(f"    char padding[{padding}];")
    return [*lines, "};"]


if __name__ == "__main__":
    import sys

    from megascale_ops.schema.version import BOX_VERSION

    sys.stdout.write(render_header(BOX_VERSION))
