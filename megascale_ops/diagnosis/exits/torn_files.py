# SPDX-License-Identifier: Apache-2.0
"""Exceptions over a file that is not whole: a checkpoint or shard cut short, or overwritten while it was read.

Readers of archives say so in words of their own. Python's file objects do not: to seek before the beginning of a file
that is too short, or to map what is not there, is "[Errno 22] Invalid argument", and to unpickle one that ends too
early an EOFError. Those count where the traceback leads through a reader of checkpoints or archives.

Pure: an exception and the output that holds its traceback in, a clause for people out.
"""

import re

from megascale_ops.schema.progress import RankError

HINT = "a file that it read is torn: cut short, or written while it was read"
_SAYS_SO = re.compile(
    r"PytorchStreamReader failed|failed finding central directory|unexpected end of (?:data|file)|[Uu]nexpected EOF"
    r"|pickle data was truncated|[Rr]an out of input|MetadataIncompleteBuffer|InvalidHeaderDeserialization"
    r"|HeaderTooLarge|HeaderTooSmall|InvalidHeaderLength|File is not a zip file|[Bb]ad magic number for"
    r"|storage has wrong (?:byte )?size|Compressed file ended before|CRC check failed|file read failed"
    r"|not within the file bounds"
)
_MAY_MEAN_IT = re.compile(r"\[Errno 22\]|^EOFError\b|^struct\.error\b|mmap length is greater than file size|BadZipFile")
_FILES = (
    r"torch/(?:serialization|storage|distributed/checkpoint/\w{1,60})",
    r"safetensors/\w{1,60}", r"zipfile(?:/__init__)?", "tarfile", "pickle", r"numpy/(?:lib|core|_core)/\w{1,60}",
    r"h5py/\S{1,60}", r"zarr/\S{1,60}", r"tensorstore\S{0,60}",
    r"(?:\w{0,60}_)?(?:checkpoint(?:ing|er|s)?|ckpt|serialization)(?:_\w{0,60})?",
)  # fmt: skip
_A_READER = re.compile(
    rf'File "[^"\n]{{0,300}}?(?:{"|".join(_FILES)})\.py", line '
    r"|\bin (?:\w{0,40}_)?(?:load_state_dict|load_checkpoint|load_state|load_ckpt|resume|read_shard)\b|\btorch\.load\("
)


def torn_file(error: RankError, output: str) -> str:
    """Return what an exception over a torn file means, "" for any other one."""
    text = f"{error.type}: {error.message}"
    if _SAYS_SO.search(text) or (_MAY_MEAN_IT.search(text) and _A_READER.search(output)):
        return HINT
    return ""
