# SPDX-License-Identifier: Apache-2.0
"""Lines of the kernel's log about disks, file systems and file servers; see ``kernel_rules.py`` for the columns.

Names of patterns follow the drivers: nvme, the block layer, md, ext4, xfs, btrfs, the clients of NFS, Lustre and Ceph.
What a virtual machine's empty floppy and CD drives say of themselves is no error of a disk. Pure data.
"""

from megascale_agents.collectors.kernel_rules import BDF, row

_NVME = r"(?:block )?(?:nvme )?(?P<device>nvme\d{1,4}(?:c\d+)?(?:n\d{1,4})?)(?:p\d+)?: "
_BLOCK = r"dev(?:ice)? (?P<device>(?!fd\d|sr\d|loop\d)[\w!-]{1,40})"
_FS = r"\((?:device )?(?P<device>[\w!.:-]{1,40})\)"
_TARGET = r"(?P<device>[^:\s]{1,60}?)(?:-(?:osc|mdc|lwp)(?:-[0-9a-fA-FxMDTOSp]+)?)?"

DISKS = (
    row(
        "nvme_lost",
        "nvme",
        _NVME + r"(?:Disabling device after reset failure|Removing after probe failure|Device not ready; "
        r"aborting (?:reset|initiali[sz]ation)|no available path - failing I/O|.*Device dead)",
        "fail",
        "the disk {device} is lost",
    ),
    row(
        "nvme_lost",
        "failed with error",
        rf"nvme:? (?:probe of )?(?P<device>{BDF}):? (?:probe with driver nvme )?failed with error",
        "fail",
        "the driver could not start the disk at {device}",
    ),
    row("nvme_reset", "nvme", _NVME + r"controller is down; will reset", "warn", "the disk {device} was reset"),
    row(
        "nvme_timeout",
        "nvme",
        _NVME + r"I/O .*timeout, (?P<what>reset controller|aborting|disable controller)",
        "warn",
        "the disk {device} did not answer in time ({what})",
    ),
    row(
        "nvme_timeout",
        "completion polled",
        _NVME + r"I/O .*timeout, completion polled",
        "note",
        "an answer of the disk {device} came without its interrupt",
    ),
    row(
        "io_error",
        "I/O Error",
        _NVME + r".*I/O Error \((?P<what>[^)]{1,40})\)",
        "warn",
        "the disk {device} had an error ({what})",
    ),
    row("io_error", "I/O error, dev", r"I/O error, " + _BLOCK, "warn", "reading or writing {device} failed"),
    row(
        "io_error",
        "critical ",
        r"critical (?P<what>medium|target|nexus|space allocation) error, " + _BLOCK,
        "warn",
        "{device} had an error ({what})",
    ),
    row("io_error", "Buffer I/O error", r"Buffer I/O error on " + _BLOCK, "warn", "reading or writing {device} failed"),
    row(
        "io_error",
        "beyond end of device",
        r"(?P<who>.{1,64}): attempt to access beyond end of device",
        "warn",
        "something reads or writes beyond the end of a disk",
    ),
    row(
        "raid_failed",
        "failing array",
        r"md/\w+:? ?(?P<device>md\w{1,20}): Disk failure on (?P<disk>\S{1,40}) detected, failing array",
        "fail",
        "the array {device} is lost with its disk {disk}",
    ),
    row(
        "raid_degraded",
        "Disk failure on",
        r"md/\w+:? ?(?P<device>md\w{1,20}): Disk failure on (?P<disk>[\w-]{1,40}), disabling",
        "warn",
        "the array {device} has lost its disk {disk}",
    ),
    row(
        "read_only",
        "emounting filesystem read-only",
        r"(?P<kind>\w+)(?:-fs)?(?: error| info)? ?(?:" + _FS + r")?.*Remounting filesystem read-only",
        "fail",
        "the file system on {device} can't be written to any more",
    ),
    row(
        "read_only",
        "forced readonly",
        r"BTRFS:? (?:info|error|warning)? ?" + _FS + r".*forced readonly",
        "fail",
        "the file system on {device} can't be written to any more",
    ),
    row(
        "filesystem_lost",
        "XFS ",
        r"XFS " + _FS + r": .*(?:[Ss]hutting down filesystem|has been shut down|xfs_do_force_shutdown)",
        "fail",
        "the file system on {device} has stopped",
    ),
    row(
        "filesystem_error",
        "XFS ",
        r"XFS " + _FS + r": .*?(?P<why>[\w/ ]{0,30}\b(?:[Ee]rror|[Cc]orruption)\b)",
        "warn",
        "the file system on {device} has an error ({why})",
    ),
    row(
        "filesystem_error",
        "EXT4-fs error",
        r"EXT4-fs error " + _FS + r".*?: (?:comm (?P<who>.{1,40}?): )?(?P<why>.{0,60})",
        "warn",
        "the file system on {device} has an error",
    ),
    row(
        "filesystem_error",
        "writing superblock",
        _FS + r": I/O error while writing superblock",
        "warn",
        "the file system on {device} has an error",
    ),
    row(
        "filesystem_error",
        "Aborting journal",
        r"Aborting journal on device (?P<device>[\w!-]{1,40}?)(?:-\d+)?\.",
        "fail",
        "the file system on {device} has lost its journal",
    ),
    row(
        "filesystem_error",
        "BTRFS",
        r"BTRFS:? (?:error|critical) " + _FS + r".*(?:errno=|corrupt|failed)",
        "warn",
        "the file system on {device} has an error",
    ),
)

