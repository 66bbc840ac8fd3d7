# SPDX-License-Identifier: Apache-2.0
"""What scripts do on one rank without declaring it while the others wait in a collective, done for real.

Uploads, evaluations, exports, judges that answer late, locks, people at a prompt: none of it is a fault. Each ends by
itself, and a restart of the ranks meanwhile kills a healthy job. ``WAITS`` is the table; a row of it takes
about ``scene.seconds``. What the rank waits for is where it is in real scripts: in a child, or in a process that is
not the rank's (``counterpart``).
"""

import asyncio
import concurrent.futures
import contextlib
import fcntl
import hashlib
import http.client
import itertools
import os
import pdb  # noqa: T100  a prompt is one of the waits
import random
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from megascale_ops.chaos import counterpart
from megascale_ops.chaos.scene import Scene

# Two letters without order: every place matches thousands of others, which costs zlib 7 s for each MB.
_TWO_LETTERS = bytes(65 + (number & 1) for number in range(256))
_BURN = "import sys,time\nend=time.monotonic()+float(sys.argv[1])\nwhile time.monotonic()<end: pass"
_FETCH = "import sys,urllib.request\nurllib.request.urlopen(sys.argv[1]).read()"
_PUT = (
    "import sys,time,urllib.request as r\nend=time.monotonic()+float(sys.argv[2])\n"
    "while time.monotonic()<end: r.urlopen(r.Request(sys.argv[1]+'/part',data=bytes(1<<20),method='PUT')).read()"
)
_PRODUCE = (
    "import sys,time\nend=time.monotonic()+float(sys.argv[1])\n"
    "while time.monotonic()<end: sys.stdout.buffer.write(bytes(1<<16)); sys.stdout.flush(); time.sleep(0.2)"
)


def _left(scene: Scene) -> Iterator[int]:
    """Count for as long as the wait lasts."""
    end = time.monotonic() + scene.seconds
    return itertools.takewhile(lambda _: time.monotonic() < end, itertools.count())


def _patience_s(scene: Scene) -> float:
    """Return a time-out as careful clients set one: several times what it takes."""
    return 5.0 * scene.seconds + 60.0


def _place(scene: Scene, name: str) -> Path:
    """Return a path for a file or pipe of one wait."""
    folder = scene.folder / "waits"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.{scene.rank}"
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    return path


def _python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


# A child does it


def _child_busy(scene: Scene) -> None:
    subprocess.run(_python(_BURN, scene.seconds), check=True)


def _child_sleeps(scene: Scene) -> None:
    subprocess.run(["sleep", str(scene.seconds)], check=True)


def _child_network(scene: Scene) -> None:
    url = counterpart.start("serve", scene.seconds)
    subprocess.run(_python(_FETCH, f"{url}/silent/{scene.seconds}"), check=True)


def _child_evaluates(scene: Scene) -> None:
    """Read the output of a chatty child line by line, as a script that watches an evaluation does."""
    code = "import sys,time\nfor n in range(int(float(sys.argv[1])/0.25)): time.sleep(0.25); print(n, flush=True)"
    with subprocess.Popen(_python(code, scene.seconds), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for _ in child.stdout:
            pass


def _shell_tree(scene: Scene) -> None:
    """As `aws s3 cp` under a shell script: the tool that works is a grandchild."""
    url = counterpart.start("serve", scene.seconds)
    tool = shlex.join(_python(_PUT, url, scene.seconds))
    subprocess.run(["sh", "-c", f"{tool}; true"], check=True)


def _pipeline(scene: Scene) -> None:
    """As `tar | ssh` or rsync: children that move bytes between themselves, slowly."""
    there = shlex.quote(str(_place(scene, "copied")))
    producer = shlex.join(_python(_PRODUCE, scene.seconds))
    subprocess.run(["sh", "-c", f"{producer} | cat > {there}"], check=True)


def _crunch(seconds: float) -> int:
    end = time.monotonic() + seconds
    return sum(1 for _ in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count()))


def _process_pool(scene: Scene) -> None:
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        list(pool.map(_crunch, [scene.seconds, scene.seconds / 2]))


# The network


def _http_silent(scene: Scene) -> None:
    url = counterpart.start("serve", scene.seconds)
    with urllib.request.urlopen(f"{url}/silent/{scene.seconds}", timeout=_patience_s(scene)) as answer:  # noqa: S310  http, the trial's server
        answer.read()


