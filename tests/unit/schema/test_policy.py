# SPDX-License-Identifier: Apache-2.0
"""The settings of a job's policy: one reader with one set of ranges, whichever way they come in."""

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.cli.config.configuration import effective, load
from megascale_ops.errors import UsageError
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.messages import Join
from megascale_ops.schema.policy import ACTION_WORDS, SETTINGS, JobPolicy, value_of
from megascale_ops.schema.policy_settings import check_policy, check_settings, read_settings, show_settings

NUMBERS = sorted(name for name, default in SETTINGS.items() if not isinstance(default, bool))
# Name, the value as TOML writes it, and the clause on what is wrong with it.
WRONG = [
    ("silence_floor_s", "-5", "it must be 0 or more"),
    ("silence_floor_s", "-1e-9", "it must be 0 or more"),
    ("silence_floor_s", "nan", "it must be 0 or more"),
    ("silence_floor_s", "inf", "it is too large: 1000000000 is the most"),
    ("node_lost_s", "1e300", "it is too large: 1000000000 is the most"),
    ("join_timeout_s", "9" * 400, "it is too large: 1000000000 is the most"),
    ("max_restarts", "-2", "it must be -1 or more"),
    ("max_restarts", "9007199254740994", "it is too large: 9007199254740992 is the most"),
    ("restarts_per_hour", "1.5", "a whole number is needed"),
    ("restarts_per_hour", '"many"', "a number is needed, as in restarts_per_hour=20"),
    ("dry_run", '"perhaps"', "give true or false"),
]


def decode(fields: dict[str, object]) -> JobPolicy:
    """Return a policy as a message brings it."""
    return msgspec.json.decode(msgspec.json.encode(fields), type=JobPolicy)


@pytest.mark.parametrize(("name", "toml", "clause"), WRONG)
def test_every_way_in_refuses_it_with_the_same_words(tmp_path: Path, name: str, toml: str, clause: str) -> None:
    """Command line, request of HTTP, environment, file: the clause is the same, each sentence says where it stood."""
    text, file = toml.strip('"'), tmp_path / "ops.toml"
    file.write_text(f"[run.policy]\n{name} = {toml}\n")
    variable = f"MEGASCALE_RUN_POLICY_{name.upper()}"

    with pytest.raises(UsageError) as by_option:
        read_settings([f"{name}={text}"])
    with pytest.raises(UsageError) as by_request:
        check_settings({name: text})
    with pytest.raises(UsageError) as by_variable:
        load("run", environ={variable: text})
    with pytest.raises(UsageError) as by_file:
        load("run", config_path=file, environ={})

    assert str(by_option.value) == str(by_request.value) == f"{name}={text} can't be: {clause}"
    assert str(by_variable.value).endswith(f"(environment {variable}) can't be used: {clause}")
    assert str(by_file.value).endswith(f"(file {file}) can't be used: {clause}")


@given(
    name=st.sampled_from(NUMBERS),
    number=st.floats(allow_nan=False, allow_infinity=False) | st.integers(-3, 3) | st.integers(-(2**55), 2**55),
)
def test_what_a_person_may_set_is_what_a_join_may_carry(name: str, number: float) -> None:
    """What the reader takes, a message carries as it is; what the reader refuses, no message brings."""
    try:
        read = value_of(name, repr(number))
    except ValueError:
        with pytest.raises(msgspec.ValidationError):
            decode({name: number})
        return

    assert read == number
    assert msgspec.structs.asdict(decode({name: read}))[name] == read
    assert type(read) is type(SETTINGS[name])


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"frozen": "wran"}, "unknown action 'wran': did you mean 'warn'? frozen takes ignore, warn, restart"),
        ({"frozen": "zzz"}, "unknown action 'zzz'; frozen takes ignore, warn, restart, evict, stop"),
        ({"frozen": 3}, "unknown action 3; frozen takes"),
        ({"frozen": ["warn"]}, "unknown action ['warn']; frozen takes"),
        ({"frozn": "warn"}, "unknown class of fault 'frozn': did you mean 'frozen'"),
        ("frozen", "unknown action ''; frozen takes"),
        ("frozen=warn,", "unknown class of fault ''"),
        (["frozen"], "a class of fault and an action are needed, as in frozen=warn"),
        ({"x" * 100_000: "warn"}, "unknown class of fault 'xxx"),
    ],
)
def test_a_table_of_actions_that_can_not_be(raw: object, sentence: str) -> None:
    """Of a file, of the environment: the class and the word are held against what there is; sentences stay short."""
    with pytest.raises(ValueError, match=r"unknown|needed") as caught:
        value_of("actions", raw)

    assert str(caught.value).startswith(sentence)
    assert len(str(caught.value)) < 200


