# SPDX-License-Identifier: Apache-2.0
"""What a warm spare does while it waits, and what it leaves alone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megascale_ops.runner.processes import RankPopen
from megascale_ops.runner.ranks import warm

# The start of CUDA is watched from the moment there is a torch: also without a GPU, where it would merely fail.
_WAIT = """
import gc, os, runpy, sys

import torch

touched = []
vars(torch.cuda)["_lazy_init"] = lambda: touched.append("CUDA")
ready, told = os.pipe()
sys.argv = ["standby", str(told)]
runpy.run_path(PATH)["main"]()

assert os.read(ready, 1) == b"r"
assert {"torch", "torch._dynamo", "torch.distributed.checkpoint"} <= set(sys.modules)
assert gc.isenabled() and gc.get_freeze_count() > 100_000, gc.get_freeze_count()
assert not touched
assert not torch.cuda.is_initialized()
opened = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
assert not [one for one in opened if one.startswith("/dev/nvidia")], opened
"""


def test_a_spare_that_waits_has_not_touched_cuda() -> None:
    """All imports of a spare leave CUDA alone: no context, no device opened, nothing asked to begin.

    What they brought is no garbage, and is not looked through in the script's steps.
    """
    program = _WAIT.replace("PATH", repr(str(vars(warm)["_STANDBY"])))

    done = subprocess.run(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_a_spare_that_became_a_rank_reads_what_the_runner_reads(tmp_path: Path) -> None:
    """A question that a warm rank asks is answered from the terminal, not by the line that told it who it is."""
    (tmp_path / "torch.py").write_text("raise ImportError('none here: this is about something else')\n")
    (tmp_path / "asks.py").write_text("print('hello', input())\n")
    ready, told = os.pipe()
    terminal, keys = os.pipe()
    spare = subprocess.Popen(
        [sys.executable, str(vars(warm)["_STANDBY"]), str(told), str(terminal)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        pass_fds=(told, terminal),
    )
    order = {
        "argv": ["-u", str(tmp_path / "asks.py")], "env": dict(os.environ), "cwd": str(tmp_path), "stdout": "",
        "stderr": "", "bootstrap": "",
    }  # fmt: skip

    os.write(keys, b"ada\n")
    out, _ = spare.communicate(json.dumps(order).encode() + b"\n", timeout=60)

    for end in (ready, told, terminal, keys):
        os.close(end)
    assert out == b"hello ada\n"


_FAKE_TORCH = """
import contextlib, os

said = open(os.environ["SAID"], "a")


if "NCCL" in os.environ:  # as torch's own libraries do
    import ctypes

    ctypes.CDLL(os.environ["NCCL"])


class Tensor:
    pass


def ones(*_sizes, device):
    said.write(f"ones on {device}\\n")
    return Tensor()


def mm(_a, _b):
    said.write("mm\\n")
    if os.environ.get("FULL"):
        raise RuntimeError("CUDA out of memory")


class cuda:
    is_available = staticmethod(lambda: os.environ.get("NO_GPU") is None)
    device_count = staticmethod(lambda: 4)
    synchronize = staticmethod(lambda: None)
    empty_cache = staticmethod(lambda: said.write("left\\n") and said.flush())

    @staticmethod
    @contextlib.contextmanager
    def device(index):
        said.write(f"on {index}\\n")
        yield
        said.write("off\\n")
        said.flush()
"""


_TELLS = "import os; print(os.environ.get('MEGASCALE_GPU_OF_SPARE', 'gone'))\n"


def stood_by(
    tmp_path: Path, script: str = _TELLS, of_rank: dict[str, str] | None = None, **env: str
) -> tuple[list[str], str, str]:
    """Let a spare with a torch that only tells become a rank; return what was told, its output and its words."""
    (tmp_path / "torch.py").write_text(_FAKE_TORCH)
    (tmp_path / "rank.py").write_text(script)
    (tmp_path / "said").touch()
    ready, told = os.pipe()
    given = {**os.environ, "PYTHONPATH": str(tmp_path), "SAID": str(tmp_path / "said"), **env}
    order = {
        "argv": ["-u", str(tmp_path / "rank.py")], "env": {**os.environ, **(of_rank or {})}, "cwd": str(tmp_path),
        "stdout": "", "stderr": "", "bootstrap": "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(vars(warm)["_STANDBY"]), str(told)],
        input=json.dumps(order) + "\n", env=given, pass_fds=(told,), capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    os.close(told)
    assert os.read(ready, 1) == b"r"
    os.close(ready)
    return (tmp_path / "said").read_text().split("\n")[:-1], done.stdout.strip(), done.stderr


def test_a_spare_of_a_gpu_makes_its_context_there_and_leaves_the_current_device_alone(tmp_path: Path) -> None:
    """The rank knows nothing of it; a local rank beyond the GPUs takes one of them, as a script with fewer would."""
    told, out, _ = stood_by(tmp_path, MEGASCALE_GPU_OF_SPARE="6")

    assert told == ["on 2", "ones on cuda", "mm", "left", "off"]
    assert out == "gone"


def test_without_a_gpu_or_with_one_that_is_full_it_becomes_a_rank_all_the_same(tmp_path: Path) -> None:
    """What failed is said once, on stderr; without the variable nothing is touched at all."""
    nothing, out, _ = stood_by(tmp_path, MEGASCALE_GPU_OF_SPARE="0", NO_GPU="1")
    untouched, _, _ = stood_by(tmp_path)
    _, full, words = stood_by(tmp_path, MEGASCALE_GPU_OF_SPARE="1", FULL="1")

    assert nothing == untouched == []
    assert out == full == "gone"
    assert "a warm worker could not make a context on GPU 1: CUDA out of memory" in words


_FAKE_NCCL = r"""
#include <stdio.h>
#include <stdlib.h>

