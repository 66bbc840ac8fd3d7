# SPDX-License-Identifier: Apache-2.0
"""Lines of the kernel's log about disks, file systems and file servers; see ``kernel_rules.py`` for the columns.

Names of patterns follow the drivers: nvme, the block layer, md, ext4, xfs, btrfs, the clients of NFS, Lustre and Ceph.
Errors of a virtual machine's empty floppy and CD drives are none of a disk. Pure data.
"""

from megascale_agents.collectors.kernel_rules import BDF, row

_NVME = r"(?:block )?(?:nvme )?(?P<device>nvme\d{1,4}(?:c\d+)?(?:n\d{1,4})?)(?:p\d+)?: "
_BLOCK = r"dev(?:ice)? (?P<device>(?!fd\d|sr\d|loop\d)[\w!-]{1,40})"
# Since 5.18 btrfs names its state behind the device: "(device dm-0 state EA)", "(device dm-0: state EA)".
_FS = r"\((?:device )?(?P<device>[\w!.:-]{1,40}?)(?::? state [A-Z]{1,16})?\)"
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
    row(
        "nvme_away",
        "nvme",
        _NVME + r"(?:starting error recovery|failed nvme_keep_alive_end_io|[Rr]econnecting in \d|Failed reconnect)",
        "warn",
        "the connection to the remote disk {device} is lost",
    ),
    row(
        "nvme_back",
        "uccessfully reconnected",
        _NVME + r"[Ss]uccessfully reconnected",
        "note",
        "the connection to the remote disk {device} is back",
        ends="nvme_away",
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
        "disk_offline",
        "offline",
        r"(?:sd|scsi) (?P<device>\d{1,4}:\d{1,4}:\d{1,4}:\d{1,9}): (?:\[\w{1,20}\] )?"
        r"(?:Device offlined|rejecting I/O to offline device)",
        "warn",
        "the disk {device} was given up",
    ),
    row(
        "disk_offline",
        "disable",
        r"^(?P<device>ata\d{1,4}(?:\.\d{1,2})?): disabled?(?: device)?$",
        "warn",
        "the disk {device} was given up",
    ),
    row(
        "disk_reset",
        "exception Emask",
        r"^(?P<device>ata\d{1,4}(?:\.\d{1,2})?): exception Emask",
        "note",
        "the link of the disk {device} had an error and was reset",
    ),
    row(
        "disk_controller_failed",
        "FAULT state",
        rf"(?P<driver>megaraid_sas) (?P<device>{BDF}): .*FW in FAULT state",
        "fail",
        "the disks' controller {device} ({driver}) has a fault",
    ),
    row(
        "disk_controller_failed",
        "fault_state(0x",
        r"(?P<device>mpt[23]sas_cm\d{1,3}): fault_state\(0x",
        "fail",
        "the disks' controller {device} has a fault",
    ),
    row(
        "disk_path_lost",
        "device-mapper: multipath",
        r"device-mapper: multipath: (?:\d+:\d+: )?Failing path (?P<device>\d{1,4}:\d{1,7})",
        "warn",
        "one of the paths to a disk is lost ({device})",
    ),
    row(
        "disk_path_back",
        "device-mapper: multipath",
        r"device-mapper: multipath: (?:\d+:\d+: )?Reinstating path (?P<device>\d{1,4}:\d{1,7})",
        "note",
        "a path to a disk is back ({device})",
        ends="disk_path_lost",
    ),
    row(
        "disk_full",
        "device-mapper: thin",
        r"device-mapper: thin: (?P<device>\d+:\d+): switching pool to (?P<why>out-of-data-space|read-only|fail)",
        "warn",
        "the pool of disks {device} takes no more ({why})",
    ),
    row(
        "disk_corrupt",
        "device-mapper: verity",
        r"device-mapper: verity: (?P<device>\d{1,4}:\d{1,7}): (?:data|metadata) block \d+ is corrupted",
        "fail",
        "the disk {device}, which is sealed, was damaged",
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
        r"^\w{1,16}(?:-fs)?(?: error| info)? ?(?:" + _FS + r")?.*Remounting filesystem read-only",
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
    # An application's write that was taken and then lost: a checkpoint may be damaged.
    row(
        "filesystem_error",
        "EXT4-fs warning",
        r"EXT4-fs warning " + _FS + r": \w{1,40}:\d+: I/O error",
        "warn",
        "the file system on {device} lost a write",
    ),
    row(
        "filesystem_error",
        "data loss",
        r"EXT4-fs " + _FS + r": failed to convert unwritten extents .*potential data loss",
        "warn",
        "the file system on {device} lost a write",
    ),
    row(
        "filesystem_error",
        "block allocation failed",
        r"EXT4-fs " + _FS + r": Delayed block allocation failed for inode \d+ .*with error (?P<why>\d{1,4})",
        "warn",
        "the file system on {device} lost a write",
    ),
    row(
        "filesystem_error",
        "JBD2: ",
        r"JBD2: (?:Detected IO errors while flushing file data on|Error -\d+ detected when updating journal superblock "
        r"for) (?P<device>[\w!-]{1,40}?)(?:-\d+)?\.?$",
        "warn",
        "the file system on {device} lost a write",
    ),
    row(
        "page_allocation",
        "possible memory allocation deadlock",
        r"XFS(?: \([\w!.:-]{1,40}\))?: (?P<who>.{1,40}?)\((?P<pid>\d{1,10})\) possible memory allocation deadlock",
        "note",
        "the kernel had no memory for {who}'s files (XFS)",
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
    # Frames of a stack that the kernel prints of a hung task; one after a question mark is left over from earlier.
    row(
        "nfs_stuck",
        "nfs_",
        r"^ *(?:nfs_lock_and_join_requests|nfs_wb_all|nfs_page_async_flush|nfs_writepages_callback)\+0x",
        "warn",
        "a process hangs while it writes to a file server (NFS)",
    ),
    row(
        "nfs_file_changed",
        "fileid changed",
        r"NFS: server (?P<device>\S{1,80}) error: fileid changed",
        "note",
        "the file server {device} gave another file in place of one that is open",
    ),
    row(
        "nfs_silent",
        "has not responded in",
        r"(?:CIFS|smb3?): VFS: (?P<device>\S{1,80}) has not responded in \d+ seconds",
        "warn",
        "the file server {device} does not answer",
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
        "Request sent has ",
        r"Lustre: .*Request sent has (?:timed out for |failed due to )(?P<why>slow reply|sent delay|network error)",
        "note",
        "a file server was slow to answer (Lustre)",
    ),
    row(
        "lustre_slow",
        "Timed out RDMA",
        r"LNet(?:Error)?: .*Timed out RDMA\b",
        "note",
        "a file server was slow to answer (Lustre's network)",
    ),
    row(
        "lustre_broken",
        "LustreError",
        r"LustreError: .*\)\) (?:LBUG$|ASSERTION\()",
        "fail",
        "the file servers' client (Lustre) met an error in itself and has stopped",
    ),
    row(
        "gpfs_lost",
        "GPFS Deadman",
        r"GPFS Deadman Switch timer (?:\[\d+\] )?has expired",
        "fail",
        "this node lost its right to the disks of the cluster (GPFS) and is about to stop",
    ),
    row(
        "ceph_denied",
        "reconnect denied",
        r"ceph: (?:\[[^\]]{1,80}\]: )?(?P<device>mds\d+) reconnect denied",
        "fail",
        "the file server {device} threw this node out (Ceph); what its processes had open fails",
    ),
    row(
        "ceph_silent",
        "ceph: ",
        r"ceph: (?:\[[^\]]{1,80}\]: )?(?P<device>mds\d+) (?P<why>hung|caps stale)",
        "warn",
        "the file server {device} does not answer (Ceph)",
    ),
    row(
        "ceph_answers",
        "ceph: ",
        r"ceph: (?:\[[^\]]{1,80}\]: )?(?P<device>mds\d+) (?:came back|caps renewed|recovery completed)",
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
