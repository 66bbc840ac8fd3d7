# SPDX-License-Identifier: Apache-2.0
"""Names that become folders, labels and parts of URLs; versions that travel."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.errors import MegascaleError, UsageError, VersionError
from megascale_ops.schema.identity import check_name
from megascale_ops.schema.version import check_version


@pytest.mark.parametrize("name", ["gpt", "a", "0", "Llama-3.1_8b", "x" * 100])
def test_ordinary_names_pass_unchanged(name: str) -> None:
    """Letters, digits, dots, underscores and hyphens make a name."""
    assert check_name("job", name) == name


@pytest.mark.parametrize(
    "name", ["", "a/b", "..", ".hidden", "-x", "a b", "a\n", "x" * 101, "größe", "a\x00b", "../../etc/passwd"]
)
def test_names_that_could_leave_their_folder_are_refused(name: str) -> None:
    """Slashes, leading dots, blanks, control characters and endless names are refused in one sentence."""
    with pytest.raises(UsageError, match=r"job name .* can't be used") as refused:
        check_name("job", name)

    assert "\n" not in str(refused.value)


@given(st.text(max_size=120))
def test_an_accepted_name_is_one_path_component(name: str) -> None:
    """Whatever is accepted stays inside the folder it is joined to."""
    try:
        accepted = check_name("node", name)
    except UsageError:
        return

    assert "/" not in accepted
    assert accepted not in {".", ".."}
    assert accepted.isascii()
    assert accepted.isprintable()


@pytest.mark.parametrize("theirs", [4, 5, 6])
def test_a_neighbour_one_version_apart_is_understood(theirs: int) -> None:
    """During an upgrade old and new programs talk to each other."""
    check_version("heartbeat", theirs, 5)


@pytest.mark.parametrize("theirs", [-1, 3, 7, 10**9])
def test_a_version_further_away_is_refused_with_both_named(theirs: int) -> None:
    """The sentence names both versions, so a person knows which side to update."""
    with pytest.raises(VersionError, match=rf"heartbeat has version {theirs}; this program speaks version 5"):
        check_version("heartbeat", theirs, 5)


def test_a_users_mistake_is_a_value_error_with_exit_code_two() -> None:
    """A caller can catch what is ours, or what is wrong input, and the shell sees the difference."""
    assert issubclass(UsageError, ValueError)
    assert issubclass(UsageError, MegascaleError)
    assert (MegascaleError.exit_code, UsageError.exit_code) == (1, 2)