static void say(const char *what, int device) {
    FILE *said = fopen(getenv("SAID"), "a");
    fprintf(said, "%s %d\n", what, device);
    fclose(said);
}
int ncclCommInitAll(void **made, int count, const int *devices) {
    *made = (void *)&say;
    say("NCCL on", count == 1 ? devices[0] : -1);
    return getenv("NCCL_FAILS") ? 2 : 0;
}
int ncclCommDestroy(void *ended) {
    say("NCCL off", ended == (void *)&say);
    return 0;
}
"""
_SETS_VARIABLES = """
import os
os.environ["NCCL_DEBUG"] = "WARN"
os.environ["NCCL_ALGO"] = "Ring"
os.environ["NCCL_ALGO"] = "Ring"
os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
del os.environ["NCCL_PROTO"]
print([name for name in os.environ if name.endswith("OF_SPARE")])
"""


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that is called as NCCL is and only tells."""
    folder = tmp_path_factory.mktemp("nccl")
    (folder / "nccl.c").write_text(_FAKE_NCCL)
    made = folder / "libmade.so"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", str(made), str(folder / "nccl.c")]
    subprocess.run(command, check=True, timeout=60)
    return str(made)


def test_a_spare_that_uses_nccl_ends_its_communicator_and_tells_of_variables_that_come_too_late(
    tmp_path: Path, nccl: str
) -> None:
    """NCCL reads them once: what the script sets then is told, once each, and no more where it changes nothing."""
    of_spare = {"MEGASCALE_GPU_OF_SPARE": "6", "MEGASCALE_NCCL_OF_SPARE": "1", "NCCL": nccl}
    of_rank = {"NCCL_DEBUG": "WARN", "NCCL_PROTO": "LL"}

    told, out, words = stood_by(tmp_path, script=_SETS_VARIABLES, of_rank=of_rank, **of_spare)

    assert told == ["on 2", "ones on cuda", "mm", "left", "NCCL on 2", "NCCL off 1", "off"]
    assert out == "[]"
    late = [line.split(" ")[1] for line in words.splitlines() if "does not count" in line]
    assert late == ["NCCL_ALGO", "NCCL_PROTO"]


def test_a_spare_that_has_not_used_nccl_says_nothing_of_its_variables(tmp_path: Path, nccl: str) -> None:
    """Not asked to, or a torch that has no NCCL to load: the script may set what it likes."""
    of_rank = {"NCCL_PROTO": "LL"}
    asked = {"MEGASCALE_GPU_OF_SPARE": "1", "MEGASCALE_NCCL_OF_SPARE": "1"}

    unasked, _, quiet = stood_by(
        tmp_path, script=_SETS_VARIABLES, of_rank=of_rank, MEGASCALE_GPU_OF_SPARE="1", NCCL=nccl
    )
    (tmp_path / "said").unlink()
    without, out, none_there = stood_by(tmp_path, script=_SETS_VARIABLES, of_rank=of_rank, **asked)

    assert unasked == without == ["on 1", "ones on cuda", "mm", "left", "off"]
    assert "does not count" not in quiet + none_there
    assert out == "[]"


