# SPDX-License-Identifier: Apache-2.0
"""What each Xid means and what is to be done about it, as data: one row, one number, one source.

An Xid is an error report of NVIDIA's driver in the kernel's log. Its number is what happened and not what is to
blame: a wrong address in a user's kernel (31) and a GPU that has left the bus (79) look alike in the log. So each
number has a class, and what the driver's maker advises is put into few words (*actions*):

    none            it is reported, nothing follows
    restart_app     the process that met it is lost, the GPU is as good as before
    check_nvlink    look at the links of this GPU before it is used again
    check_hardware  power, cables and cooling of this GPU
    reset_gpu       the GPU is of no use before it is reset
    restart_node    no reset reaches it: the node is started anew
    update_software driver or firmware do not fit
    contact_support the advice is a person
    follow_driver   the line carries the advice (``nvlink_xids.py``: 144 to 150, 154); a number alone is no advice

Every number of NVIDIA's "Xid Catalog" for Ampere and newer (docs.nvidia.com/deploy/xid-errors, sheet "Xids", 172 rows,
read 2026-11) has a row here; ``catalog`` follows its column "immediate action", which tests compare row by row.
``ours`` is where the catalog has a work flow, no action, or where this project has decided, with the reason beside it.
Numbers that the catalog calls unused go to a person: a driver that writes one is older than the catalog, or newer.
Application-class numbers never speak against hardware: jobs with a bug would drain a cluster.

Pure data.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Xid(NamedTuple):
    """One row. ``group`` is application, driver, memory, nvlink, bus, power, firmware or other."""

    number: int
    name: str
    group: str
    action: str
    source: str = "catalog"


ACTIONS = (
    "none", "restart_app", "check_nvlink", "check_hardware", "reset_gpu", "restart_node", "update_software",
    "contact_support", "follow_driver",
)  # fmt: skip
# After these the GPU itself is in doubt: its UUID is kept until an operator reports the repair.
BAD_ACTIONS = frozenset({"check_nvlink", "check_hardware", "reset_gpu", "restart_node"})

# fmt: off
_ROWS = (
    Xid(8, "the GPU stopped processing", "application", "restart_app"),
    Xid(11, "a damaged command stream", "application", "restart_app"),
    Xid(13, "an exception in a kernel, such as an index out of bounds", "application", "restart_app"),
    Xid(14, "an error that a program made up for a test", "other", "none"),
    Xid(25, "a command that is not allowed", "application", "restart_app"),
    Xid(31, "a kernel touched an address that is not mapped", "application", "restart_app"),
    Xid(32, "a damaged command stream for the memory engine", "application", "restart_app"),
    Xid(37, "a driver firmware message", "driver", "none"),
    Xid(38, "the driver's firmware was slow", "driver", "none"),
    Xid(43, "a process's work was given up after its own fault", "application", "none"),
    Xid(44, "a fault while contexts were switched", "driver", "none"),
    # The catalog has a work flow here: another Xid beside it names its owner.
    Xid(45, "work was removed because a process ended or another fault came first", "application", "restart_app",
        "ours"),
    Xid(46, "the GPU stopped processing and did not answer", "driver", "reset_gpu"),
    # A work flow as well; its end is a reset in all cases but those that 94 reports.
    Xid(48, "two wrong bits in a word of memory", "memory", "reset_gpu", "ours"),
    Xid(54, "auxiliary power is not connected", "power", "check_hardware"),
    Xid(60, "a video processor's fault", "application", "restart_app"),
    Xid(61, "the power controller's firmware stopped", "firmware", "contact_support"),
    Xid(62, "the power controller's firmware halted", "firmware", "reset_gpu"),
    # gcm rates it harmless, Imbue drains for it: the row is replaced at the next reset, nothing is wrong until then.
    Xid(63, "a row of memory will be replaced at the next reset", "memory", "none"),
    Xid(64, "a row of memory can't be replaced", "memory", "reset_gpu"),
    Xid(66, "an illegal register access by the driver's firmware", "driver", "none"),
    Xid(67, "a verification error of the driver's firmware", "driver", "none"),
    Xid(69, "a wrong class of graphics command", "application", "restart_app"),
    # The catalog has a work flow: one that comes alone and does not come back is a transient.
    Xid(74, "an NVLink error", "nvlink", "check_nvlink", "ours"),
    Xid(78, "a virtual GPU could not start", "driver", "update_software"),
    Xid(79, "the GPU has fallen off the bus", "bus", "restart_node"),
    Xid(80, "a damaged command stream", "application", "restart_app"),
    # gcm and the catalog rate it harmless, Imbue drains: correctable errors alone cost nothing.
    Xid(92, "many single wrong bits, all corrected", "memory", "none"),
    Xid(93, "the GPU's own storage is worn", "firmware", "none"),
    Xid(94, "wrong bits in memory, kept within one process", "memory", "restart_app"),
    Xid(95, "wrong bits in memory, not kept within one process", "memory", "reset_gpu"),
    Xid(106, "a test message of the management bus", "other", "none"),
    Xid(107, "a test message of the management bus", "other", "none"),
    Xid(108, "an address that the other end of an NVLink could not translate", "nvlink", "none"),
    # The catalog requires a reset; here it follows a kernel that never ends, which only a restart of the process mends.
    Xid(109, "a context could not be switched away in time", "application", "restart_app", "ours"),
    Xid(110, "a fault of the security engine", "firmware", "reset_gpu"),
    Xid(119, "the GPU's system processor did not answer", "firmware", "reset_gpu"),
    Xid(120, "an error of the GPU's system processor", "firmware", "reset_gpu"),
    Xid(121, "a corrected error between chips", "nvlink", "none"),
    Xid(122, "the power controller could not read its storage", "firmware", "contact_support"),
    Xid(123, "the power controller could not write its storage", "firmware", "contact_support"),
    Xid(124, "the power controller could not erase its storage", "firmware", "contact_support"),
    Xid(125, "the GPU's own storage is damaged", "firmware", "contact_support"),
    Xid(136, "NVLink training failed", "nvlink", "reset_gpu"),
    Xid(137, "an NVLink access that was not allowed", "nvlink", "none"),
    Xid(139, "an optical flow engine's fault", "application", "restart_app"),
    Xid(140, "wrong bits in memory that could not be corrected", "memory", "reset_gpu"),
    Xid(141, "a fault on the fast path", "application", "none"),
    Xid(142, "a video encoder's fault", "other", "contact_support"),
    Xid(143, "the GPU could not be initialised", "firmware", "reset_gpu"),
    # The line carries unit, severity and cause. NVML gives a number alone: then the number's advice stands.
    *(Xid(number, "an NVLink 5 error", "nvlink", "follow_driver") for number in range(144, 151)),
    Xid(151, "a key could not be rotated", "other", "restart_node"),
    Xid(152, "a fault of the inference engine's memory unit", "other", "none"),
    Xid(153, "a time-out of the inference engine", "other", "none"),
    Xid(154, "the driver's advice for this GPU has changed", "other", "follow_driver"),
    Xid(155, "an NVLink error found by software", "nvlink", "reset_gpu"),
    Xid(156, "a part of the GPU was retired", "memory", "reset_gpu"),
    Xid(157, "a part of the GPU could not be retired", "memory", "none"),
    Xid(158, "a fatal time-out in the GPU", "firmware", "reset_gpu"),
    # "Reset where unified memory is used, else ignore": CUDA does not start without that driver.
    Xid(159, "an error without data between CPU and GPU", "bus", "reset_gpu", "ours"),
    Xid(160, "a memory channel was retired", "memory", "none"),
    Xid(161, "a memory channel could not be retired", "memory", "none"),
    # From here on the catalog has no action. What only smooths power draw costs no step, and 171 and 172 stand beside a
    # 48, which has the action; the rest needs an operator.
    *(Xid(number, "the smoothing of power draw changed", "power", "none", "ours") for number in (162, 163, 164, 165)),
    Xid(166, "encrypted NVLink traffic before the link was ready", "nvlink", "contact_support", "ours"),
    Xid(167, "a fatal time-out on PCIe", "bus", "contact_support", "ours"),
    Xid(168, "wrong bits in the memory that the driver keeps for itself", "memory", "contact_support", "ours"),
    Xid(169, "the security processor's firmware halted", "firmware", "contact_support", "ours"),
    Xid(170, "an interrupt of an encrypted NVLink", "nvlink", "contact_support", "ours"),
    Xid(171, "where in memory the wrong bits of a 48 are", "memory", "none", "ours"),
    Xid(172, "where in the chip the wrong bits of a 48 are", "memory", "none", "ours"),
)
_COPY_ENGINES = (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))
_VIDEO_ENGINES = (68, 82, 83, 84, 86, 88, 89, *range(96, 106))
_UNUSED = (
    *range(1, 8), 9, 10, 12, *range(15, 25), *range(26, 31), *range(33, 37), 42, 47, *range(49, 54), *range(55, 60), 65,
    73, 81, 87, 90, 91, *range(111, 119), 138,
)
# fmt: on


def _rows() -> Iterator[Xid]:
    yield from _ROWS
    yield from (Xid(number, "a copy engine fault", "application", "restart_app") for number in _COPY_ENGINES)
    # Imbue counts 68 as hardware, the catalog and gcm do not.
    yield from (
        Xid(number, "a video or image engine's fault", "application", "restart_app") for number in _VIDEO_ENGINES
    )
    yield from (Xid(number, "a number that is out of use", "other", "contact_support") for number in _UNUSED)


XIDS: dict[int, Xid] = {row.number: row for row in _rows()}
# Numbers without a row are rare and never harmless enough to be passed over, nor documented well enough to act upon.
UNKNOWN = Xid(0, "an error that this table does not know", "other", "contact_support", "ours")


def meaning_of(number: int) -> Xid:
    """Return the row of an Xid; one that the table does not know has a row without a name."""
    return XIDS.get(number) or UNKNOWN._replace(number=number)
