# SPDX-License-Identifier: Apache-2.0
"""Where a main thread is, by a stack that any tool wrote: the table of ``frame_classes``, and what stands beside it.

A stack of the agent's comes with a look at the process; one that a user hands in comes alone, and often without
native frames or with nothing else. So more places are told apart: a compiler, a wait for the GPU, for a lock, for a
child, for a server, and a backward pass, in which C++ waits for collectives that no Python frame shows.

Specific rows are asked frame by frame from the innermost on; generic ones (a lock, a socket, a child: a data loader
waits by all of these) only where no specific row knows any frame.

Pure: frames in, a place out.
"""

import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

from megascale_agents.evidence.frame_classes import FORMING, TABLE, Frame, Place
from megascale_agents.evidence.frame_classes import write as frames_of


class Where(NamedTuple):
    """Where a main thread is: the place, what is called there, the script's own line, and the frames as text."""

    place: str
    call: str
    line: str
    frames: tuple[str, ...]


# Ranks wait for each other in a store as they form a group; bound methods have their class before them.
_CLASS = re.compile(r"^(?:[\w<>]+\.)+")
_NATIVE_FORMING = Place(
    "in_rendezvous", "", r"^(c10d::(TCP|File|Hash|Prefix)?Store\b|p?ncclCommInit|.*connectFullMesh)"
)
_SPECIFIC = (
    *(row for row in TABLE if row.mark != "in_native"),
    Place("in_collective", "", r"^(c10d::(?!\w*Store)|gloo::|p?(nccl|rccl)[A-Z]|P?MPI_[A-Z]|opal_|ompi_|ucp_worker_)"),
    Place("in_collective", r"mpi4py/", ""),
    Place("in_storage", r"(^|/)(botocore|boto3|gcsfs|adlfs)/|google/cloud/storage/"),
    # A compiled model runs through files of the same folders: these are the ones that compile.
    Place(
        "in_compiler",
        r"torch/_inductor/(codecache|compile_fx\w*|graph|scheduler|async_compile|select_algorithm|compile_worker|codegen)\b"
        r"|torch/_dynamo/(convert_frame|output_graph|symbolic_convert|bytecode_transformation|backends)\b"
        r"|torch/_functorch/(aot_autograd|partitioners)\.py|triton/(compiler|backends)/|triton/runtime/(build|autotuner)"
        r"|torch/utils/(cpp_extension|_triton)|jax/_src/(compiler|interpreters)",
    ),
    Place("in_compiler", "", r"^(llvm|mlir)::|^nvrtcCompile"),
    Place("in_gpu_wait", r"torch/(cuda|xpu|npu)/(__init__|streams|graphs)\.py$", r"^(synchronize|wait_\w+)$"),
    Place(
        "in_gpu_wait",
        "",
        r"^(cu|cuda|hip)(Ctx|Device|Stream|Event)Synchronize|^(cu|cuda|hip)Memcpy|_local_scalar_dense"
        r"|CUDAStream::synchronize|^hsa_signal_wait|^at::native::item",
    ),
    Place("in_backward", r"torch/autograd/(graph|__init__)\.py$", r"^(_engine_run_backward|backward|grad)$"),
    Place("in_backward", "", r"^torch::autograd::"),
)
_GENERIC = (
    Place("in_network", r"(^|/)(ssl|http/client|socket)\.py$"),
    Place("in_network", r"(^|/)(urllib3?|requests|aiohttp|httpx|grpc|wandb)/"),
    Place("in_child", r"(^|/)(subprocess|multiprocessing/(popen_\w+|process))\.py$"),
    Place("in_lock", r"(^|/)threading\.py$", r"^(wait|acquire|join|_wait_for_tstate_lock|__enter__)$"),
    Place("in_lock", r"(^|/)(queue|multiprocessing/(queues|synchronize|connection|pool|managers))\.py$"),
    Place("in_lock", r"(^|/)(filelock|portalocker|concurrent/futures|asyncio)/"),
    Place("in_lock", "", r"^(PyThread_acquire_lock_timed|\w*acquire_timed|take_gil)"),
    Place("in_lock", "", r"^(_*lll_lock_wait\w*|pthread_mutex_lock)"),
    Place("in_child", "", r"^(__GI_+|__libc_)?(wait4|waitpid|waitid)$"),
    Place("in_network", "", r"^(__GI_+|__libc_)?(recv|recvfrom|recvmsg|connect|accept4?)$|^SSL_read|^sock_recv"),
    Place("in_sleep", "", r"^(__GI_+|__libc_)?(clock_)?nanosleep$|^(py|time_)sleep$"),
    Place("in_storage", "", r"^(__GI_+|__libc_)?(open(at)?(64)?|p(read|write)v?(64)?|f(data)?sync)$"),
    Place("in_storage", "", r"^(__GI_+|__libc_)?(f?l?statx?|getdents(64)?)$"),
)  # fmt: skip
_LIBRARIES = re.compile(
    r"(^|/)(site-packages|dist-packages|lib/python3\.\d+)/|^<frozen|^(torch|torchdata|numpy|triton)/"
)
# 24 frames: from C++'s wait through pybind to the call in Python.
_NEAR = 24
_NO_CALLS = frozenset({"wrapper", "inner", "_fn", "__call__", "decorate_context"})