def _http_trickles(scene: Scene) -> None:
    url = counterpart.start("serve", scene.seconds)
    with urllib.request.urlopen(f"{url}/trickle/{scene.seconds}", timeout=_patience_s(scene)) as answer:  # noqa: S310  same
        answer.read()


def _http_judge(scene: Scene) -> None:
    """Three answers are judged, one after the other; each verdict takes its time."""
    where = urlsplit(counterpart.start("serve", scene.seconds)).netloc
    with contextlib.closing(http.client.HTTPConnection(where, timeout=_patience_s(scene))) as judge:
        for _ in range(3):
            judge.request("POST", f"/silent/{scene.seconds / 3}", body=b"which answer is better?")
            judge.getresponse().read()


def _http_in_threads(scene: Scene) -> None:
    """Ask four times at once, and wait for futures: the main thread waits for a lock."""
    url = counterpart.start("serve", scene.seconds)
    fetch = f"{url}/silent/{scene.seconds}"
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(urllib.request.urlopen, fetch, None, _patience_s(scene)) for _ in range(4)]
        for future in asked:
            future.result().close()


def _asyncio_client(scene: Scene) -> None:
    where = urlsplit(counterpart.start("serve", scene.seconds))

    async def fetch() -> None:
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(f"GET /silent/{scene.seconds} HTTP/1.0\r\n\r\n".encode())
        await reader.read(-1)
        writer.close()

    asyncio.run(fetch())


def _object_store(scene: Scene) -> None:
    """Upload an object in parts of 2 MB, as S3 wants it, over a line of 1 MB/s."""
    where = urlsplit(counterpart.start("serve", scene.seconds)).netloc
    with contextlib.closing(http.client.HTTPConnection(where, timeout=_patience_s(scene))) as store:
        store.request("POST", "/bucket/model?uploads")
        store.getresponse().read()
        for number in _left(scene):
            store.request("PUT", f"/bucket/model?partNumber={number + 1}&uploadId=1", body=bytes(2 << 20))
            store.getresponse().read()
        store.request("POST", "/bucket/model?uploadId=1")
        store.getresponse().read()


def _service_wait(scene: Scene) -> None:
    """Knock once a second until the service is up."""
    where = urlsplit(counterpart.start("serve_later", scene.seconds)).netloc
    for _ in range(int(_patience_s(scene))):
        with contextlib.closing(http.client.HTTPConnection(where, timeout=10.0)) as service:
            try:
                service.request("GET", "/silent/0")
                service.getresponse().read()
            except OSError:
                time.sleep(1.0)
            else:
                return


def _download(scene: Scene) -> None:
    """Download what all ranks need; these stand at a barrier (the workload's) until it is there."""
    url = counterpart.start("serve", scene.seconds)
    with (
        urllib.request.urlopen(f"{url}/trickle/{scene.seconds}", timeout=_patience_s(scene)) as answer,  # noqa: S310  http, the trial's server
        _place(scene, "download").open("wb") as out,
    ):
        shutil.copyfileobj(answer, out, 1024)


# Files


def _copytree(scene: Scene) -> None:
    source = _place(scene, "source")
    source.mkdir()
    for number in range(400):
        (source / str(number)).write_bytes(os.urandom(1 << 14))
    for number in _left(scene):
        target = _place(scene, f"copy{number}")
        shutil.copytree(source, target)
        shutil.rmtree(target)
    shutil.rmtree(source)


def _zip_files(scene: Scene) -> None:
    text = random.Random(0).randbytes(1 << 16).translate(_TWO_LETTERS)  # noqa: S311  nothing is secret
    with zipfile.ZipFile(_place(scene, "archive"), "w", zipfile.ZIP_DEFLATED) as archive:
        for number in _left(scene):
            archive.writestr(str(number), text)


def _writes_and_syncs(scene: Scene) -> None:
    with _place(scene, "synced").open("wb", buffering=0) as out:
        for _ in _left(scene):
            out.seek(0)
            out.write(bytes(1 << 20))
            os.fsync(out.fileno())


def _fifo_slow(scene: Scene) -> None:
    """Read a pipe that is fed a little now and then, as a slow network file system is."""
    pipe = _place(scene, "fed")
    os.mkfifo(pipe)
    counterpart.start("feed", str(pipe), scene.seconds)
    with pipe.open("rb", buffering=0) as data:
        while data.read(1 << 16):
            pass


