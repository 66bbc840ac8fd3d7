# SPDX-License-Identifier: Apache-2.0
"""Lines of the kernel's log about buses and network adapters; see ``kernel_rules.py`` for the columns.

Names of patterns follow the drivers: PCIe error reporting and hot plug, IOMMUs, mlx5_core (health.c, cmd.c, events.c),
efa, and the lines common to all network drivers. Pure data.
"""

from megascale_agents.collectors.kernel_rules import BDF, row

# A line of the adapter at 0000:5c:00.0 may name its interface, the function that logs, and the process at work.
_MLX5 = rf"mlx5_core (?P<device>{BDF})(?: (?!NETDEV)[\w.@-]{{1,40}})?: (?:\w+:\d+:\(pid (?P<pid>\d{{1,10}})\): )?"
_BUS = rf"(?P<driver>\S{{1,40}}) (?P<pci>{BDF}): (?:AER: )?PCIe Bus Error: "
_EFA = rf"(?:efa|infiniband) (?P<device>{BDF}|rdmap\w+|efa_\d+): "

BUSES = (
    row(
        "pcie_corrected",
        "PCIe Bus Error",
        _BUS + r"severity=Correct(?:ed|able), "
        r"type=(?P<kind>[\w ]{1,30})",
        "note",
        "PCIe had to correct errors of {driver} {pci} ({kind})",
    ),
    row(
        "pcie_uncorrected",
        "PCIe Bus Error",
        _BUS + r"severity=Uncorrect(?:ed|able) \(Non-Fatal\), "
        r"type=(?P<kind>[\w ]{1,30})",
        "warn",
        "PCIe lost a packet of {driver} {pci} ({kind})",
    ),
    row(
        "pcie_fatal",
        "PCIe Bus Error",
        _BUS + r"severity=Uncorrect(?:ed|able)(?: \(Fatal\))?, "
        r"type=(?P<kind>[\w ]{1,30})",
        "fail",
        "the PCIe link of {driver} {pci} failed ({kind})",
    ),
    # Where the device no longer responds, this is the only line; else its own line follows, with the same finding.
    row(
        "pcie_fatal",
        "(Fatal) error ",
        rf"AER: (?:Multiple )?Uncorrect(?:ed|able) \(Fatal\) error (?:message )?received(?: from|:) (?P<pci>{BDF})",
        "fail",
        "the PCIe link of {pci} failed",
    ),
    row(
        "pcie_corrected",
        "no details found",
        rf"AER: (?:Multiple )?Correct(?:ed|able) error (?:message )?received (?:from )?(?P<pci>{BDF})",
        "note",
        "PCIe had to correct errors of {pci}",
    ),
    row(
        "pcie_recovery_failed",
        "device recovery failed",
        rf"(?P<driver>\S{{1,40}}) (?P<pci>{BDF}): AER: device recovery failed",
        "fail",
        "{driver} {pci} did not come back after a PCIe error",
    ),
    row(
        "pcie_recovery_failed",
        "AER: can't recover",
        rf"(?P<driver>\S{{1,40}}) (?P<pci>{BDF}): AER: can't recover",
        "warn",
        "the driver of {driver} {pci} can't make good a PCIe error",
    ),
    row(
        "pcie_fatal",
        "DPC: ",
        rf"pcieport (?P<pci>{BDF}): (?:AER: )?DPC: (?:containment event|unmasked uncorrectable error)",
        "fail",
        "the PCIe port {pci} was switched off after an error that could not be corrected",
    ),
    row(
        "pcie_link_down",
        "pciehp: ",
        rf"pcieport (?P<pci>{BDF}): pciehp: Slot\((?P<slot>[^)]{{1,20}})\): (?:Link Down|Card not present)",
        "warn",
        "the PCIe link of slot {slot} went down",
    ),
    row(
        "pcie_lost",
        "inaccessible",
        rf"(?P<driver>\S{{1,40}}) (?P<pci>{BDF}): .*(?:config space|device) inaccessible",
        "fail",
        "{driver} {pci} does not answer on the PCIe bus any more",
    ),
    row(
        "pcie_lost",
        "giving up",
        rf"(?P<driver>\S{{1,40}}) (?P<pci>{BDF}): not ready \d{{1,9}}ms after (?P<what>[\w /]{{1,20}}); giving up",
        "fail",
        "{driver} {pci} did not come back ({what})",
    ),
    # Kernels before 5.5 log this for a device that is gone; also for one that stays asleep, as a GPU's USB port may.
    row(
        "pcie_lost",
        "Refused to change power state",
        r"(?P<driver>\S{1,40}) (?P<pci>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.0): "
        r"Refused to change power state, currently in D3",
        "warn",
        "{driver} {pci} does not wake up, and may be gone from the PCIe bus",
    ),
    # Kernels 6.5 to 6.10 log it at boot for empty slots, too.
    row(
        "pcie_link_slow",
        "retraining failed",
        rf"(?P<driver>\S{{1,40}}) (?P<pci>{BDF}): retraining failed",
        "note",
        "the PCIe link below {driver} {pci} could not be set up",
    ),
    row(
        "pcie_power",
        "ower fault",
        rf"pcieport (?P<pci>{BDF}): pciehp: Slot\((?P<slot>[^)]{{1,20}})\): Power fault",
        "warn",
        "the PCIe slot {slot} has a power fault",
    ),
    # Adapters' drivers print it for their own device; the bus ("pci 0000:...") of each newer device in an older slot.
    row(
        "pcie_link_slow",
        "available PCIe bandwidth, limited by",
        rf"(?<!\S)(?P<driver>(?!pci )\S{{1,40}}) (?P<pci>{BDF}): (?P<have>[\d.]{{1,9}}) Gb/s available PCIe bandwidth, "
        rf"limited by (?P<link>[\d.]{{1,6}} GT/s PCIe x\d{{1,2}}) link at \S{{1,20}} "
        r"\(capable of (?P<could>[\d.]{1,9}) Gb/s",
        "note",
        "the PCIe link of {driver} {pci} carries {have} of {could} Gb/s ({link})",
    ),
    row(
        "iommu_silent",
        "AMD-Vi: ",
        r"AMD-Vi: .*(?P<why>Completion-Wait loop timed out)",
        "warn",
        "the IOMMU waits in vain for a device ({why})",
    ),
    row(
        "iommu_silent",
        "VT-d detected",
        r"DMAR: VT-d detected (?P<why>Invalidation (?:Time-out|Queue|Completion) Error)",
        "warn",
        "the IOMMU waits in vain for a device ({why})",
    ),
    row(
        "iommu_silent",
        "CMDQ timeout",
        r"arm-smmu-v3 (?P<device>\S{1,40}): (?P<why>CMDQ timeout)",
        "warn",
        "the IOMMU {device} does not answer ({why})",
    ),
    row(
        "iommu_fault",
        "DMAR: ",
        r"DMAR: \[[^\]]{1,40}\] Request device \[(?:0x)?(?P<device>[0-9a-f]{2,4}:[0-9a-f:.]{4,8})\]",
        "warn",
        "the device {device} touched memory that is not its own (IOMMU)",
    ),
    row(
        "iommu_fault",
        "IO_PAGE_FAULT",
        rf"(?P<device>{BDF}): AMD-Vi: Event logged \[IO_PAGE_FAULT domain=",
        "warn",
        "the device {device} touched memory that is not its own (IOMMU)",
    ),
    row(
        "iommu_fault",
        "IO_PAGE_FAULT",
        rf"IO_PAGE_FAULT device=(?P<device>{BDF}|[0-9a-f]{{2}}:[0-9a-f.]{{4}})",
        "warn",
        "the device {device} touched memory that is not its own (IOMMU)",
    ),
)