def where(frames: Sequence[Frame]) -> Where:
    """Return where a stack is; "in_script" when no row knows a frame, "" without frames."""
    if not frames:
        return Where("", "", "", ())
    plain = [frame._replace(function=_CLASS.sub("", frame.function)) if not frame.native else frame for frame in frames]
    if _imports(frames[0]):
        return Where("in_import", "", _line(frames), frames_of(plain))
    for rows in ((*FORMING, _NATIVE_FORMING), _SPECIFIC, _GENERIC):
        for at, frame in enumerate(plain):
            row = next((row for row in rows if _fits(row, frame)), None)
            if row is not None:
                return Where(row.mark, _call(plain[at:], row), _line(frames[at:]), frames_of(plain))
    own = _line(frames)
    place = "in_native" if all(frame.native for frame in frames) else "in_script"
    return Where(place, "", own, frames_of(plain))


def _imports(frame: Frame) -> bool:
    """Return whether an innermost frame is of an import: what is loaded there is not called yet."""
    is_body = frame.function == "<module>" and _LIBRARIES.search(frame.file) is not None
    return is_body or frame.file.startswith("<frozen importlib")


def _fits(row: Place, frame: Frame) -> bool:
    if frame.function == "<module>":
        return False
    return re.search(row.file, frame.file) is not None and re.search(row.function, frame.function) is not None


def _call(frames: Sequence[Frame], row: Place) -> str:
    """Return what was called: the outermost of the frames that the row knows in one piece."""
    if row.mark == "in_collective" and frames[0].native:
        # C++ waits for all of them alike; what Python called tells more.
        called = [at for at, frame in enumerate(frames) if not frame.native and _in_collective(frame)]
        if called and called[0] < _NEAR:
            frames = frames[called[0] :]
    name = frames[0].function
    for frame in frames:
        if not (_fits(row, frame) or (row.mark == "in_collective" and _in_collective(frame))):
            break
        if frame.function not in _NO_CALLS and not frame.function.startswith("<"):
            name = frame.function
    return name.rpartition("::")[2][:80]


def _in_collective(frame: Frame) -> bool:
    return any(row.mark == "in_collective" and row.file and _fits(row, frame) for row in TABLE)


def _line(frames: Sequence[Frame]) -> str:
    """Return the innermost line of the script's own, as "function (file:line)"; "" where native frames are all."""
    for frame in frames:
        is_standard = frame.file.partition("/")[0].removesuffix(".py") in sys.stdlib_module_names
        if not (frame.native or is_standard or _LIBRARIES.search(frame.file)):
            return f"{_CLASS.sub('', frame.function)} ({frame.file.rpartition('/')[2]}:{frame.line})"
    return ""
