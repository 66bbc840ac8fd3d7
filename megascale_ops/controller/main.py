# SPDX-License-Identifier: Apache-2.0
"""Serve a controller until it is stopped: bind, restore from the journal, listen, tick."""

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megascale_ops.controller.actuating import Actuating
from megascale_ops.controller.config import (
    ControllerConfig,
    limit_of,
    parse_listen,
    recording_folder,
    require_recording,
)
from megascale_ops.controller.entrance import Entrance
from megascale_ops.controller.history.files import HistoryFiles, folder_of
from megascale_ops.controller.job.transitions import MOST_INCIDENTS
from megascale_ops.controller.journal.engine import is_server, reach_server, shown
from megascale_ops.controller.journal.fence import DeposedError, Leader
from megascale_ops.controller.journal.store import Store, open_store
from megascale_ops.controller.journal.witnesses import highest_numbers
from megascale_ops.controller.leadership.candidate import Candidate
from megascale_ops.controller.leadership.peers import asks
from megascale_ops.controller.leadership.session import Session, application_of
from megascale_ops.controller.loop import Loop
from megascale_ops.controller.notifying import Notifying, page_address
from megascale_ops.controller.recording.recorded_loop import RecordedLoop
from megascale_ops.controller.recording.ring import Ring
from megascale_ops.controller.server import gc_pacing, standby
from megascale_ops.controller.server.api import Api
from megascale_ops.controller.server.event_loop import event_loop
from megascale_ops.controller.server.listen import BACKLOG, Served, listening
from megascale_ops.controller.server.standing import Standing
from megascale_ops.engines.actuator import Nodes
from megascale_ops.engines.kubernetes.nodes import KubernetesNodes
from megascale_ops.engines.slurm.commands import is_here
from megascale_ops.engines.slurm.nodes import SlurmNodes
from megascale_ops.errors import UsageError
from megascale_ops.link.tls import client_tls
from megascale_ops.whole_file import write_whole

if TYPE_CHECKING:
    from megascale_ops.controller.telemetry.watch import Telemetry

log = logging.getLogger(__name__)

# 5 s: a quarter of what a leader waits before it gives way for whom it does not hear.
_EXPECT_S = 5.0
_OPEN_TO_ALL = (
    "no token is asked for: every user of this machine can stop the jobs of this controller; `megascale-ops token new "
    "FILE` makes one, --token-file FILE asks for it"
)


def serve(config: ControllerConfig) -> int:
    """Serve until SIGTERM, SIGINT, or the end of ``config.exit_with_parent``; return the exit code.

    Raises:
        UsageError: address, token, store or certificate can't be used as given.
        VersionError: the store is of a version that this program does not support.
    """
    entrance = Entrance(config)
    with contextlib.ExitStack() as open_things:
        # Journal, histories and what else is written here contain jobs and their output: for the owner only.
        open_things.callback(os.umask, os.umask(0o077))
        require_recording(config)
        listener = open_things.enter_context(_bind(config.listen))
        limit_bytes = limit_of(config)
        if is_server(config.store):
            reach_server(config.store, config.store_wait_s)
            with asyncio.Runner(loop_factory=event_loop) as runner:
                runner.run(_serve_in_turn(config, listener, entrance, limit_bytes))
            return 0
        store = open_store(config.store, limit_bytes=limit_bytes, wait_s=config.store_wait_s)
        open_things.callback(store.close)
        with asyncio.Runner(loop_factory=event_loop) as runner:
            runner.run(_serve(config, store, listener, entrance))
    return 0


