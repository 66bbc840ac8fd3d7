# SPDX-License-Identifier: Apache-2.0
"""A job's policy: how patient and how generous to be with it; its ranges, and the one reader of what is given for it.

A setting comes in five ways: ``--policy NAME=VALUE`` and ``policy set``, a configuration file, the environment, a
request of ``POST /v1/jobs/JOB/policy``, and the message with which a runner joins. All of them end in ``value_of``,
whose ranges are those of the fields of ``JobPolicy``: what one way refuses, no other one lets through, and all word it
alike.
``policy_settings`` has the form in which people write them.

Pure: text in, a value or one clear clause out.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.ranges import MOST_COUNT, Count, Factor, Seconds, Word
from megascale_ops.suggest import unknown

# What can be done about a class of fault.
ACTION_WORDS = {
    "ignore": "nothing is done",
    "warn": "it is told, and nothing is done",
    "restart": "all ranks start again from the newest checkpoint",
    "evict": "a restart without the node to blame",
    "stop": "the job ends",
}
ACTIONS_PREFIX = "actions."
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class JobPolicy(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How patient and how generous to be with one job; sent by its runner, each field settable by the user."""

    # A line for each, for `config show`, `policy show` and the reference; beside the fields stand the reasons.
    HELP: ClassVar[dict[str, str]] = {
        "max_restarts": "Restarts in all; -1: only the hourly budgets count.",
        "restarts_per_hour": "Restarts an hour, whatever their causes.",
        "restarts_per_cause_per_hour": "Restarts an hour for one cause.",
        "frozen_grace_s": "Seconds that a stopped process (state T) may take to go on.",
        "silence_floor_s": "Seconds without a sign of progress before a rank is looked at, at least.",
        "silence_factor": "The same, in steps: times the p99 of the job's steps.",
        "silence_extra_s": "Seconds beyond the p99 step that silence_factor grants at most.",
        "busy_factor": "How much longer a rank may be silent that burns CPU outside of collectives.",
        "busy_floor_s": "Seconds that such a rank has at least.",
        "absent_patience_s": "Seconds for a rank that keeps others waiting without proof that it can't come.",
        "stuck_patience_s": "Seconds for a silence that no healthy job's wait looks like; at most absent_patience_s.",
        "phase_patience_s": "Seconds for a declared checkpoint or evaluation, and for a rank that is seen to work.",
        "startup_patience_s": "Seconds from the start to the first step.",
        "node_lost_s": "Seconds without a word of agent and runner until a node counts as lost.",
        "join_timeout_s": "Seconds to gather the least number of nodes.",
        "last_call_s": "Seconds that the first round waits for more nodes after the last one joined.",
        "evictions_per_hour": "Restarts without a node to blame, an hour.",
        "dry_run": "Judge and say what would be done, and do nothing.",
        "actions": "What is done about a class of fault, over the built-in table: frozen=warn.",
        "warning_hold_s": "Seconds that a warning must hold before anything is done about it.",
        "restart_price_s": "Seconds that a restart is assumed to cost until one was measured.",
        "eviction_s": "Seconds that an evicted node is not taken back while others suffice; doubled each time.",
        "fruitless_restarts": "Restarts in a row without a new step that end a job; a machine's fault is a quarter.",
        "straggler_share": "Share of every step that a slow rank must cost to be named.",
        "straggler_false_alarms_per_day": "False names a day that the thresholds are set for.",
        "check_suspects": "Let a node in doubt, or with a GPU that hung, measure itself before it comes back.",
        "check_all": "After a fault of hardware let all nodes measure themselves, side by side, before they go on.",
        "check_preempts": "Check a GPU that is named slow at once, beside the training, not in the next pause.",
        "service_patience_s": "Seconds that a service is waited for that the script can't reach.",
        "loss_spike_steps": "Steps in a row that the loss must stay out of its range.",
        "loss_spike_spreads": "How far that is, in spreads of the loss above its recent median.",
    }

    max_restarts: Annotated[int, Meta(ge=-1, le=MOST_COUNT)] = -1  # in all; -1: only the hourly budgets count
    restarts_per_hour: Count = 20  # of all causes
    restarts_per_cause_per_hour: Count = 10  # of one cause: what ten restarts have not mended, the next one does not
    # 1.5 s: a debugger's or a suspend's blip resumes within it; a frozen rank is still back within 5 s.
    frozen_grace_s: Seconds = 1.5
    # 5 s: a hundred 50 ms steps; below it the scheduler of a loaded machine can look like silence.
    silence_floor_s: Seconds = 5.0
    silence_factor: Factor = 20.0  # times the p99 step
    # 30 s: what delays a step (a busy machine, a retry) does not grow with it. InfiniBand itself sends again for as
    # long (time-out 20, 7 retries: 4.3 s each). A step that takes minutes may still take twice its p99.
    silence_extra_s: Seconds = 30.0
    # A rank that burns CPU outside collectives may be evaluating: wait six times as long.
    busy_factor: Factor = 6.0
    busy_floor_s: Seconds = 60.0  # and at least so long
    # 540 s: a rank that keeps others waiting, without proof that it can't come, gets nearly as long as NCCL's
    # own time-out (600 s), so that verdict and restart come just before that ends the process silently; and never
    # less than what a restart of this job has cost. 0: acted upon as soon as evidence is clear, as a test may require.
    absent_patience_s: Seconds = 540.0
    # 60 s: what was seen of no wait that ended by itself: all ranks have entered one collective and no data moves; the
    # GPU of a rank begins and ends nothing while the others' wait in what it was given; a rank sleeps inside its
    # backward pass. Twice as long as InfiniBand sends again; a kernel that was 45 s late was left alone.
    stuck_patience_s: Seconds = 60.0
    # Declared checkpoint and eval phases, and ranks that are seen to work: by a compiler in their stacks, stacks that
    # go on changing, children at work, bytes that move.
    phase_patience_s: Seconds = 1800.0
    startup_patience_s: Seconds = 1800.0  # until the first step: imports, data, compilation
    # 15 s: fifteen heartbeats; one lost packet must not cost a node.
    node_lost_s: Seconds = 15.0
    join_timeout_s: Seconds = 600.0  # to gather min_nodes
    # What the first round waits after the last join while nodes are below max_nodes. 10 s: runners that were launched
    # together join as they have imported torch, seconds apart on a shared disk; too early costs a restart.
    last_call_s: Seconds = 10.0
    # Restarts without a node that was to blame; more than a few an hour indicate a fault that is not the nodes'.
    evictions_per_hour: Count = 2
    dry_run: bool = False  # judge and report what would be done, and do nothing
    # Class of a verdict -> ignore, warn, restart, evict, stop; over the built-in table.
    actions: Annotated[dict[Word, Word], Meta(max_length=256)] = {}
    # 30 s: what passes by itself, such as a neighbour's compilation, has mostly passed by then.
    warning_hold_s: Seconds = 30.0
    # 60 s: what a restart is assumed to cost until one was measured; large models take longer, and are measured soon.
    restart_price_s: Seconds = 60.0
    # 10 min: a node that was evicted is not taken back for so long while others suffice; doubled each time.
    eviction_s: Seconds = 600.0
    # 5 restarts in a row without one new step: what is broken lies outside of what a restart can mend.
    fruitless_restarts: Count = 5
    # 2 %: below it a slow rank costs less than looking for the reason does. Of every step, what all ranks lose.
    straggler_share: Factor = 0.02
    # 0.1: one false name in ten days; thresholds follow from it and from the run's own noise.
    straggler_false_alarms_per_day: Factor = 0.1
    # Half a minute for the one node that a hardware finding names costs less than the next restart because of it.
    check_suspects: bool = True
    # Off: half a minute of all nodes for each fault of one of them is for who can't trust the others either.
    check_all: bool = False
    # Off: for half a minute all ranks would wait for those of the node that is measured.
    check_preempts: bool = False
    # 1 h: a data server or an object store that is away for longer needs a person. It is tried again after 10 s, and
    # then each time after as long as it has been away, 5 min at most.
    service_patience_s: Seconds = 3600.0
    # 3 steps in a row: a single bad batch passes by itself.
    loss_spike_steps: Count = 3
    # 10 times the loss's own spread above its recent median; ordinary noise stays below 5.
    loss_spike_spreads: Factor = 10.0

    @staticmethod
    def read_setting(name: str, raw: object) -> object:
        """Let configurations read the settings of a policy by its own reader; see ``value_of``."""
        return value_of(name, raw)


