# SPDX-License-Identifier: Apache-2.0
"""What is installed here, which of it our package needs, and under which licence each part stands.

Read from the distributions' own metadata, so that it works without a network. Used by ``licences`` and ``sbom``.
"""

import re
from collections.abc import Iterator
from importlib import metadata
from importlib.metadata import Distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS = "megascale-ops"
# What a user can install of us; "dev" and "frameworks" are for those who work on us.
EXTRAS = ("controller", "train", "kernels", "report", "store", "stacks", "dashboards", "top")

# What older metadata says in words of its own, in lower case, and its SPDX expression.
_WORDS = {
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "bsd 2-clause license": "BSD-2-Clause",
    "bsd-2-clause": "BSD-2-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit": "MIT",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "mpl-2.0": "MPL-2.0",
    "mpl-2.0 and mit": "MPL-2.0 AND MIT",
    "psf-2.0": "PSF-2.0",
    "python software foundation license": "PSF-2.0",
    "other/proprietary license": "LicenseRef-Proprietary",
    "nvidia proprietary software": "LicenseRef-Proprietary",
}
# What says nothing in its metadata, by what stands in its licence file.
_KNOWN = {"verlib2": "Apache-2.0 OR BSD-2-Clause"}


def distributions() -> dict[str, Distribution]:
    """Everything installed, by canonical name."""
    return {canonicalize_name(one.metadata["Name"]): one for one in metadata.distributions()}


def needed(installed: dict[str, Distribution], extras: tuple[str, ...] = EXTRAS) -> dict[str, list[str]]:
    """What our package needs with these extras, each with what it needs itself; what is not installed is left out."""
    found: dict[str, list[str]] = {}
    open_ = [(canonicalize_name(OURS), extras)]
    while open_:
        name, wanted = open_.pop()
        if name in found or name not in installed:
            continue
        needs = dict(_requirements(installed[name], wanted))
        found[name] = sorted(set(needs) & set(installed) - {name})
        open_.extend(needs.items())
    return found


def _requirements(one: Distribution, extras: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for line in one.requires or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name), tuple(requirement.extras)


def licence_of(one: Distribution) -> str:
    """The SPDX expression of a distribution's licence, or "" where its metadata says nothing that is known here."""
    said = one.metadata
    if expression := said.get("License-Expression"):
        return str(expression)
    classifiers = [
        line.rpartition(" :: ")[2] for line in said.get_all("Classifier", []) if line.startswith("License ::")
    ]
    # The field may hold the whole text of a licence; a line of some words is a name.
    for words in (*classifiers, said.get("License") or ""):
        if expression := _WORDS.get(words.strip().lower()):
            return expression
    return _KNOWN.get(canonicalize_name(said["Name"]), "")


def is_allowed(expression: str, allowed: frozenset[str]) -> bool:
    """Whether we may use what stands under an SPDX expression: of OR one side suffices, of AND both are needed.

    Raises:
        ValueError: it is no expression.
    """
    words = re.findall(r"\(|\)|[A-Za-z0-9.+-]+(?: WITH [A-Za-z0-9.+-]+)?", expression)
    if "".join(words).replace(" ", "") != expression.replace(" ", ""):
        raise ValueError(f"{expression!r} is no licence expression")
    words.append("")  # the end
    is_fine = _either(words, allowed)
    if words != [""]:
        raise ValueError(f"{expression!r} is no licence expression")
    return is_fine


def _either(words: list[str], allowed: frozenset[str]) -> bool:
    is_fine = _both(words, allowed)
    while words[0] == "OR":
        del words[0]
        is_fine = _both(words, allowed) or is_fine
    return is_fine


def _both(words: list[str], allowed: frozenset[str]) -> bool:
    is_fine = _one(words, allowed)
    while words[0] == "AND":
        del words[0]
        is_fine = _one(words, allowed) and is_fine
    return is_fine


def _one(words: list[str], allowed: frozenset[str]) -> bool:
    word = words.pop(0)
    if word != "(":
        if word in {"", ")", "OR", "AND"}:
            raise ValueError("a licence expression ends too early")
        return word in allowed
    is_fine = _either(words, allowed)
    if words.pop(0) != ")":
        raise ValueError("a licence expression lacks a bracket")
    return is_fine
