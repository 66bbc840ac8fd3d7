# SPDX-License-Identifier: Apache-2.0
"""The wheel that this installation came from, put together again from its files: an image needs no checkout then.

An installer keeps what it has unpacked in a list (RECORD of PEP 376). Packed again, with a list of the same files, that
is a wheel (PEP 427). The same installation gives the same bytes.
"""

import base64
import hashlib
import io
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, PackagePath, distribution
from typing import NamedTuple

NAME = "megascale-ops"
# What an installer adds, and what it makes anew.
_INSTALLERS = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
_DATE = (2020, 2, 2, 0, 0, 0)  # as hatchling's


class Wheel(NamedTuple):
    """A wheel as a file: its name says version and kind."""

    name: str
    data: bytes


def own_wheel() -> Wheel | None:
    """Return the wheel of this installation; None where there is none to put together: a checkout, a vendored copy."""
    try:
        found = distribution(NAME)
    except PackageNotFoundError:
        return None
    return packed(found)


def packed(found: Distribution) -> Wheel | None:
    """Return a distribution as a wheel; None where it is editable, so that its code lies elsewhere."""
    kept = sorted((file for file in found.files or () if _is_its_own(file)), key=str)
    folder = next((file.parts[0] for file in kept if file.parts[0].endswith(".dist-info")), None)
    if folder is None or "megascale_ops/__init__.py" not in map(str, kept):
        return None
    lines = []
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in kept:
            data = file.read_binary()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{file},sha256={digest},{len(data)}")
            archive.writestr(_entry(str(file)), data)
        archive.writestr(_entry(f"{folder}/RECORD"), "\n".join([*lines, f"{folder}/RECORD,,", ""]))
    name = NAME.replace("-", "_")
    return Wheel(f"{name}-{found.version}-py3-none-any.whl", memory.getvalue())


def _is_its_own(file: PackagePath) -> bool:
    """Whether a wheel has it: no script in ``bin``, no byte code, nothing of the installer's."""
    if ".." in file.parts or file.is_absolute() or "__pycache__" in file.parts:
        return False
    return not (file.parts[0].endswith(".dist-info") and file.name in _INSTALLERS)


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _DATE)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    return entry