# The settings and their defaults; their types are those of the defaults.
SETTINGS: dict[str, Any] = {
    field.name: field.default for field in msgspec.structs.fields(JobPolicy) if field.name != "actions"
}


def value_of(name: str, raw: object) -> float | int | bool | str | dict[str, str]:
    """Return what was given for one setting as its value: text from whatever source, or what TOML and JSON have for it.

    Args:
        name: a field of ``JobPolicy``, or ``actions.`` with a class of fault.
        raw: what was given; for all ``actions`` a table, or text as in ``frozen=warn,silent=stop``.

    Raises:
        ValueError: what is wrong with it, one clause without a full stop.
    """
    if name == "actions":
        return _table(raw)
    if name.startswith(ACTIONS_PREFIX):
        return _action(name.removeprefix(ACTIONS_PREFIX), raw)
    return _truth(raw) if isinstance(SETTINGS[name], bool) else _number(name, raw)


def _table(raw: object) -> dict[str, str]:
    """Return what to do about some classes of fault."""
    if isinstance(raw, str):
        raw = dict(item.partition("=")[::2] for item in raw.split(","))
    if not isinstance(raw, Mapping):
        raise ValueError("a class of fault and an action are needed, as in frozen=warn")  # noqa: TRY004  a user's mistake
    table: dict[str, str] = {}
    for name, action in raw.items():
        fault = str(name).strip().removeprefix(ACTIONS_PREFIX)
        if fault not in FAULTS:
            raise ValueError(unknown("class of fault", fault, FAULTS))
        table[fault] = _action(fault, action)
    return table