async def _serve_in_turn(
    config: ControllerConfig, listener: socket.socket, entrance: Entrance, limit_bytes: int
) -> None:
    """Wait until this controller leads those on the same database, serve as long as it does, and wait again."""
    events = asyncio.get_running_loop()
    stop, elected, deposed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def wake(event: asyncio.Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            events.call_soon_threadsafe(event.set)

    url = config.advertise or page_address(config.listen, listener.getsockname()[1], is_tls=entrance.tls is not None)
    me = Leader(secrets.token_hex(8), url.rstrip("/"), time.time())
    candidate = Candidate(
        Session(config.store, me),
        me,
        asks(client_tls()),
        elected=lambda: wake(elected),
        deposed=lambda _why: wake(deposed),
    )
    _stop_on_signals(stop)
    try:
        candidate.begin()
        async with _when_gone(config.exit_with_parent, stop), _turning(candidate):
            while not stop.is_set():
                if not candidate.is_leading:
                    with _door(listener) as door:
                        await _stand_by(config, candidate, door, entrance, stop, elected)
                    continue
                deposed.clear()
                store = await _elected(config, candidate, limit_bytes)
                if store is None:
                    continue
                with contextlib.closing(store), _door(listener) as door:
                    await _serve(config, store, door, entrance, candidate=candidate, stop=stop, deposed=deposed)
                    if stop.is_set() or candidate.gives_way:
                        await asyncio.to_thread(store.flush)
                        await asyncio.to_thread(store.resign, candidate.resign)
                        candidate.give_up()
    finally:
        await asyncio.to_thread(candidate.close)
        if config.port_file is not None:
            config.port_file.unlink(missing_ok=True)


async def _elected(config: ControllerConfig, candidate: Candidate, limit_bytes: int) -> Store | None:
    """Open the journal as its leader; None where that can't be now, and is tried again."""
    try:
        return await asyncio.to_thread(
            open_store,
            config.store,
            limit_bytes=limit_bytes,
            elect=candidate.elect,
            application=application_of(candidate.me.id),
        )
    except DeposedError:
        return None
    except UsageError as error:
        if not candidate.has_taken_part:
            raise  # at the first time it is the user's word that is wrong; later the database has gone away
        candidate.let_go(str(error))
        return None


async def _stand_by(
    config: ControllerConfig,
    candidate: Candidate,
    door: socket.socket,
    entrance: Entrance,
    stop: asyncio.Event,
    elected: asyncio.Event,
) -> None:
    """Answer as a standby until this controller leads, or ends."""
    elected.clear()
    standing = Standing(candidate)
    log.info("%s", standing.sentence())
    served = Served(partial(standby.application, standing, entrance.access))
    async with listening(served, door, entrance.context):
        if config.port_file is not None:
            _write_port(config.port_file, door.getsockname()[1])
        waits = [asyncio.create_task(one) for one in (stop.wait(), elected.wait(), entrance.follow())]
        if not candidate.is_leading:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()


@contextlib.contextmanager
def _door(listener: socket.socket) -> Iterator[socket.socket]:
    """Lend the listener; who serves closes what it has, and clients that come meanwhile wait in the queue."""
    door = listener.dup()
    try:
        yield door
    finally:
        door.close()


@contextlib.asynccontextmanager
async def _turning(candidate: Candidate) -> AsyncIterator[None]:
    """Let the candidate know that this loop turns."""

    async def turn() -> None:
        while True:
            candidate.turned()
            await asyncio.sleep(1.0)

    task = asyncio.create_task(turn())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _expect(candidate: Candidate | None, loop: Loop) -> None:
    """Let the candidate know whose requests this leader should answer, until cancelled."""
    while True:
        if candidate is not None:
            candidate.expect({node for job in loop.jobs.values() if not job.is_over for node in job.nodes})
        await asyncio.sleep(_EXPECT_S)


def _stop_on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm sends those to all processes of a step
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _serve(
    config: ControllerConfig,
    store: Store,
    listener: socket.socket,
    entrance: Entrance,
    *,
    candidate: Candidate | None = None,
    stop: asyncio.Event | None = None,
    deposed: asyncio.Event | None = None,
) -> None:
    events = asyncio.get_running_loop()
    standing = Standing(candidate)

    def post(callback: Callable[[], None]) -> None:
        # The journal's thread may finish a batch after the loop has ended: then there is nothing left to call.
        with contextlib.suppress(RuntimeError):
            events.call_soon_threadsafe(callback)

    loop = _loop(store, config, post, lambda: standing.is_suspended)
    _restore(loop, store, config, candidate.why if candidate is not None else "")
    files = HistoryFiles(loop, folder_of(config.store, config.run_dir))
    files.restore()
    telemetry = _telemetry(config, loop)
    notifying = Notifying(config, loop)
    actuating = Actuating(loop, _engine(config), config.node_states_s)
    actuating.begin()
    # A run's own has the rights of that run, and its command line named the folder; a shared one reads no files.
    logs_of = config.run_dir if config.exit_with_parent else None
    api = Api(
        loop,
        store,
        entrance.access,
        files,
        open_page=config.open_page,
        notifying=notifying,
        logs_of=logs_of,
        standing=standing,
    )
    stop, deposed = stop or asyncio.Event(), deposed or asyncio.Event()
    try:
        async with listening(api, listener, entrance.context):
            host, port = listener.getsockname()[:2]
            notifying.begin(page_address(config.listen, port, is_tls=entrance.tls is not None))
            log.info("controller listens on %s port %d, journal in %s", host, port, shown(config.store))
            if not entrance.access.is_closed:
                log.warning(_OPEN_TO_ALL)
            # Before the port is published: a reader may stop the controller at once, which removes the file.
            _stop_on_signals(stop)
            if config.port_file is not None:
                _write_port(config.port_file, port)
            async with _when_gone(config.exit_with_parent if candidate is None else 0, stop):
                watches = (notifying.watch(), actuating.watch(), entrance.follow(), _expect(candidate, loop))
                await _tick_until(loop, files, watches, telemetry, (stop, deposed))
            await api.say_goodbye()
    finally:
        # Side by side: the run that started the controller waits three seconds for its end.
        await asyncio.gather(*_closing(files, notifying, telemetry, loop))
        if config.port_file is not None and candidate is None:
            config.port_file.unlink(missing_ok=True)


def _closing(
    files: HistoryFiles, notifying: Notifying, telemetry: "Telemetry | None", loop: Loop
) -> Iterator[Coroutine[None, None, None]]:
    """Yield the end of each part that has one."""
    yield files.close()
    yield notifying.close()
    if telemetry is not None:
        yield telemetry.close()
    if isinstance(loop, RecordedLoop):
        yield loop.close_recording()


def _loop(
    store: Store, config: ControllerConfig, post: Callable[[Callable[[], None]], None], is_paused: Callable[[], bool]
) -> Loop:
    """Return the loop, one that records where that is asked for."""
    folder = recording_folder(config)
    if folder is None:
        return Loop(store, clock=time.monotonic, wall=time.time, post=post, is_paused=is_paused)
    ring = Ring(
        folder,
        most_bytes=config.record_mb * 1024 * 1024,
        keep_s=config.record_minutes * 60.0,
        clock=time.monotonic,
        wall=time.time,
    )
    return RecordedLoop(store, ring, clock=time.monotonic, wall=time.time, post=post, is_paused=is_paused)


def _restore(loop: Loop, store: Store, config: ControllerConfig, why: str) -> None:
    """Go on from what the journal has; ``why`` the leader before gave way, "" where it did not."""
    records = store.jobs()
    highest = highest_numbers(records, store.highest_incidents(), config.run_dir)
    loop.restore(records, store.newest_incidents(MOST_INCIDENTS), highest)
    loop.hardware.restore(store.hardware())
    loop.nodes.restore(store.node_moves(), store.node_checks())
    for job in loop.jobs.values():
        if why and not job.is_over:
            loop.transitions.note(
                job, "leader_gave_way", f"another controller leads from now on; the one before: {why}"
            )
            loop.transitions.save(job)
    if isinstance(loop, RecordedLoop):
        loop.begin_recording()


def _engine(config: ControllerConfig) -> Nodes | None:
    """Return the nodes of the engine that this controller speaks to; None where it speaks to none."""
    if config.engine == "kubernetes":
        return KubernetesNodes()
    by_slurm = config.engine == "slurm" or (config.engine == "auto" and "SLURM_JOB_ID" in os.environ)
    if not by_slurm:
        return None
    if not is_here():
        log.info("no node is drained in Slurm: scontrol is not installed here")
        return None
    return SlurmNodes()


def _telemetry(config: ControllerConfig, loop: Loop) -> "Telemetry | None":
    """Return the exporter to an OpenTelemetry collector; None where none is named: then nothing of it is imported."""
    if config.otlp_endpoint in ("", "none"):
        return None
    from megascale_ops.controller.telemetry.sender import Sender
    from megascale_ops.controller.telemetry.watch import Telemetry

    try:
        telemetry = Telemetry(loop, Sender(config.otlp_endpoint, loop.exported))
    except UsageError as error:
        # The variable is the cluster's, as a rule, and may be meant for others: no run fails for it.
        log.warning("nothing is sent to OpenTelemetry: %s", error)
        return None
    telemetry.begin()
    return telemetry


async def _tick_until(
    loop: Loop,
    files: HistoryFiles,
    watches: tuple[Coroutine[None, None, None], ...],
    telemetry: "Telemetry | None",
    ends: tuple[asyncio.Event, ...],
) -> None:
    """Tick until one of ``ends`` is set; a tick that ends by itself is a bug and ends the controller."""
    works = {asyncio.create_task(work) for work in (loop.run(), gc_pacing.collect(), files.keep(), *watches)}
    if telemetry is not None:
        works.add(asyncio.create_task(telemetry.watch()))
    if isinstance(loop, RecordedLoop):
        works.add(asyncio.create_task(loop.ring.keep(loop.look)))
    stopping = {asyncio.create_task(one.wait()) for one in ends}
    done, pending = await asyncio.wait({*works, *stopping}, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for work in works & done:
        work.result()


@contextlib.asynccontextmanager
async def _when_gone(pid: int, stop: asyncio.Event) -> AsyncIterator[None]:
    """Set ``stop`` when the process ``pid`` ends; 0: never."""
    if pid <= 0:
        yield
        return
    events = asyncio.get_running_loop()
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        stop.set()
        yield
        return
    events.add_reader(watched, stop.set)
    try:
        yield
    finally:
        events.remove_reader(watched)
        os.close(watched)


def _bind(listen: str) -> socket.socket:
    host, port = parse_listen(listen)
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise UsageError(f"can't listen on {listen}: there is no such host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listening here, before the journal is opened, makes a port in use the first error.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        why = "the port is taken; is a controller running already?" if taken else os.strerror(error.errno or 0)
        raise UsageError(f"can't listen on {listen}: {why}") from error
    return listener


def _write_port(path: Path, port: int) -> None:
    """Write the bound port for the process that waits for the file."""
    try:
        write_whole(path, f"{port}\n".encode(), follow=True)
    except OSError as error:
        raise UsageError(f"port file {path} can't be written: {error}") from error
