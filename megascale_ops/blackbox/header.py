# SPDX-License-Identifier: Apache-2.0
"""The header of a black box: job, rank and process of a file; and the refusal of a file that is no box."""

import os
import stat
from pathlib import Path

from megascale_ops.blackbox import BoxError, TornBoxError
from megascale_ops.blackbox.layout import FILE_BYTES, HEADER, HEADER_BYTES, MAGIC
from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.blackbox.values import finite, text
from megascale_ops.errors import VersionError
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.version import BOX_VERSION, check_version


def read_identity(path: Path, handle: int, *, torn: bool = False) -> BoxIdentity:
    """Return the identity in the header, or refuse the file.

    Args:
        path: What to call it.
        handle: The open file.
        torn: Take one that ends too early, too.

    Raises:
        BoxError: it is no black box, or none that this version understands.
        TornBoxError: it ends too early.
    """
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise BoxError(f"{path} is no black box: not a regular file")
    if found.st_size < HEADER_BYTES:
        raise BoxError(f"{path} is no black box: {found.st_size} bytes, shorter than a header ({HEADER_BYTES})")
    try:
        header = os.pread(handle, HEADER_BYTES, 0)
    except OSError as error:
        raise BoxError(f"{path} cannot be read [{error}]") from error
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise BoxError(f"{path} is no black box: it does not begin with {MAGIC.decode()}")
    (_, version, _, _, round_, pid, start_ticks, mono_s, wall_s, rank, local_rank, world_size,
     tp, pp, dp, ep, _, job, node, stderr_path) = HEADER.codec.unpack_from(header)  # fmt: skip
    try:
        check_version(f"the black box {path}", version, BOX_VERSION)
    except VersionError as error:
        raise BoxError(str(error)) from error
    if version == BOX_VERSION and found.st_size < FILE_BYTES and not torn:
        raise TornBoxError(f"{path} is a torn black box: {found.st_size} of {FILE_BYTES} bytes")
    return BoxIdentity(
        job=text(job), node=text(node), rank=rank, local_rank=local_rank, world_size=world_size, pid=pid,
        start_ticks=start_ticks, round=round_, mesh=Mesh(tp=tp, pp=pp, dp=dp, ep=ep), stderr_path=text(stderr_path),
        started_mono_s=finite(mono_s), started_wall_s=finite(wall_s),
    )  # fmt: skip
