# SPDX-License-Identifier: Apache-2.0
"""Lines of the kernel's log that a verdict needs to know of: one row, one kind of line.

A row has the words without which no line is of its kind (a plain search, since nearly all lines are of no kind), the
pattern, how bad it is, and the sentence. Named groups of a pattern are what it is about:

    device  what the finding is named after, with ``pci`` beside it where it stands on the bus (a GPU is known by that)
    pid     the process, or one of its threads; ``who`` its name
    other   whatever the sentence quotes

Severities: ``fail`` where the device is lost or works no more; ``warn`` where it costs or may cost the job
something; ``note`` where the hardware has mended it, or a program alone is the worse for it. Corrected errors are
notes: correcting is what the circuits are for. A row with ``ends`` marks the end of an earlier one.

Lines of a healthy machine match nothing; ``tests/real/kernel_log`` holds hundreds of these against the table.
Sources: printk calls of Linux 4.18 to 6.12; what gpud and NVSentinel look for. This file: processes, CPUs, memory and
the GPU's driver; ``kernel_rules_io.py``: buses and adapters; ``kernel_rules_net.py``: other adapters, bonds, sockets;
``kernel_rules_storage.py``. Pure data.
"""

import re
from functools import cache
from typing import NamedTuple

BDF = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"


class Rule(NamedTuple):
    """One kind of line."""

    name: str  # of the finding, machine-readable
    needle: str  # stands in every such line
    words: str  # the pattern, as it is written
    severity: str  # note, warn, fail
    says: str  # the sentence; groups in braces
    ends: str = ""  # name of the finding that is over with this line

    @property
    def pattern(self) -> re.Pattern[str]:
        """The pattern, compiled when a line first asks for it.

        Nearly all lines ask for none, and to compile all 175 takes 15 ms of CPU, a tenth of an agent's start.
        """
        return _compiled(self.words)


_compiled = cache(re.compile)  # re keeps some hundred itself, and compiles anew what others have pushed out


def row(name: str, needle: str, pattern: str, severity: str, says: str, *, ends: str = "") -> Rule:
    """Return a rule."""
    return Rule(name, needle, pattern, severity, says, ends)


# Libraries through which ranks use GPUs and communicate: a fault in one of these is named in a verdict.
_OURS = (
    r"lib(?:nccl|cuda|nvidia|nvrtc|cudnn|cublas|ibverbs|mlx5|efa|fabric|ucp|uct|ucs|torch|c10|gdrapi|mpi|sharp|rccl"
    r"|amdhip|hsa)"
)
_COMM = r"(?P<who>.{1,64}?)"

