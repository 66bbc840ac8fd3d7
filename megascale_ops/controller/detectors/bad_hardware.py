# SPDX-License-Identifier: Apache-2.0
"""Remember GPUs that failed, by their UUID, until a person marks them as mended.

A restart, a reset or a reboot makes a bad GPU look healthy again, for a day or an hour, and a restarted job may get
"the same node again" unknowingly. A GPU keeps its UUID for life, so it is known wherever it turns up; its serial
number is what stands on its label.
Each reason is an entry with a count; the same finding again within a minute is the same occurrence.

Pure: agents' findings in, changed entries out.
"""

from collections.abc import Iterable, Mapping

import msgspec

from megascale_ops.schema.health import BadHardware, HardwareFinding

# 60 s: a faulty GPU repeats its Xids in bursts, and a finding that stands is reported again every 30 s.
SAME_S = 60.0
# 10,000 entries are 3 MB; more than any cluster has bad GPUs. The longest quiet is dropped first.
MOST_ENTRIES = 10_000


class BadBook:
    """All entries. Owned by the loop."""

    def __init__(self, entries: Iterable[BadHardware] = ()) -> None:
        self._entries = {(one.uuid, one.reason): one for one in entries}
        self._mended: dict[str, float] = {}  # UUID -> wall clock when that was reported

    def entries(self) -> tuple[BadHardware, ...]:
        """Return all entries, the newest last."""
        return tuple(sorted(self._entries.values(), key=lambda one: one.last_wall_s))

    def of(self, uuids: Iterable[str], serials: Iterable[str] = ()) -> list[BadHardware]:
        """Return what is remembered of some GPUs, by UUID or by serial number."""
        if not self._entries:
            return []
        wanted, numbers = set(uuids), set(filter(None, serials))
        return [one for one in self._entries.values() if one.uuid in wanted or one.serial in numbers]

    def ingest_findings(
        self, node: str, findings: Iterable[HardwareFinding], serials: Mapping[str, str] | None = None
    ) -> tuple[BadHardware, ...]:
        """Take in an agent's findings; return the entries that are new or have changed.

        Args:
            node: whose agent it is.
            findings: what it finds.
            serials: serial numbers by UUID, as far as they are known.
        """
        changed = []
        for said in findings:
            if not (said.is_bad and said.gpu):
                continue
            at_s = said.last_wall_s or said.since_wall_s
            known = self._entries.get((said.gpu, said.name))
            if at_s <= self._mended.get(said.gpu, 0.0) or (known is not None and at_s <= known.last_wall_s + SAME_S):
                continue
            entry = BadHardware(
                uuid=said.gpu,
                reason=said.name,
                node=node,
                text=said.text,
                since_wall_s=known.since_wall_s if known is not None else at_s,
                last_wall_s=at_s,
                count=known.count + 1 if known is not None else 1,
                serial=(serials or {}).get(said.gpu, "") or (known.serial if known is not None else ""),
            )
            self._entries[said.gpu, said.name] = entry
            changed.append(entry)
        while len(self._entries) > MOST_ENTRIES:
            quiet = min(self._entries.values(), key=lambda one: one.last_wall_s)
            changed.append(self._forget(quiet))
        return tuple(changed)

    def mend(self, uuid: str, wall_s: float) -> tuple[BadHardware, ...]:
        """Forget a GPU; return its entries as they are to be written down (``count`` 0), empty when it is not known.

        A finding that still stands, or came before, is not taken in again; later ones are.
        """
        gone = tuple(self._forget(one) for one in list(self._entries.values()) if one.uuid == uuid)
        if gone:
            self._mended[uuid] = wall_s
        return gone

    def _forget(self, entry: BadHardware) -> BadHardware:
        del self._entries[entry.uuid, entry.reason]
        return msgspec.structs.replace(entry, count=0)