def _file_grows(scene: Scene) -> None:
    """Follow a file that another process writes until its end is there."""
    path = _place(scene, "grown")
    counterpart.start("grow", str(path), scene.seconds)
    with path.open("rb") as data:
        while not data.read().endswith(b"end"):
            time.sleep(1.0)


def _lock_file(scene: Scene) -> None:
    path = _place(scene, "lock")
    counterpart.start("hold_file", str(path), scene.seconds)
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            time.sleep(0.25)
        else:
            return


def _flock(scene: Scene) -> None:
    path = _place(scene, "flock")
    counterpart.start("hold_flock", str(path), scene.seconds)
    with path.open("rb") as wanted:
        fcntl.flock(wanted, fcntl.LOCK_EX)


# Computing


def _one_call(scene: Scene) -> None:
    """Compress in one call of C that lets go of the interpreter's lock."""
    sample = random.Random(0).randbytes(1 << 17).translate(_TWO_LETTERS)  # noqa: S311  nothing is secret
    begun = time.monotonic()
    zlib.compress(sample, 9)
    times = scene.seconds / (time.monotonic() - begun)
    zlib.compress(random.Random(1).randbytes(int(times * len(sample))).translate(_TWO_LETTERS), 9)  # noqa: S311  same


def _one_call_locked(scene: Scene) -> None:
    """Compute in one call of C that keeps the interpreter's lock, as pickling or sorting something huge does."""
    begun = time.monotonic()
    sum(itertools.repeat(1, 5_000_000))
    sum(itertools.repeat(1, int(5_000_000 * scene.seconds / (time.monotonic() - begun))))


def _tokenise(scene: Scene) -> None:
    words: Counter[str] = Counter()
    text = "the quick brown fox jumps over the lazy dog, and then some; " * 50
    for _ in _left(scene):
        words.update(re.findall(r"\w+|[^\w\s]", text))


def _evaluate(scene: Scene) -> None:
    import torch

    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).eval()
    with torch.no_grad():
        for _ in _left(scene):
            layers(torch.randn(64, 64))


def _validate(scene: Scene) -> None:
    """As one rank of a GPU job does: a little Python for each batch, and then one line that waits for the device."""
    import torch

    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).eval()
    with torch.no_grad():
        for _ in _left(scene):
            for _ in range(20):
                layers(torch.randn(64, 64))
            time.sleep(0.25)


def _metrics(scene: Scene) -> None:
    """Long calls of C, one after the other."""
    for _ in _left(scene):
        hashlib.pbkdf2_hmac("sha256", b"loss", b"", 1_000_000)  # 0.6 s of a core


def _export(scene: Scene) -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).eval()
    for number in _left(scene):
        torch.export.export(model, (torch.randn(number + 2, 64),))


def _compile(scene: Scene) -> None:
    import torch

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ x.T).square().sum() + x.cos().mean()

    for number in _left(scene):
        torch.compiler.reset()
        torch.compile(forward, dynamic=False)(torch.randn(17 + number, 23))


def _copy_memory(scene: Scene) -> None:
    held = bytearray(os.urandom(1 << 20) * 96)
    for _ in _left(scene):
        held = bytearray(held)


def _thread_works(scene: Scene) -> None:
    done = threading.Event()

    def work() -> None:
        _metrics(scene)
        done.set()

    threading.Thread(target=work).start()
    done.wait()


# People, and time


def _input_late(scene: Scene) -> None:
    pipe = _place(scene, "typed")
    os.mkfifo(pipe)
    counterpart.start("say_late", str(pipe), scene.seconds, "yes")
    before = os.dup(0)
    with pipe.open("rb") as typed:
        os.dup2(typed.fileno(), 0)
        try:
            input()
        finally:
            os.dup2(before, 0)
            os.close(before)


def _pdb(scene: Scene) -> None:
    pipe = _place(scene, "debugger")
    os.mkfifo(pipe)
    counterpart.start("say_late", str(pipe), scene.seconds, "continue")
    with pipe.open(encoding="utf-8") as typed, Path(os.devnull).open("w", encoding="utf-8") as shown:
        pdb.Pdb(stdin=typed, stdout=shown, nosigint=True).set_trace()


