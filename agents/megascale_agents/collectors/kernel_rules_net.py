# SPDX-License-Identifier: Apache-2.0
"""Lines of the kernel's log that all networks share, and of adapters beside mlx5 and efa; see ``kernel_rules.py``.

Patterns follow the drivers: net/sched's watchdog, bonding, IP over InfiniBand, mlx4, bnxt_en, ice and i40e, the clouds'
own adapters (ena, gve, mana), and the tables of TCP, connection tracking and neighbours. Pure data.
"""

from megascale_agents.collectors.kernel_rules import BDF, row

QUEUES = (
    row(
        "nic_queue_timeout",
        "NETDEV WATCHDOG",
        r"NETDEV WATCHDOG: (?P<device>[\w.-]{1,40}) \([\w-]+\): transmit queue \d+ timed out",
        "warn",
        "the adapter {device} sent nothing for seconds",
    ),
    # Since 6.6: driver, its device (on the PCIe bus or virtio's) and interface stand before the words.
    row(
        "nic_queue_timeout",
        "NETDEV WATCHDOG",
        r"[\w-]{1,30} \S{1,40} (?P<device>[\w.-]{1,40}): NETDEV WATCHDOG: .*transmit queue \d+ timed out",
        "warn",
        "the adapter {device} sent nothing for seconds",
    ),
    row(
        "nic_queue_timeout",
        "TX timeout on queue",
        r"(?:[\w-]{1,30} \S{1,40} |mlx4_en: )(?P<device>[\w.-]{1,40}): TX timeout on queue",
        "warn",
        "the adapter {device} sent nothing for seconds",
    ),
    row(
        "nic_queue_timeout",
        "tx_timeout",
        rf"\w{{1,20}} {BDF} (?P<device>[\w.-]{{1,40}}): tx_timeout(?:: VSI_num| recovery level)",
        "warn",
        "the adapter {device} sent nothing for seconds",
    ),
    row(
        "nic_queue_timeout",
        "transmit timeout: latency",
        r"(?P<device>[\w.-]{1,40}): transmit timeout: latency",
        "warn",
        "the adapter {device} sent nothing for seconds",
    ),
)

LINKS = (
    row(
        "bond_link_down",
        "link status definitely down",
        r"\(?slave (?P<device>[\w.-]{1,40})\)?: link status definitely down",
        "warn",
        "the link of {device}, which is one of a bond, went down",
    ),
    # Kernels before 5.9 name the interface behind the words.
    row(
        "bond_link_down",
        "link status definitely down for",
        r"link status definitely down for interface (?P<device>[\w.-]{1,40})",
        "warn",
        "the link of {device}, which is one of a bond, went down",
    ),
    row(
        "bond_link_up",
        "link status definitely up",
        r"\(?slave (?P<device>[\w.-]{1,40})\)?: link status definitely up",
        "note",
        "the link of {device} is up",
        ends="bond_link_down",
    ),
    row(
        "bond_link_up",
        "link status definitely up for",
        r"link status definitely up for interface (?P<device>[\w.-]{1,40})",
        "note",
        "the link of {device} is up",
        ends="bond_link_down",
    ),
    # Logged at each boot, too, until the first link is up: that line ends it.
    row(
        "bond_down",
        "without any active interface",
        r"(?P<device>[\w.-]{1,40}): now running without any active interface",
        "warn",
        "the bond {device} has no link",
    ),
    row(
        "bond_up",
        "active interface up",
        r"(?P<device>[\w.-]{1,40}): (?:first )?active interface up",
        "note",
        "the bond {device} has a link",
        ends="bond_down",
    ),
    row(
        "nic_link_down",
        "Link Down",
        r"mlx4_en: (?P<device>[\w.-]{1,40}): Link Down",
        "warn",
        "the link of adapter {device} went down",
    ),
    row(
        "nic_link_up",
        "Link Up",
        r"mlx4_en: (?P<device>[\w.-]{1,40}): Link Up",
        "note",
        "the link of adapter {device} is up",
        ends="nic_link_down",
    ),
)

RESETS = (
    row(
        "nic_unhealthy",
        "mlx4_core",
        rf"mlx4_core (?P<device>{BDF}): (?P<why>Internal error detected|.*timed out \(go bit not cleared\)"
        r"|device was reset unsuccessfully)",
        "fail",
        "the adapter {device} is not well: {why}",
    ),
    row(
        "nic_reset",
        "ena ",
        rf"ena (?P<device>{BDF})(?: [\w.-]{{1,40}})?: .*?(?P<why>lost tx completions is above the threshold"
        r"|Keep alive watchdog timeout|admin queue is not in running state|Reset attempt failed|Can not reset device"
        r"|napi handler hasn't been called|didn't receive a MSI-X interrupt)",
        "warn",
        "the adapter {device} was reset or has to be: {why}",
    ),
    row(
        "nic_reset",
        "bnxt_en",
        rf"bnxt_en (?P<device>{BDF})(?: [\w.-]{{1,40}})?: .*?(?P<why>Firmware (?:non-)?fatal reset event|[Ff]irmware "
        r"reset aborted|FW not responding|firmware fatal exception)",
        "warn",
        "the adapter {device} was reset or has to be: {why}",
    ),
    row(
        "nic_reset",
        "HWC: ",
        rf"mana (?P<device>{BDF}): HWC: (?P<why>Request timed out|Failed hw_channel req|timed out)",
        "warn",
        "the adapter {device} does not answer: {why}",
    ),
    # A change of its settings does the same.
    row(
        "nic_reset",
        "gve ",
        rf"gve (?P<device>{BDF})(?: [\w.-]{{1,40}})?: (?P<why>Device requested reset|Performing reset)",
        "note",
        "the adapter {device} was reset: {why}",
    ),
)

TABLES = (
    row(
        "tcp_memory",
        "TCP: ",
        r"TCP: (?:out of memory -- consider tuning tcp_mem|too many (?:of )?orphaned sockets)",
        "warn",
        "connections of this node have no memory (tcp_mem)",
    ),
    row(
        "connections_full",
        "table full, dropping packet",
        r"(?:nf|ip)_conntrack: .*table full, dropping packet",
        "warn",
        "this node tracks as many connections as it may and drops packets (nf_conntrack_max)",
    ),
    row(
        "neighbours_full",
        "table overflow",
        r"(?:neighbour: (?P<device>\w{1,20}): neighbor|[Nn]eighbour) table overflow",
        "warn",
        "this node knows as many neighbours as it may (gc_thresh3)",
    ),
)

RULES = (*QUEUES, *LINKS, *RESETS, *TABLES)
