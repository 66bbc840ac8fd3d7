# SPDX-License-Identifier: Apache-2.0
"""A row of the table of last words: its roles, what it carries, and the two ways to make one."""

from typing import NamedTuple

CAUSE, VICTIM, NOBODY, HARMLESS = "cause", "victim", "nobody", "harmless"
# The class of a victim's words; it is none of the faults a verdict may carry (schema.fault_classes.FAULTS), on purpose.
PEER_LOST = "peer_lost"


# How programs that started another one tell of its end: 128 + N, as a shell translates signals, and the number itself.
ENDED_WITH = r"[Ee]xit(?:ed)?(?: with)?(?: non-zero)?(?: exit)?[ _-]?(?:code|status)(?: of)?[:=]? ?"
ENDED_BY = r"(?:(?:terminated|killed|interrupted|ended|died|exited) (?:by|with|from|on) |\()signal:? "


class Row(NamedTuple):
    """One kind of last words."""

    name: str
    regex: str  # compiled with all others when a line first asks for it (`last_words`)
    fault: str
    why: str
    role: str = CAUSE
    in_traceback: bool = False  # only the line that ends a Python traceback is meant
    weak: bool = False  # what a victim may print too while it ends
    late: bool = False  # same, where it already had lost a peer
    sure: float = 0.95  # how sure a verdict may be that rests on these words alone
    hint: str = ""  # a clause for people: what these words mean

    @property
    def consequence(self) -> bool:
        """Whether the line reports another rank's failure."""
        return self.role == VICTIM


def cause(
    name: str, regex: str, fault: str, why: str, *, weak: bool = False, late: bool = False, sure: float = 0.95,
    hint: str = "", in_traceback: bool = False,
) -> Row:  # fmt: skip
    """Return a row that names what ended its rank; see ``Row`` for the arguments."""
    return Row(name, regex, fault, why, CAUSE, in_traceback, weak, late, sure, hint)


def victim(name: str, regex: str, why: str, *, in_traceback: bool = False) -> Row:
    """Return a row that shows that another rank is gone or late."""
    return Row(name, regex, PEER_LOST, why, VICTIM, in_traceback)
