# SPDX-License-Identifier: Apache-2.0
"""Does a rank that makes no step do something?

Doing something is not hanging: a rank that computes in a child, reads, writes, sends, or lets a file grow is at work,
as long as it goes on. What it does by itself without any of these, on its own CPU, may be an endless loop as well as
one long call of a compressor; nothing separates these, and patience is the answer (``diagnosis.hangs.patience``).

Pure: counters in, a sentence or nothing out.
"""

from megascale_ops.schema.work import ChildWork, ProcessWork

# 10 % of a core, and 0.15 s: an idle rank's recorder takes 0.5 %, a dump of stacks and flight recorder between two
# looks up to 0.1 s. Of a core shared with ten others, a computing rank gets 15 %.
LEAST_SHARE, LEAST_CPU_S = 0.10, 0.15
# 0.3 s: the first look is as short as that, and no dump lies within; two ticks of the kernel's 10 ms are enough.
SHORT_S, SHORT_CPU_S = 0.3, 0.02
# 16 KiB/s: a dump writes 10 KB of stacks; a process group's watchdog reads 0.2 KB a second from its store.
LEAST_BYTES_PER_S = 16 * 1024


def works(work: ProcessWork | None) -> str:
    """Return what is seen of a rank's work outside its own CPU time (ends a sentence), "" when nothing is."""
    if work is None:
        return ""
    if _is_busy(work.child_cpu_s, work.over_s):
        return f"{_children(work)} used {work.child_cpu_s:.2f} s of CPU in the last {work.over_s:.1f} s"
    if sent := sends(work):
        return sent
    moved = (
        (work.io_bytes, "read and written"),
        (work.grown_bytes, "by which files that it holds open have grown"),
    )
    for count, how in moved:
        if count >= LEAST_BYTES_PER_S * work.over_s:
            return f"{_bytes(count)} {how} in the last {work.over_s:.1f} s"
    return ""


def sends(work: ProcessWork | None) -> str:
    """Return what is seen of its data moving over TCP (ends a sentence), "" when nothing is."""
    if work is None or work.socket_bytes < LEAST_BYTES_PER_S * work.over_s:
        return ""
    return f"{_bytes(work.socket_bytes)} sent and received over TCP in the last {work.over_s:.1f} s"


def computes(work: ProcessWork | None) -> bool:
    """Return whether the process itself used CPU, or was runnable in most samples: state R is not sleep."""
    return work is not None and (work.is_running or _is_busy(work.own_cpu_s, work.over_s))


def waits_for_child(work: ProcessWork | None) -> str:
    """Return the living programs that it has started since it last moved ("child 4711 (aws s3 cp a b)"), or ""."""
    new = [_named(child) for child in work.children if child.is_new] if work is not None else []
    return " and ".join(new[:2])


def _is_busy(cpu_s: float, over_s: float) -> bool:
    least_s = SHORT_CPU_S if over_s <= SHORT_S else LEAST_CPU_S
    return cpu_s >= max(least_s, LEAST_SHARE * over_s)


def _children(work: ProcessWork) -> str:
    new = [child for child in work.children if child.is_new] or list(work.children)
    if not new:
        return "children that have ended"
    return f"its {_named(new[0])}" + (f" and {len(new) - 1} more" if len(new) > 1 else "")


def _named(child: ChildWork) -> str:
    return f"child {child.pid} ({child.command})"


def _bytes(count: int) -> str:
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
