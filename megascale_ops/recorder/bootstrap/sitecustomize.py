# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: INP001  a folder for PYTHONPATH, not a package
"""Run by Python itself at the start of every process below a runner: the folder of this file is on PYTHONPATH.

In the process that is a rank it switches the recorder on; in every other process (launchers, data loader workers,
whatever the script starts) it does nothing but cost a millisecond. Python imports only the first ``sitecustomize`` it
finds, so this one then looks for the next on the path and runs that as Python would have.

A warm worker, which imported torch before it knew its rank, runs this file a second time when it becomes one.
"""

import os
import sys


def _activate() -> None:
    """Start the recorder if this process is an unclaimed rank, or may become one under ``run --wrap``; never raise."""
    environ = os.environ
    if not environ.get("MEGASCALE_BOX_DIR") or environ.get("MEGASCALE_RECORDER") == "0":
        return
    is_rank = bool(environ.get("RANK"))
    if not is_rank and environ.get("MEGASCALE_WRAPPED") != "1":
        return
    me = str(os.getpid())
    # A process that replaced itself by exec still carries its own claim, and is still the rank.
    if environ.get("MEGASCALE_CLAIMED_BY", me) != me:
        return
    try:
        from megascale_ops.recorder import activate

        if is_rank:
            environ["MEGASCALE_CLAIMED_BY"] = me
            activate.activate()
        else:
            activate.await_rank()
    except Exception as error:  # noqa: BLE001  the script must run in spite of any fault here; reported once
        sys.stderr.write(f"megascale-ops recorder: steps aside: {type(error).__name__}: {error}\n")


def _run_next_sitecustomize() -> None:
    """Find the sitecustomize that ours hides and run it in our place; what it raises is Python's to report."""
    # importlib's own frozen halves: importlib.util offers the same two names for 3 ms of imports at every start.
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import PathFinder

    here = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120  pathlib would double what this file costs
    others = [path for path in sys.path if os.path.realpath(path or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_activate()
if __name__ == "sitecustomize":
    _run_next_sitecustomize()