def _action(fault: str, raw: object) -> str:
    word = raw.strip() if isinstance(raw, str) else raw
    if not isinstance(word, str) or word not in ACTION_WORDS:
        said = unknown("action", word, ACTION_WORDS)
        raise ValueError(f"{said}{'' if said.endswith('?') else ';'} {fault} takes {', '.join(ACTION_WORDS)}")
    return word


def _truth(raw: object) -> bool:
    word = str(raw).strip().lower() if isinstance(raw, str | bool) else ""
    if word not in _TRUE + _FALSE:
        raise ValueError("give true or false")
    return word in _TRUE


def _number(name: str, raw: object) -> float | int:
    default, (least, most) = SETTINGS[name], _ranges()[name]
    try:
        number = float(raw) if isinstance(raw, str | int | float) and not isinstance(raw, bool) else None
    except OverflowError:  # a whole number of hundreds of digits
        number = math.copysign(math.inf, -1 if raw < 0 else 1)  # type: ignore[operator]  # only an int raises it
    except ValueError:
        number = None
    if number is None:
        raise ValueError(f"a number is needed, as in {name}={text_of(default)}")
    if math.isnan(number) or number < least:
        raise ValueError(f"it must be {least:.0f} or more")
    if number > most:  # beyond what a join may carry, so a run could not even begin
        raise ValueError(f"it is too large: {most:.0f} is the most")
    if not isinstance(default, int):
        return number
    if not number.is_integer():
        raise ValueError("a whole number is needed")
    return int(number)


@cache
def _ranges() -> dict[str, tuple[float, float]]:
    """Return the least and the most that each number may be, from the types of the fields: all at once, 0.2 ms."""
    info = msgspec.inspect.type_info(JobPolicy)
    assert isinstance(info, msgspec.inspect.StructType)
    found = {}
    for field in info.fields:
        kind = field.type
        if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
            assert kind.ge is not None
            assert kind.le is not None
            found[field.name] = (kind.ge, kind.le)
    return found


def text_of(value: object) -> str:
    """Return a value so that it can be read back; the short form of a number where that is exact."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