PROCESSES = (
    row(
        "oom_kill",
        "oom-kill:constraint",
        r"oom-kill:constraint=CONSTRAINT_MEMCG,.*oom_memcg=(?P<group>[^,]*),.*task=(?P<who>.*),pid="
        r"(?P<pid>\d{1,10}),uid=",
        "warn",
        "the kernel killed {who} (process {pid}) for memory: the limit of the control group {group}",
    ),
    row(
        "oom_kill",
        "Kill",
        r"[Mm]emory cgroup out of memory[^:]*: Kill(?:ed)? process (?P<pid>\d{1,10}),? (?:UID \d+,? )?\("
        + _COMM
        + r"\)(?=$|[ ,.:])",
        "warn",
        "the kernel killed {who} (process {pid}) for memory: the limit of its control group",
    ),
    row(
        "oom_kill",
        "Kill",
        r"(?:[Oo]ut of memory[^:]*: |^)Kill(?:ed)? process (?P<pid>\d{1,10}),? (?:UID \d+,? )?\("
        + _COMM
        + r"\)(?=$|[ ,.:])",
        "warn",
        "the kernel killed {who} (process {pid}) for memory",
    ),
    row(
        "segfault",
        "segfault at",
        r"(?P<who>.{1,64}?)\[(?P<pid>\d{1,10})\]: segfault at (?P<at>\S+) .*\bin (?P<library>" + _OURS + r"[\w.+-]*)",
        "warn",
        "{who} (process {pid}) crashed with a memory fault in {library}",
    ),
    row(
        "segfault",
        "segfault at",
        r"(?P<who>.{1,64}?)\[(?P<pid>\d{1,10})\]: segfault at \S+(?: .*\bin (?P<library>[^\[\s]+))?",
        "note",
        "{who} (process {pid}) crashed with a memory fault in {library}",
    ),
    # arm64 words it differently.
    row(
        "segfault",
        "unhandled",
        r"(?P<who>.{1,64}?)\[(?P<pid>\d{1,10})\]: unhandled .*(?:fault|exception).*? \(11\)"
        r"(?:.*\bin (?P<library>[^\[\s]+))?",
        "note",
        "{who} (process {pid}) crashed with a memory fault in {library}",
    ),
    row(
        "general_protection",
        "general protection",
        r"traps: (?P<who>.{1,64}?)\[(?P<pid>\d{1,10})\] general protection(?: fault)? ip:\S+"
        r"(?: .*\bin (?P<library>[^\[\s]+))?",
        "note",
        "{who} (process {pid}) crashed with a general protection fault in {library}",
    ),
    row(
        "trap",
        "traps: ",
        r"traps: (?P<who>.{1,64}?)\[(?P<pid>\d{1,10})\] (?P<trap>trap [a-z ]{3,30}|[a-z ]{3,30}?) ip:\S+"
        r"(?: .*\bin (?P<library>[^\[\s]+))?",
        "note",
        "{who} (process {pid}) crashed ({trap}) in {library}",
    ),
    row(
        "hung_task",
        " for more than ",
        r"task (?P<who>.{1,64}):(?P<pid>\d{1,10}) (?:<\w{1,20}> )?blocked (?:in I/O wait )?for more than "
        r"(?P<time>\d{1,9}) seconds",
        "warn",
        "{who} (process {pid}) hangs in the kernel for more than {time} s",
    ),
    row(
        "soft_lockup",
        "soft lockup",
        r"soft lockup - CPU#(?P<cpu>\d{1,6}) stuck for (?P<time>\d{1,9})s! \[(?P<who>.{1,64}):(?P<pid>\d{1,10})\]",
        "warn",
        "CPU {cpu} was held inside the kernel for {time} s by {who} (process {pid})",
    ),
    row(
        "hard_lockup",
        "hard LOCKUP",
        r"hard LOCKUP on cpu (?P<device>\d{1,6})",
        "fail",
        "CPU {device} stands still and takes no interrupts",
    ),
    row(
        "rcu_stall",
        "stall",
        r"rcu: INFO: rcu_\w+ (?:self-)?detected (?:expedited )?stalls? on CPU",
        "warn",
        "a CPU stands still inside the kernel (RCU stall)",
    ),
    row(
        "rcu_stall",
        "rcu_",
        r"INFO: rcu_\w+ (?:self-)?detected (?:expedited )?stalls? on CPU",
        "warn",
        "a CPU stands still inside the kernel (RCU stall)",
    ),
    row(
        "workqueue_lockup",
        "workqueue lockup",
        r"BUG: workqueue lockup - pool (?:cpus=(?P<device>[\d,-]{1,40}) )?.*stuck for (?P<time>\d{1,9})s",
        "warn",
        "deferred work of the kernel on CPU {device} stood still for {time} s",
    ),
    row(
        "kernel_panic",
        "anic - not syncing",
        r"Kernel [Pp]anic - not syncing: (?P<why>.*)",
        "fail",
        "the kernel stopped: {why}",
    ),
    row(
        "kernel_oops",
        "BUG: ",
        r"^BUG: (?P<why>unable to handle .*|kernel NULL pointer.*|Bad page state .*)",
        "fail",
        "an error inside the kernel: {why}",
    ),
    row("kernel_oops", "kernel BUG at", r"kernel BUG at (?P<why>\S+)", "fail", "an error inside the kernel at {why}"),
    # What die() prints of any exception; since 6.10 with "Oops: " before its name.
    row(
        "kernel_oops",
        " [#",
        r"^(?:Oops: )?(?P<why>[A-Za-z][\w :,.-]{1,100}): (?:0x)?[0-9a-f]{1,16} \[#\d{1,4}\]",
        "fail",
        "an error inside the kernel: {why}",
    ),
    row(
        "kernel_oops",
        "PANIC: double fault",
        r"PANIC: (?P<why>double fault)",
        "fail",
        "an error inside the kernel: {why}",
    ),
    row(
        "kernel_oops",
        "Unable to handle kernel",
        r"^Unable to handle kernel (?P<why>.*)",
        "fail",
        "an error inside the kernel: {why}",
    ),
    row(
        "file_limit",
        "file-max limit",
        r"VFS: file-max limit (?P<most>\d+) reached",
        "warn",
        "no more files can be opened on this node (limit {most})",
    ),
    row(
        "page_allocation",
        "page allocation failure",
        r"^(?P<who>.{1,64}?): page allocation failure: order:(?P<order>\d+)",
        "note",
        "the kernel had no memory of order {order} for {who}",
    ),
)