def test_the_environment_says_all_that_the_command_line_does() -> None:
    """Also ``yes``, and what to do about several classes."""
    actions = "frozen=warn, actions.silent=stop"
    environ = {"MEGASCALE_RUN_POLICY_DRY_RUN": "yes", "MEGASCALE_RUN_POLICY_ACTIONS": actions}

    config, _ = load("run", environ=environ)

    assert config.policy == JobPolicy(dry_run=True, actions={"frozen": "warn", "silent": "stop"})


def test_actions_of_several_sources_are_laid_over_each_other(tmp_path: Path) -> None:
    """An option for one class leaves what the file says of another; ``config show`` names every source."""
    file = tmp_path / "ops.toml"
    file.write_text('[run.policy.actions]\nfrozen = "warn"\nsilent = "warn"\nslow = "ignore"\n')
    environ = {"MEGASCALE_RUN_POLICY_ACTIONS": "silent=stop,killed=stop"}

    config, origins = load("run", {"policy": {"actions": {"killed": "restart"}}}, file, environ)
    shown = {f"{row.section}.{row.name}": row for row in effective(file, environ)}["run.policy.actions"]

    assert config.policy.actions == {"frozen": "warn", "silent": "stop", "slow": "ignore", "killed": "restart"}
    assert shown.value == {"frozen": "warn", "silent": "stop", "slow": "ignore", "killed": "stop"}
    assert shown.origin == f"file {file}, environment MEGASCALE_RUN_POLICY_ACTIONS"
    assert origins["policy.actions"] == f"{shown.origin}, command line"


@given(
    st.builds(
        JobPolicy,
        silence_floor_s=st.floats(0.0, 1e9),
        straggler_share=st.floats(0.0, 1e9),
        max_restarts=st.integers(-1, 2**53),
        dry_run=st.booleans(),
        actions=st.dictionaries(st.sampled_from(sorted(FAULTS)), st.sampled_from(sorted(ACTION_WORDS)), max_size=4),
    )
)
def test_what_is_shown_is_read_back_as_it_was(policy: JobPolicy) -> None:
    """Exactly, to the last digit: two policies that differ are never shown alike."""
    shown = show_settings(policy)

    read = {name: value_of(name, text) for name, text in check_settings(shown).items()}

    assert read == {name: getattr(policy, name) for name in SETTINGS} | {
        f"actions.{fault}": action for fault, action in policy.actions.items()
    }


@pytest.mark.parametrize("policy", [JobPolicy(), JobPolicy(max_restarts=-1, actions={"frozen": "warn"})])
def test_a_policy_that_can_be_is_taken_as_a_whole(policy: JobPolicy) -> None:
    """The control of the next test: what a runner sends passes."""
    check_policy(policy)


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (JobPolicy(actions={"frozen": "wran"}), "unknown action 'wran'"),
        (JobPolicy(actions={"frozen": ""}), "unknown action ''"),
        (JobPolicy(actions={"nobody": "warn"}), "unknown class of fault 'nobody'"),
        (JobPolicy(silence_floor_s=math.nan), "silence_floor_s=nan can't be"),
        (JobPolicy(node_lost_s=-1.0), "node_lost_s=-1 can't be"),
    ],
)
def test_a_policy_that_can_not_be_is_refused_as_a_whole(policy: JobPolicy, sentence: str) -> None:
    """However it was made, without the product's reader."""
    with pytest.raises(UsageError, match=sentence):
        check_policy(policy)


def test_every_number_has_its_range_in_its_type() -> None:
    """A setting without one would be accepted from a user and break a computation."""
    for name in NUMBERS:
        with pytest.raises(ValueError, match="it is too large"):
            value_of(name, 1e300)
        with pytest.raises(ValueError, match="or more"):
            value_of(name, -1e300)
        assert value_of(name, str(SETTINGS[name])) == SETTINGS[name]


def test_a_join_carries_the_policy_s_own_type() -> None:
    """So the ranges of a message and those of an option can't part."""
    assert {field.name: field.type for field in msgspec.structs.fields(Join)}["policy"] is JobPolicy
