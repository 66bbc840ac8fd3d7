# SPDX-License-Identifier: Apache-2.0
"""Did the exception in a rank's black box end it, or did the rank live on after it?

An exception in the main thread ends the process, whatever the last status is: code that runs at exit may take long, and
may be killed. One in another thread ends that thread only. The process may have made steps since, may have ended well
or been killed by a signal, and then the exception is older than what ended it: worth a line, and no more.

What it means is told where its text alone does not say it: of a file that is not whole, a checkpoint cut short,
readers of archives say so in words of their own, and Python's file objects do not. To seek before the beginning of a
file that is too short, or to map what is not there, is "[Errno 22] Invalid argument", and to unpickle one that ends too
early an EOFError. Those count where the traceback leads through a reader of checkpoints or archives.

Pure: how a rank ended and what it wrote down in, yes or no and a sentence out.
"""

import re

from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import RankError, RankReport

# 10 s: a main thread that joins or polls the thread that died gives up within that, by an exit code of its own.
FOLLOWS_S = 10.0
TORN = "a file that it read is torn: cut short, or written while it was read"
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


def error_of(exit_: RankExit, report: RankReport | None) -> RankError | None:
    """Return the newest exception that the rank wrote down; its runner saw the box last, its agent before."""
    error = exit_.error or (report.error if report is not None else None)
    return error if error is not None and error.type else None


def ended_it(exit_: RankExit, error: RankError) -> bool:
    """Return whether the exception is what ended the rank, by step, time and status."""
    if exit_.step > error.step and _is_counted(exit_, error):
        return False  # it made steps since
    if exit_.code == 0:
        return False
    if not error.thread:
        return True
    if exit_.by_us or exit_.code < 0:
        return False  # Python answers no exception with a signal
    return age_s(exit_, error) <= FOLLOWS_S


def _is_counted(exit_: RankExit, error: RankError) -> bool:
    """Return whether steps are evidence: after an exception before the first step any step was made since."""
    return exit_.steps_seen > 0 or error.step >= 0


def age_s(exit_: RankExit, error: RankError) -> float:
    """Return how long before its end the exception was raised; 0 where that is not known."""
    return max(0.0, exit_.seen_mono_s - error.raised_mono_s) if error.raised_mono_s and exit_.seen_mono_s else 0.0


def sentence(rank: int, error: RankError, ago_s: float = 0.0) -> str:
    """Return the sentence about an exception that did not end the rank."""
    whose = f"a thread of rank {rank} ({error.thread})" if error.thread else f"rank {rank}"
    ago = f", {ago_s:.1f} s before" if ago_s else ""
    after = f" after step {error.step}" if error.step >= 0 else " before its first step"
    return f"{whose} had met {words(error)}{after}{ago}; the rank itself went on"


def words(error: RankError) -> str:
    """Return an exception as people read it."""
    where = f" at {error.where}" if error.where else ""
    return f"{error.type}: {error.message[:300]}{where}" if error.message else f"{error.type}{where}"


def torn_file(error: RankError, output: str) -> str:
    """Return what an exception over a torn file means, "" for any other one."""
    text = f"{error.type}: {error.message}"
    if _SAYS_SO.search(text) or (_MAY_MEAN_IT.search(text) and _A_READER.search(output)):
        return TORN
    return ""