MEMORY = (
    row(
        "memory_failure",
        "hardware memory corruption",
        r"(?:Sending SIGBUS to|Killing) (?P<who>.{1,64}):(?P<pid>\d{1,10}) due to hardware memory corruption",
        "fail",
        "{who} (process {pid}) met memory of the host that is damaged",
    ),
    row(
        "memory_uncorrected",
        "EDAC ",
        r"EDAC (?P<device>\w{1,12}): (?:\d+ )?UE (?P<what>.{0,60}?)(?:(?<= )on (?P<place>\S+)|$)",
        "fail",
        "memory of the host had errors that could not be corrected ({device} {place})",
    ),
    row(
        "memory_corrected",
        "EDAC ",
        r"EDAC (?P<device>\w{1,12}): (?:\d+ )?CE (?P<what>.{0,60}?)(?:(?<= )on (?P<place>\S+)|$)",
        "note",
        "memory of the host had errors that were corrected ({device} {place})",
    ),
    # Bit 61 of a bank's status: uncorrected.
    row(
        "machine_check",
        "Machine Check",
        r"CPU (?P<device>\d{1,6}): Machine Check(?: Exception| Event)?: *[0-9a-f]+ Bank (?P<bank>\d+): "
        r"(?P<status>[2367abef][0-9a-f]{15})\b",
        "fail",
        "CPU {device} reports an error that could not be corrected (bank {bank}, {status})",
    ),
    row(
        "machine_check_corrected",
        "Machine Check",
        r"CPU (?P<device>\d{1,6}): Machine Check(?: Exception| Event)?: *[0-9a-f]+ Bank (?P<bank>\d+): "
        r"(?P<status>[0-9a-f]{16})\b",
        "note",
        "CPU {device} reports an error that was corrected (bank {bank})",
    ),
    row(
        "machine_check",
        "[Hardware Error]",
        r"\[Hardware Error\]: (?:event severity: (?P<why>fatal|recoverable)\b|(?P<amd>"
        r"Uncorrected[^.]*error|System Fatal error)\.?)",
        "fail",
        "the machine reports an error that could not be corrected",
    ),
    row(
        "machine_check",
        "ncorrected hardware memory error",
        r"Uncorrected hardware memory error in (?P<why>.*)",
        "fail",
        "memory of the host had an error that could not be corrected",
    ),
    row(
        "machine_check_corrected",
        "[Hardware Error]",
        r"\[Hardware Error\]: (?:Machine check events logged|event severity: "
        r"corrected|(?:Corrected|Deferred)[^.]* error\b)",
        "note",
        "the machine reports an error that was corrected",
    ),
    row(
        "cpu_hot",
        "above threshold",
        r"CPU(?P<cpu>\d{1,6}): (?P<what>Core|Package) temperature (?:is )?above threshold",
        "warn",
        "CPUs were slowed down because they are too hot (CPU {cpu})",
    ),
    # Freed by force, or kept by the kernel itself: the page that is damaged stays in use.
    row(
        "memory_failure",
        "recover",
        r"(?:Memory failure: |MCE )0x[0-9a-f]{1,16}: (?:recovery action for )?(?P<what>[\w ()-]{1,60}?)(?: page)?"
        r"(?: recovery)?: (?P<why>Failed|Ignored)",
        "warn",
        "memory of the host that is damaged could not be taken out of use ({what}: {why})",
    ),
    # A management controller may send the same to make a dump: a warning, no failure.
    row(
        "machine_nmi",
        "NMI: ",
        r"NMI: (?P<why>PCI system error \(SERR\)|IOCK error|memory parity error)",
        "warn",
        "the machine interrupted the kernel for a fault: {why}",
    ),
    row(
        "machine_nmi",
        "NMI received for unknown reason",
        r"NMI received for unknown reason (?P<why>\w{1,4}) on CPU (?P<cpu>\d{1,6})",
        "note",
        "the machine interrupted the kernel without saying why (reason {why})",
    ),
    row(
        "overheated",
        "ritical temperature reached",
        r"(?P<what>.{0,60}?)[Cc]ritical temperature reached",
        "fail",
        "the machine is too hot and is about to switch itself off",
    ),
)