def _debugged(scene: Scene) -> None:
    """Stand still under a debugger, undeclared."""
    done = _place(scene, "debugged")
    counterpart.start("debug", os.getpid(), scene.seconds, str(done))
    for _ in range(int(20 * _patience_s(scene))):
        if done.exists():
            return
        time.sleep(0.05)


def _sleep(scene: Scene) -> None:
    time.sleep(scene.seconds)


def _back_off(scene: Scene) -> None:
    """Try, sleep twice as long, try again: a limit on requests."""
    slept, pause = 0.0, 0.5
    while slept < scene.seconds:
        pause = min(2 * pause, scene.seconds - slept)
        time.sleep(pause)
        slept += pause


def _by_the_workload(_scene: Scene) -> None:
    """Only mark the moment: it happens where the workload loads its data."""


class Wait(NamedTuple):
    """What one rank does meanwhile.

    ``brief`` rows are held by every `chaos score`, the others when asked for. ``compiles`` wants torch's compiler in
    the workload. ``guarded``: the others wait at a barrier right behind it. ``last``: may come after the last
    step.
    """

    do: Callable[[Scene], None]
    text: str
    brief: bool = False
    compiles: bool = False
    guarded: bool = False
    last: bool = True
    arguments: tuple[str, ...] = ()  # more arguments of the workload


WAITS = {
    "child_busy": Wait(_child_busy, "waits for a child that computes", brief=True),
    "child_sleeps": Wait(_child_sleeps, "waits for a child that sleeps", brief=True),
    "child_network": Wait(_child_network, "waits for a child that waits for a server"),
    "child_evaluates": Wait(_child_evaluates, "reads what a child prints now and then"),
    "shell_tree": Wait(_shell_tree, "waits for a shell whose child uploads"),
    "pipeline": Wait(_pipeline, "waits for children that copy through a pipe"),
    "process_pool": Wait(_process_pool, "waits for a pool of processes"),
    "http_silent": Wait(_http_silent, "waits for a server that answers late", brief=True),
    "http_trickles": Wait(_http_trickles, "reads an answer that trickles"),
    "http_judge": Wait(_http_judge, "asks a slow judge three times"),
    "http_in_threads": Wait(_http_in_threads, "waits for threads that wait for a server"),
    "asyncio_client": Wait(_asyncio_client, "waits for a server in an event loop"),
    "object_store": Wait(_object_store, "uploads an object in parts over a slow line"),
    "service_wait": Wait(_service_wait, "tries once a second to reach a service that is not up yet"),
    "download_guarded": Wait(_download, "downloads what the others wait for at a barrier", guarded=True),
    "copytree": Wait(_copytree, "copies trees of files"),
    "zip_files": Wait(_zip_files, "zips files"),
    "writes_synced": Wait(_writes_and_syncs, "writes and syncs"),
    "fifo_slow": Wait(_fifo_slow, "reads a pipe that is fed slowly"),
    "file_grows": Wait(_file_grows, "follows a file that grows"),
    "lock_file": Wait(_lock_file, "waits for a lock file to go", guarded=True),
    "flock_held": Wait(_flock, "waits for a lock of the kernel"),
    "one_call": Wait(_one_call, "compresses in one call of C", brief=True),
    "one_call_locked": Wait(_one_call_locked, "computes in one call of C that keeps the interpreter's lock"),
    "tokenises": Wait(_tokenise, "tokenises in plain Python", brief=True),
    "evaluates": Wait(_evaluate, "evaluates a model"),
    "validates_unevenly": Wait(_validate, "validates on a device, which takes most of the time"),
    "metrics_computed": Wait(_metrics, "computes in C, call after call"),
    "exports": Wait(_export, "exports its model", compiles=True),
    "compiles": Wait(_compile, "compiles", compiles=True),
    "copies_memory": Wait(_copy_memory, "copies memory"),
    "thread_works": Wait(_thread_works, "waits for a thread of its own that computes"),
    "loader_slow": Wait(
        *(_by_the_workload, "gets a batch late from a worker of its data loader"),
        last=False,
        arguments=("--loader-workers=1",),
    ),
    "input_late": Wait(_input_late, "waits for a line on its standard input"),
    "pdb_prompt": Wait(_pdb, "stands at the prompt of pdb"),
    "debugger_undeclared": Wait(_debugged, "is stopped by a debugger that nobody has declared"),
    "sleeps": Wait(_sleep, "sleeps on purpose", brief=True),
    "backs_off": Wait(_back_off, "sleeps longer and longer between tries"),
}