SERVERS = (
    row(
        "nfs_silent",
        "not responding",
        r"(?:nfs|lockd|NFS|RPC): server (?P<device>\S{1,80}) not responding",
        "warn",
        "the file server {device} does not answer",
    ),
    row(
        "nfs_answers",
        "server ",
        r"(?:nfs|lockd|NFS|RPC): server (?P<device>\S{1,80}) OK$",
        "note",
        "the file server {device} answers",
        ends="nfs_silent",
    ),
    # Frames of a stack that the kernel prints of who hangs; one after a question mark is left over from earlier.
    row(
        "nfs_stuck",
        "nfs_",
        r"^ *(?:nfs_lock_and_join_requests|nfs_wb_all|nfs_page_async_flush|nfs_writepages_callback)\+0x",
        "warn",
        "a process hangs while it writes to a file server (NFS)",
    ),
    row(
        "nfs_state_lost",
        "eclaim",
        r"nfs4_reclaim_open_state: (?:Lock|unhandled) reclaim|nfs4_reclaim_open_state: Lock reclaim failed",
        "warn",
        "locks on files of a server were lost (NFS)",
    ),
    row(
        "nfs_state_lost",
        "failed on NFSv4 server",
        r"NFS: .*failed on NFSv4 server (?P<device>\S{1,80})",
        "warn",
        "the file server {device} refused what this node held open",
    ),
    row(
        "lustre_evicted",
        "was evicted by",
        r"LustreError: .*?"
        r": (?P<device>[^:\s]{1,60}?)(?:-(?:osc|mdc|lwp)\S*)?: This client was evicted by (?P<by>[^;\s]{1,60})",
        "fail",
        "the file server {by} threw this node out (Lustre); what its processes had open fails",
    ),
    row(
        "lustre_lost",
        "was lost; in progress",
        r"Lustre(?:Error)?: (?:.*?: )?" + _TARGET + r": Connection to (?P<by>\S{1,60}) .*was lost; in progress",
        "warn",
        "the connection to the file server {by} is lost (Lustre)",
    ),
    row(
        "lustre_back",
        "Connection restored to",
        r"Lustre: (?:.*?: )?" + _TARGET + r": Connection restored to",
        "note",
        "the connection to {device} is back (Lustre)",
        ends="lustre_lost",
    ),
    row(
        "lustre_slow",
        "Request sent has timed out",
        r"Lustre: .*Request sent has timed out for (?P<why>slow reply|sent delay)",
        "note",
        "a file server was slow to answer (Lustre)",
    ),
    row(
        "ceph_silent",
        "ceph: ",
        r"ceph: (?:\[\S+\]: )?(?P<device>mds\d+) (?P<why>hung|caps stale)",
        "warn",
        "the file server {device} does not answer (Ceph)",
    ),
    row(
        "ceph_answers",
        "ceph: ",
        r"ceph: (?:\[\S+\]: )?(?P<device>mds\d+) (?:came back|caps renewed|recovery completed)",
        "note",
        "the file server {device} answers (Ceph)",
        ends="ceph_silent",
    ),
    row(
        "ceph_server_away",
        "libceph: ",
        r"libceph: (?:\(.*?\) )?(?P<device>(?:osd|mon|mds)\d+) (?:\S+ )?(?:down|.*session lost)",
        "note",
        "the storage server {device} is away (Ceph)",
    ),
)

RULES = (*DISKS, *SERVERS)