def test_where_nccl_fails_the_spare_becomes_a_rank_all_the_same(tmp_path: Path, nccl: str) -> None:
    """It is said; the rank will fail by itself, or not."""
    of_spare = {"MEGASCALE_GPU_OF_SPARE": "0", "MEGASCALE_NCCL_OF_SPARE": "1", "NCCL": nccl, "NCCL_FAILS": "1"}

    told, out, words = stood_by(tmp_path, **of_spare)

    assert told[-2:] == ["NCCL on 0", "off"]
    assert out == "gone"
    assert "a warm worker could not use NCCL on GPU 0: error 2" in words


def test_what_cuda_was_initialised_with_must_be_the_ranks() -> None:
    """Other GPUs, another order or another allocator: that spare is not used; other variables do not count."""
    mine = {"CUDA_VISIBLE_DEVICES": "0,1", "RANK": "0", "NCCL_DEBUG": "INFO"}

    assert warm.same_cuda(mine, {**mine, "RANK": "1", "NCCL_DEBUG": "WARN"})
    assert not warm.same_cuda(mine, {**mine, "CUDA_VISIBLE_DEVICES": "1"})
    assert not warm.same_cuda(mine, {**mine, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert not warm.same_cuda({}, mine)
    assert warm.same_cuda(mine, {**mine, "RANK": "1"}, with_nccl=True)
    assert not warm.same_cuda(mine, {**mine, "NCCL_DEBUG": "WARN"}, with_nccl=True)
    assert not warm.same_cuda(mine, {**mine, "NCCL_PROFILER_PLUGIN": "libplugin.so"}, with_nccl=True)


def test_a_rank_gets_the_spare_of_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two spares that wait, each becomes the local rank whose context it has made, and none another's.

    Nor one whose variables of CUDA or NCCL are others than those that the spare has read.
    """
    waits = tmp_path / "waits.py"
    waits.write_text("import os, sys; os.write(int(sys.argv[1]), b'r'); sys.stdin.readline()\n")
    monkeypatch.setattr(warm, "_STANDBY", waits)
    env = dict(os.environ)
    pool = warm.WarmPool(2, env, 0.0, on_gpu=True, with_nccl=True)
    try:
        pool.settle()
        end_s = time.monotonic() + 60.0
        while len(ready := _ready(pool)) < 2 and time.monotonic() < end_s:
            time.sleep(0.01)

        other_gpus = pool.assign({"env": {**env, "CUDA_VISIBLE_DEVICES": "1"}}, 1)
        other_nccl = pool.assign({"env": {**env, "NCCL_ALGO": "Ring"}}, 1)
        became = pool.assign({"env": env}, 1)
    finally:
        pool.stop()

    assert sorted(ready) == [0, 1]
    assert other_gpus is None
    assert other_nccl is None
    assert became is ready[1]
    assert became.wait(30) == 0


def _ready(pool: warm.WarmPool) -> dict[int, RankPopen]:
    """Return the processes of the spares that wait, by their local rank."""
    return {one.local_rank: one.proc for one in list(vars(pool)["_spares"]) if one.is_ready()}


_WITNESS = """
import os, sys


class Witness:
    def __del__(self, ending=sys.is_finalizing, write=os.write):
        write(1, f"{ending()}\\n".encode())
"""
# No function of the script's own: it would hold the script's names, and so what they name.
_LEAVES = "import sys\nfrom witness import Witness\nmade = Witness()\nif __name__ != '__main__': sys.exit(1)\n"


@pytest.mark.parametrize("how", ["script", "script that exits", "module", "folder"])
def test_what_a_script_has_made_lives_to_the_end_of_python(tmp_path: Path, how: str) -> None:
    """As below ``python``: torch's DDP, freed sooner, may wait for ever for Gloo, which waits for Python's lock."""
    (tmp_path / "torch.py").write_text("raise ImportError('none here: this is about something else')\n")
    (tmp_path / "witness.py").write_text(_WITNESS)
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "leaves.py", tmp_path / "folder" / "__main__.py"):
        path.write_text(_LEAVES + ("sys.exit(0)\n" if "exits" in how else ""))
    argv = {"module": ["-m", "leaves"], "folder": [str(tmp_path / "folder")]}.get(how, [str(tmp_path / "leaves.py")])
    ready, told = os.pipe()
    spare = subprocess.Popen(
        [sys.executable, str(vars(warm)["_STANDBY"]), str(told)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        pass_fds=(told,),
    )
    order = {
        "argv": ["-u", *argv], "env": dict(os.environ), "cwd": str(tmp_path), "stdout": "", "stderr": "",
        "bootstrap": "",
    }  # fmt: skip

    out, err = spare.communicate(json.dumps(order).encode() + b"\n", timeout=60)

    for end in (ready, told):
        os.close(end)
    assert spare.returncode == 0, err
    assert out == b"True\n", err
