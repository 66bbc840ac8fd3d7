# SPDX-License-Identifier: Apache-2.0
"""What has happened to a job since its last save: the next batch for the journal.

``Transitions.save`` hands it over and puts a new one in its place, whole.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale_ops.schema.events import Event, Incident
    from megascale_ops.schema.messages import Order


class Unsaved:
    """The batch that gathers. Owned by the job."""

    def __init__(self) -> None:
        self.has_record = False  # the record has changed
        self.may_wait = False  # it is worth saving, but not at once
        self.must_last = False  # orders or names follow from what is saved next
        self.events: list[Event] = []
        self.incidents: dict[str, Incident] = {}
        # Of these the newest is worth a write, but not each: thousands of nodes give evidence for one incident.
        self.later: dict[str, Incident] = {}
        self.orders: dict[str, Order] = {}  # by id: given out once all of it is safe

    @property
    def is_due(self) -> bool:
        """Return whether there is something that is worth a write now."""
        return bool(self.has_record or self.events or self.incidents)

    def end_wait(self) -> None:
        """What could wait has waited."""
        self.has_record = self.has_record or self.may_wait
        self.incidents.update(self.later)
        self.later.clear()

    def keep(self, incident: "Incident", *, may_wait: bool) -> None:
        """Note that an incident has changed; one that may wait is written with the next tick."""
        if may_wait and incident.id not in self.incidents:
            self.later[incident.id] = incident
        else:
            self.later.pop(incident.id, None)
            self.incidents[incident.id] = incident

    def follow(self, before: "Unsaved") -> None:
        """Take over what the batch that was handed over has left."""
        self.later.update(before.later)

    def inherit(self, before: "Unsaved") -> None:
        """Take over what was said of the life of a job that this one takes the place of."""
        self.events.extend(before.events)
        self.incidents.update(before.incidents)
        self.later.update(before.later)
