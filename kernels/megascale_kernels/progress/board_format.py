# SPDX-License-Identifier: Apache-2.0
"""The layout of what kernels write for readers: the progress board and the trace rings.

Readers live where neither torch nor Triton is installed (the agent of a node, a laptop with a file from a dead job),
so these are plain integers and this module imports nothing. `layout.py` hands them to the kernels.

    board   one 128-byte line as a header, then one line per CTA with two roles of 16 words each
    ring    per CTA and role: four words of header (cursor, SM, role, operator), then events of four words each

The kernels fill the first words of the board's header; the words from `HOST_WORD` on belong to the host that made
the board: its process, when a copy of it was last taken, and its workspace: a number on which its ranks agree,
and which of the job's ranks they are, since kernels count ranks within their group.
"""

MAX_RANKS = 8
MAX_CTAS = 256  # 132 SMs on H100 and H200, 148 on B200
OPERATORS = (
    *("none", "meet", "all_gather", "ag_gemm", "gemm_rs", "gemm_ar"),
    *("moe_route", "moe_dispatch", "moe_combine"),
    *("attention", "attention_backward", "reduce_scatter"),
    *("moe_dispatch_backward", "moe_combine_backward", "moe_gather", "moe_gates"),
)
SIGNATURE_BITS = 12
LAUNCHES_TOLD = 0xFFFFF  # of a launch's number a stamp has these bits, and so has the board's header

COMPUTE = 0
COMMUNICATE = 1
ROLES = ("compute", "communicate")

LINE = 32
ROLE_WORDS = 16
PROGRESS_WORDS = (1 + MAX_CTAS) * LINE
PROGRESS_HEADER = ("magic", "rank", "world_size", "operator", "epoch", "ctas", "tiles", "m", "n", "k", "slot")
PROGRESS_FIELDS = ("tile", "state", "wait_tile", "peer", "channel", "needed", "seen", "since_lo", "since_hi", "sm")
PROGRESS_MAGIC = 0x4D53_4B31  # "MSK1"
HOST_WORD = 16
HOST_FIELDS = ("pid", "started", "copied_s")  # process, its start in clock ticks after boot, Unix time of the last copy
GROUP_WORD = 19  # crc32 of its name among the ranks of a workspace, 0 where unknown
MEMBERS_WORD = 20  # the job's rank of each rank of the group, + 1; 0 where it is not known

# Values of a role's state word. It outlives its launch: `needed` shows which launch a wait belongs to.
RUNNING = 0
WAITING = 1
ARRIVED = 2
GAVE_UP = 3
DONE = 4

# The word of the tile in hand: twelve bits of launch number, twenty bits of tile + 1.
TILE_BITS = 20
ALL_TILES_DONE = 0xFFFFF

EVENT_WORDS = 4
RING_EVENTS = 1024
RING_WORDS = (1 + RING_EVENTS) * EVENT_WORDS
KINDS = ("none", "tile begins", "wait begins", "wait ends", "tile ends", "notify", "launch begins")
TILE_BEGIN = 1
WAIT_BEGIN = 2
WAIT_END = 3
TILE_END = 4
NOTIFY = 5
LAUNCH_BEGIN = 6