GPUS = (
    row(
        "gpu_reset_required",
        "NV_ERR_RESET_REQUIRED",
        r"NVRM: (?:GPU ?(?P<device>\d{1,3})\b)?.*\[NV_ERR_RESET_REQUIRED\]",
        "fail",
        "the driver refuses work on GPU {device}, which has to be reset first",
    ),
    row(
        "gpu_reset_required",
        "eset required",
        r"NVRM:? (?:GPU ?(?P<device>\d{1,3})\b)?.*nvAssert\w*: .*Reset required",
        "fail",
        "the driver refuses work on GPU {device}, which has to be reset first",
    ),
    row(
        "gpu_reset_required",
        "need to be reset",
        r"NVRM: (?:GPU ?(?P<device>\d{1,3})\b)?.*GPU is likely in a bad state and may need to be reset",
        "fail",
        "GPU {device} does not start, and probably has to be reset first",
    ),
    # Xid 8, 79, 119 or 120 may follow and judges the GPU; these report it where none does.
    row(
        "gpu_silent",
        "GPU is probably locked",
        r"NVRM: (?:GPU ?(?P<device>\d{1,3})\b)?.*GPU is probably locked",
        "warn",
        "a GPU stopped answering the driver's watchdog",
    ),
    row(
        "gpu_silent",
        "eartbeat timed out",
        r"NVRM: (?:GPU ?(?P<device>\d{1,3})\b)?.*[Hh]eartbeat timed out",
        "warn",
        "the system processor of a GPU does not answer (GPU {device})",
    ),
    row(
        "gpu_silent",
        "GPU is present on the bus",
        r"NVRM: (?:GPU ?(?P<device>\d{1,3})\b)?.*Failed GPU reg read *: *0xffffffff",
        "warn",
        "registers of a GPU read as if it were not there (GPU {device})",
    ),
    row(
        "gpu_silent",
        "NV_ERR_GPU_IS_LOST",
        r"NVRM: (?:GPU ?(?P<device>\d{1,3})\b)?.*\[NV_ERR_GPU_IS_LOST\]",
        "warn",
        "the driver has lost a GPU (GPU {device})",
    ),
    row(
        "gpu_power",
        "necessary power cables",
        rf"NVRM: (?:GPU (?:at )?(?:PCI:)?(?P<pci>{BDF})\b)?.*does not have the necessary power cables",
        "fail",
        "the GPU at {pci} has no power: its cable is not plugged in",
    ),
    row(
        "gpu_init_failed",
        "NVRM: ",
        rf"NVRM: (?:GPU (?P<pci>{BDF}): )?(?:RmInitAdapter|rm_init_adapter) failed",
        "fail",
        "the driver could not start the GPU at {pci}",
    ),
    row(
        "gpu_init_failed",
        "failed with error",
        rf"nvidia:? (?:probe of )?(?P<pci>{BDF}):? (?:probe with driver nvidia )?failed with error",
        "fail",
        "the driver could not start the GPU at {pci}",
    ),
    row(
        "gpu_init_failed",
        "probe routine failed",
        r"NVRM: The NVIDIA probe routine failed for (?P<count>\d+) device",
        "fail",
        "the driver could not start {count} of the GPUs",
    ),
    row(
        "uvm_fatal",
        "uvm encountered global fatal error",
        r"uvm encountered global fatal error (?P<status>0x[1-9a-f][0-9a-f]*)",
        "fail",
        "the driver for unified memory has stopped: the node has to be started anew (status {status})",
    ),
    row(
        "gpu_driver_mismatch",
        "API mismatch",
        r"NVRM: API mismatch",
        "warn",
        "the driver's library and its kernel module are of different versions",
    ),
    row(
        "nvlink_detect_failed",
        "ostRxDet",
        r"NVRM: (?:knvlinkUpdatePostRxDetectLinkMask\w*: Failed|knvlinkDiscoverPostRxDetLinks\w*: .*failed)",
        "warn",
        "the driver could not find out which NVLinks have a partner",
    ),
    # AMD's GPUs. A ring that timed out is reset with its GPU; that line names the address.
    row(
        "amdgpu_reset",
        "GPU reset begin",
        rf"amdgpu (?P<device>{BDF}):.* GPU reset begin",
        "warn",
        "the driver resets the GPU at {device}, whose work did not end (amdgpu)",
    ),
    row(
        "amdgpu_uncorrected",
        "uncorrectable hardware errors",
        rf"amdgpu (?P<device>{BDF}):.* (?P<count>[1-9]\d{{0,8}}) (?:new )?uncorrectable hardware errors.* detected in "
        r"(?P<what>\w{1,20} block)",
        "fail",
        "the GPU at {device} has errors that can't be corrected ({count} in its {what})",
    ),
    # A process that ended before its transfers: harmless by the driver's makers (Mellanox/nv_peer_memory#120).
    row(
        "peermem_error",
        "detected invalid context",
        r"(?:nvidia[-_]peermem|nv_peer_mem):? .*ERROR detected invalid context",
        "note",
        "a process ended while adapters still held memory of a GPU (nvidia-peermem)",
    ),
    row(
        "peermem_error",
        "peer",
        r"(?:nvidia[-_]peermem|nv_peer_mem):? .*(?:ERROR|[Ff]ailed|Error)\b.{0,80}",
        "warn",
        "adapters have trouble with the GPUs' memory (nvidia-peermem)",
    ),
    row(
        "gdrcopy_error",
        "gdrdrv",
        r"gdrdrv:? ?.*(?:failed|[Ee]rror|ERROR|invalid)\b.{0,80}",
        "warn",
        "direct access to the GPUs' memory failed (gdrdrv)",
    ),
    row(
        "gds_error",
        "nvidia-fs",
        r"nvidia-fs:.*(?:[Ee]rror|[Ff]ailed)\b",
        "warn",
        "direct access of disks to the GPUs' memory failed (nvidia-fs)",
    ),
)

RULES = (*PROCESSES, *MEMORY, *GPUS)