ADAPTERS = (
    row(
        "nic_unhealthy",
        "mlx5_core",
        _MLX5 + r".*(?P<why>[Ff]atal error \d+ detected|device's health compromised|unrecoverable hardware error"
        r"|firmware internal error|handling bad device|health recovery (?:flow )?(?:aborted|failed)|[Rr]ecovery failed"
        r"|PCI read failed|disabled by fatal error|health: device's? .*compromised)",
        "fail",
        "the adapter {device} is not well: {why}",
    ),
    row(
        "nic_unhealthy",
        "failed with error",
        rf"mlx5_core:? (?:probe of )?(?P<device>{BDF}):? (?:probe with driver mlx5_core |mlx5_load_one )?"
        r"failed with error",
        "fail",
        "the driver could not start the adapter {device}",
    ),
    row(
        "nic_unhealthy",
        "synd 0x",
        _MLX5 + r"synd 0x0*[1-9a-f][0-9a-f]*: (?P<why>.{1,60})",
        "fail",
        "the adapter {device} is not well: {why}",
    ),
    row(
        "nic_command_timeout",
        "Will cause a leak of a command resource",
        _MLX5 + r"(?P<command>[A-Z_0-9]{2,60})?.*timeout\. Will cause a leak",
        "fail",
        "the firmware of adapter {device} does not answer ({command})",
    ),
    row(
        "nic_command_timeout",
        "No done completion",
        _MLX5 + r"(?:cmd\[-?\d+\]: )?(?P<command>[A-Z_0-9]{2,60})\(0x[0-9a-f]+\) No done completion",
        "fail",
        "the firmware of adapter {device} does not answer ({command})",
    ),
    row(
        "nic_completion_error",
        "CQ error on CQN",
        _MLX5 + r"CQ error on CQN",
        "note",
        "a queue of adapter {device} ended with an error",
    ),
    # Refused reads of registers, by firmware that keeps a port for itself: reading its counters causes them.
    row(
        "nic_command_refused",
        "ACCESS_REG",
        _MLX5 + r"ACCESS_REG\(0x805\).*failed",
        "note",
        "the firmware of adapter {device} refused to show a register",
    ),
    row(
        "nic_command_failed",
        "syndrome",
        _MLX5 + r"(?P<command>[A-Z_0-9]{2,60})\(0x[0-9a-f]+\).* failed, status (?P<why>[\w ]{1,40})",
        "warn",
        "the firmware of adapter {device} refused {command}: {why}",
    ),
    row(
        "nic_completion_error",
        "dump error cqe",
        r"(?:infiniband )?(?P<device>mlx5_\w{1,40}): dump_cqe:\d+:\(pid (?P<pid>\d{1,10})\)",
        "note",
        "a transfer over {device} ended with an error",
    ),
    row(
        "nic_hot",
        "High Temperature",
        _MLX5 + r"Port module event.*High Temperature",
        "warn",
        "a cable or transceiver of adapter {device} is too hot",
    ),
    row(
        "nic_hot", "High temperature", _MLX5 + r"High temperature on sensors", "warn", "the adapter {device} is too hot"
    ),
    row(
        "nic_cable",
        "Port module event",
        _MLX5 + r"Port module event(?:\[error\])?: module \d+, (?P<why>Cable error.*)",
        "warn",
        "adapter {device}: {why}",
    ),
    # Logged at every boot for a port without a cable; for one in use the loss of its link is logged as well.
    row(
        "nic_cable",
        "Port module event",
        _MLX5 + r"Port module event: module \d+, Cable unplugged",
        "note",
        "adapter {device} has no cable",
    ),
    row(
        "nic_power",
        "insufficient power",
        _MLX5 + r"Detected insufficient power on the PCIe slot(?: \((?P<power>\w+)\))?",
        "warn",
        "the PCIe slot of adapter {device} gives too little power ({power})",
    ),
    row(
        "nic_link_down",
        "Link ",
        _MLX5 + r"(?:Port: \d+ )?Link (?:down|DOWN)",
        "warn",
        "the link of adapter {device} went down",
    ),
    row(
        "nic_link_up",
        "Link ",
        _MLX5 + r"(?:Port: \d+ )?Link (?:up|ACTIVE)",
        "note",
        "the link of adapter {device} is up",
        ends="nic_link_down",
    ),
    row(
        "nic_link_down",
        "ink is ",
        rf"(?P<driver>\w{{1,20}}) (?P<device>{BDF})(?: [\w.-]+)?: (?:\w+ )?(?:NIC )?Link is (?:Down|down)",
        "warn",
        "the link of adapter {device} went down",
    ),
    row(
        "nic_link_up",
        "ink is ",
        rf"(?P<driver>\w{{1,20}}) (?P<device>{BDF})(?: [\w.-]+)?: (?:\w+ )?(?:NIC )?Link is (?:Up|up)\b",
        "note",
        "the link of adapter {device} is up",
        ends="nic_link_down",
    ),
    row(
        "nic_queue_timeout",
        "timeout",
        _MLX5 + r"(?:TX timeout detected|RX timeout on channel)",
        "warn",
        "the adapter {device} moved nothing for seconds",
    ),
    row(
        "nic_unhealthy",
        "dmin",
        _EFA + r".*(?P<why>Wait for completion \(polling\) timeout|didn't send any completion for admin cmd|Admin "
        r"queue is closed)",
        "fail",
        "the adapter {device} does not answer: {why}",
    ),
    row(
        "nic_unhealthy",
        "polling) timeout",
        _EFA + r".*(?P<why>Wait for completion \(polling\) timeout)",
        "fail",
        "the adapter {device} does not answer: {why}",
    ),
    row(
        "nic_unhealthy",
        "eset",
        _EFA + r".*(?P<why>Reset indication didn't turn (?:on|off)|Device isn't ready, can't reset device)",
        "fail",
        "the adapter {device} does not answer: {why}",
    ),
    row(
        "nic_unhealthy",
        "isn't ready, abort",
        _EFA + r".*(?P<why>Device isn't ready, abort com init)",
        "fail",
        "the adapter {device} does not start: {why}",
    ),
    row(
        "nic_command_failed",
        " command",
        _EFA + r".*Failed to (?:process|submit) command (?P<command>\S{1,40})",
        "warn",
        "the firmware of adapter {device} refused {command}",
    ),
)

RULES = (*BUSES, *ADAPTERS)
