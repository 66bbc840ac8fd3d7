# SPDX-License-Identifier: Apache-2.0
"""A spare process: import torch now, become a rank later.

It also imports what most training scripts load later, in the middle of their start: DDP's constructor imports
``torch._dynamo`` (0.8 s), a first checkpoint ``torch.distributed.checkpoint`` (0.5 s).

Run as a script, never imported by ours. It imports torch, writes one byte when it is ready, then waits on its
standard input for one line of JSON: ``{"argv", "env", "cwd", "stdout", "stderr", "bootstrap"}``. It takes on that
environment and runs the script as ``__main__``. End of input before that line means that the runner is gone.

Arguments: the descriptor to write that byte to, and the one that becomes the rank's standard input, which is the
runner's own (none: it is empty).

Nothing of CUDA is touched before the line arrives, unless MEGASCALE_GPU_OF_SPARE names a GPU: the import alone neither
creates a context nor reads CUDA_VISIBLE_DEVICES. With it the spare makes a context there, and one product for cuBLAS;
which GPU is the current one it leaves alone. With MEGASCALE_NCCL_OF_SPARE it also makes a communicator of one rank by
NCCL's own C API, so that NCCL has loaded its kernels (0.45 s): not by a process group, which would stand in torch's
flight recorder. NCCL has read its variables then; where the script changes one later, that is said. OMP_NUM_THREADS is
read at import, so the runner starts spares with the ranks' value.
"""

import ctypes
import gc
import importlib
import importlib.util
import io
import json
import os
import runpy
import sys

# How an archive begins, and a file of this Python's bytecode.
_NO_SOURCE = (b"PK\x03\x04", importlib.util.MAGIC_NUMBER)
_IMPORTS = ("torch", "torch._dynamo", "torch.distributed.checkpoint")


def _take_on(order: dict[str, object]) -> list[str]:
    env = order["env"]
    assert isinstance(env, dict)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(str(order["cwd"]))
    for path, number in ((order["stdout"], 1), (order["stderr"], 2)):
        if path:
            descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, number)
            os.close(descriptor)
    stdin = int(sys.argv[2]) if len(sys.argv) > 2 else os.open(os.devnull, os.O_RDONLY)
    os.dup2(stdin, 0)
    os.close(stdin)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  what the old one has read ahead is the runner's
    argv = order["argv"]
    assert isinstance(argv, list)
    return argv


def _run(argv: list[str]) -> None:
    """Run ``-m module args`` or ``script args`` the way ``python -u`` would.

    What the script has made lives to the end of Python, in ``__main__``, also where it ends by ``sys.exit``. Freed
    before that, a model in torch's DDP waits for ever for Gloo's thread, which waits for Python's lock.
    """
    arguments = [a for a in argv if a != "-u"] if argv[:1] == ["-u"] else argv
    main = sys.modules["__main__"] = type(sys)("__main__")
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()  # noqa: PTH109  as below
        _run_module(arguments[1])
        return
    sys.argv = arguments
    whole = os.path.abspath(arguments[0])  # noqa: PTH100  pathlib costs its import
    is_folder = os.path.isdir(whole)  # noqa: PTH112  as above
    sys.path[0] = whole if is_folder else os.path.dirname(whole)  # noqa: PTH120  as above
    source = b""
    if not is_folder:
        with io.open_code(whole) as file:
            source = file.read()
    if is_folder or source[:4] in _NO_SOURCE:
        vars(main).update(runpy.run_path(arguments[0], run_name="__main__"))
        return
    vars(main).update(__file__=arguments[0], __cached__=None, __builtins__=__builtins__)
    exec(compile(source, arguments[0], "exec", dont_inherit=True), vars(main))  # noqa: S102  as Python does


def _run_module(name: str) -> None:
    """Run a module as ``__main__``, by what Python itself calls for ``-m``."""
    run = vars(runpy)["_run_module_as_main"]
    run(name)


def _make_context() -> bool:
    """Initialise CUDA and make the context of one GPU; where that fails the rank will do it, or say why it can't.

    Returns:
        Whether NCCL was used, too.
    """
    number, is_nccl_wanted = (os.environ.pop(f"MEGASCALE_{name}_OF_SPARE", "") for name in ("GPU", "NCCL"))
    torch = sys.modules.get("torch")
    if not number or torch is None:
        return False
    try:
        if not torch.cuda.is_available():
            return False
        place = int(number) % torch.cuda.device_count()
        with torch.cuda.device(place):
            a = torch.ones(64, 64, device="cuda")
            torch.mm(a, a)
            torch.cuda.synchronize()
            del a
            torch.cuda.empty_cache()
            return bool(is_nccl_wanted) and _use_nccl(place)
    except RuntimeError as error:  # the GPU is another process's alone, or has no room
        sys.stderr.write(f"megascale-ops: a warm worker could not make a context on GPU {number}: {error}\n")
    return False


def _use_nccl(place: int) -> bool:
    """Make a communicator of one rank on a GPU and end it; return whether there is an NCCL that torch has loaded."""
    try:
        nccl = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # torch has none, or has it inside: which one a rank would use is not known
        return False
    communicator = ctypes.c_void_p()
    result = nccl.ncclCommInitAll(ctypes.byref(communicator), 1, (ctypes.c_int * 1)(place))
    if result == 0:
        result = nccl.ncclCommDestroy(communicator)
    if result:
        sys.stderr.write(f"megascale-ops: a warm worker could not use NCCL on GPU {place}: error {result}\n")
    return True


def _tell_of_late_variables() -> None:
    """Say it, once each, where the script changes a variable that NCCL has read before the script began."""
    known = {name: value for name, value in os.environb.items() if name.startswith(b"NCCL_")}

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event not in {"os.putenv", "os.unsetenv"}:
            return
        name, value = arguments[0], arguments[1] if len(arguments) > 1 else None
        if isinstance(name, bytes) and name.startswith(b"NCCL_") and known.get(name) != value:
            known[name] = value  # type: ignore[assignment]  # bytes, or None where it was taken away
            text = "is set by the script after NCCL was used in its spare, so it does not count: set it for the run"
            sys.stderr.write(f"megascale-ops: {os.fsdecode(name)} {text}, or leave out --warm-gpu\n")

    sys.addaudithook(hear)


def main() -> None:
    """Import, report, wait, become."""
    # As the recorder does where a script imports torch (``megascale_ops.garbage_kept``): nothing here is garbage, and
    # no look of the collector's in the script's steps, nor at its end, goes over it. Nothing is the script's yet.
    gc.disable()
    for name in _IMPORTS:
        try:
            importlib.import_module(name)
        except ImportError as error:  # the script may not need it, and fails by itself when it does
            sys.stderr.write(f"megascale-ops: a warm worker could not import {name}: {error}\n")
    has_used_nccl = _make_context()
    gc.freeze()
    gc.enable()

    os.write(int(sys.argv[1]), b"r")
    line = sys.stdin.buffer.readline()
    if not line:
        return
    order = json.loads(line)
    argv = _take_on(order)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, write_through=True)  # as python -u
    if has_used_nccl:
        _tell_of_late_variables()
    if order["bootstrap"]:
        runpy.run_path(str(order["bootstrap"]), run_name="megascale_bootstrap")
    _run(argv)


if __name__ == "__main__":
    main()
