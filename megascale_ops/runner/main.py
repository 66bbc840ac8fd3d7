# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops run``: prepare the ground, launch, and leave nothing behind.

The order matters. Companions start first, since they come up while torch is being imported; the factory and the
rendezvous next; the ranks last. On the way out the same in reverse, and a sweep for whatever carries our mark.
"""

import logging
import os
import shlex
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from megascale_ops.errors import UsageError
from megascale_ops.foreign import opened
from megascale_ops.garbage_kept import GarbageKept
from megascale_ops.link.token_files import find_token
from megascale_ops.link.whereabouts import CONTROLLER_FILE, TOKEN_FILE
from megascale_ops.runner.config import RunConfig
from megascale_ops.runner.interrupts import Interrupted, WayOut, signals_handed_on, signals_interrupt
from megascale_ops.runner.node_check import check_node, recheck_node
from megascale_ops.runner.output.console import Console
from megascale_ops.runner.plan import Plan, as_node, make_plan, with_whole_paths
from megascale_ops.runner.preflight import is_free, look_at_machine, prepare_boxes, prepare_folder
from megascale_ops.runner.processes import marked_processes
from megascale_ops.runner.programs import check_program, own_world
from megascale_ops.runner.ranks import leftovers
from megascale_ops.runner.ranks.local_workers import LocalWorkers, Place
from megascale_ops.runner.ranks.warm import WarmPool
from megascale_ops.runner.run_folder import keep_newest, narrow_umask, prepare_run_folder
from megascale_ops.runner.services import companions
from megascale_ops.runner.services.accounting import comment
from megascale_ops.runner.services.attendance import Attendance, find_agents
from megascale_ops.runner.services.eviction import Eviction
from megascale_ops.runner.services.own_controller import Found, find_controller
from megascale_ops.runner.services.profiler import NCCL_VARIABLE, Profiler, has_device
from megascale_ops.runner.services.tasks import stand_by, take_all_cores
from megascale_ops.runner.services.time_up import TimeUp
from megascale_ops.runner.slurm_step import Step, stands_by
from megascale_ops.runner.wrapped.limits import limits
from megascale_ops.schema import environment
from megascale_ops.schema.health import NodeCheck
from megascale_ops.schema.messages import JoinReply, Notice
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.whole_file import write_whole

if TYPE_CHECKING:
    import queue

    from megascale_ops.runner.elastic import Outcome
    from megascale_ops.runner.rendezvous import MegascaleRendezvous

log = logging.getLogger(__name__)

# 2 s: the other nodes poll twice a second for the end of the job, before this run's controller ends.
_FAREWELL_S = 2.0
_SCRIPT_BYTES = 1 << 16  # imports stand at a script's begin


class Lasting(NamedTuple):
    """What is there before a run begins and after its end.

    ``step``: the Slurm step that it is a task of. ``config_file``: what a controller of its own reads, too.
    ``time_up``: what follows Slurm's signal that the job's time is up, or the SIGTERM of a pod that is evicted; None:
    the signals are the ranks'. ``is_lost``: whether this node is ended because its launcher has gone: the job goes on
    without it. ``came``: signals for the ranks.
    """

    step: Step | None
    config_file: str
    time_up: TimeUp | Eviction | None
    is_lost: Callable[[], bool]
    came: "queue.SimpleQueue[int]"


class Life:
    """What a run has from its begin to its end, and what is known of the end.

    Attributes:
        step, config_file, time_up, is_lost: As in `Lasting`.
        local_workers: The ranks, once they may be started.
        child_grace_s: How long what the ranks have left behind may go on; until they have ended well, not at all.
    """

    def __init__(self, stack: ExitStack, console: Console, way_out: WayOut, lasting: Lasting) -> None:
        self.stack = stack
        self.console = console
        self.way_out = way_out
        self.step, self.config_file, self.time_up, self.is_lost, self.came = lasting
        self.local_workers: LocalWorkers | None = None
        self.child_grace_s = 0.0
        self.signals: Callable[[int], None] = self.hand_on

    def takes_sigterm(self) -> bool:
        """Say whether a SIGTERM is taken care of without stopping the ranks at once; called by its handler."""
        if self.time_up is None or not self.time_up.takes_sigterm():
            return False
        self.signals(signal.SIGTERM)
        return True

    def begin_to_end(self, word: str) -> None:
        """The ranks have ended, ``word`` says how: no time is left to a run that was cancelled."""
        self.way_out.begin()
        if self.time_up is not None:
            self.time_up.outcome = word
            self.time_up.close()
        self.way_out.hurried |= word == "cancelled"

    def hand_on(self, number: int) -> None:
        """Send a signal that was meant for the ranks to them; act on one that tells of the job's end."""
        if self.time_up is not None and number in self.time_up.signals:
            self.time_up.hear(number)
            return
        if self.local_workers is not None:
            self.local_workers.hand_on(number)
        else:
            log.warning("%s came before any rank ran, and was handed on to none", signal.Signals(number).name)


def run(
    config: RunConfig,
    command: tuple[str, ...],
    observe: Callable[[str, JoinReply | Notice, str], None] | None = None,
    *,
    config_file: str = "",
    is_lost: Callable[[], bool] = lambda: False,
    came: "queue.SimpleQueue[int]",
) -> int:
    """Run ``command`` under supervision until it ends.

    Args:
        config: The effective configuration.
        command: Script and arguments.
        observe: Called with each formed round ("go"), the controller's stop ("stop") and what is only warned of
            ("notice"), and the options by which verbs find this run, for the terminal.
        config_file: Where the configuration was read; a controller of this run's own reads its section there.
        is_lost: As in `Lasting`.
        came: SIGUSR1 and SIGUSR2 that have come since the program's begin, and will.

    Returns:
        The exit code: 0, 1 when the job failed, or 128 + signal; after a requeue, what Slurm requeues.

    Raises:
        MegascaleError: with one sentence, when nothing could be started.
    """
    machine = look_at_machine()
    if stands_by(config, machine.step):
        return stand_by(os.environ)
    config = with_whole_paths(config, machine.cwd)
    plan = make_plan(config, command, machine, "OMP_NUM_THREADS" in os.environ)
    check_program(plan)
    if sentence := own_world(os.environ, plan.max_nodes):
        log.warning("%s", sentence)
    find_token(config.token_file, os.environ)
    for sentence in (*plan.meeting.said, *([limits(command, _begin_of)] if config.wrap else [])):
        log.info("%s", sentence)
    if plan.master[1] and (plan.max_nodes == 1 or plan.meeting.serve) and not is_free(plan.master[1]):
        raise UsageError(f"--master-port {plan.master[1]} is taken on this machine: give another one")
    if machine.step is not None and plan.nproc > 1 and machine.step.tasks_here > 1 and not machine.step.have_own_gpus:
        take_all_cores(os.environ, machine.step.tasks_here)
    way_out = WayOut()
    time_up = _time_up(config, machine.step)
    lasting = Lasting(machine.step, config_file, time_up, is_lost, came)
    code = _live(config, plan, way_out, lasting, observe or (lambda _kind, _reply, _where: None))
    return time_up.end(code) if time_up is not None else code


def _begin_of(script: str) -> str:
    """Return the begin of a script, "" where it can't be read."""
    try:
        with opened(Path(script), follow=True) as handle:
            return os.read(handle, _SCRIPT_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _time_up(config: RunConfig, step: Step | None) -> TimeUp | Eviction | None:
    """Return what follows a signal of Slurm's, where the job may be requeued, or the SIGTERM of a pod."""
    if config.requeues and step is None:
        log.warning("--requeues %d has no effect: srun has not started this run", config.requeues)
    if config.requeues and step is not None:
        return TimeUp(step, config.requeues, os.environ)
    return Eviction(config.eviction_grace_s) if config.eviction_grace_s else None


def _live(
    config: RunConfig,
    plan: Plan,
    way_out: WayOut,
    lasting: Lasting,
    observe: Callable[[str, JoinReply | Notice, str], None],
) -> int:
    with signals_interrupt(), ExitStack() as stack:
        life = Life(stack, Console(hurried=way_out.is_hurried), way_out, lasting)
        stack.callback(life.console.stop)  # the last of all: what the others print on the way out is shown
        life.signals = stack.enter_context(signals_handed_on(life.hand_on, life.came))
        try:
            return _run(config, plan, life, observe)
        except (Interrupted, KeyboardInterrupt) as error:
            way_out.begin()
            way_out.hurried = True
            return 128 + (error.number if isinstance(error, Interrupted) else signal.SIGINT)


def _run(config: RunConfig, plan: Plan, life: Life, observe: Callable[[str, JoinReply | Notice, str], None]) -> int:
    stack = life.stack
    run_dir = prepare_run_folder(Path(plan.run_dir), is_named=bool(config.run_dir))
    box_root = prepare_boxes(config.box_root, plan.nproc)
    plan = _claim_node_name(config, plan, box_root, stack)
    umask = _prepare_folders(config, plan, stack)
    box_dir = box_root / plan.job
    _clean_up_before(box_root, plan)
    if config.preflight != "none":
        check_node(config.preflight, plan.node, run_dir, [plan.run_dir, *plan.checkpoint_dirs])
    run_id = uuid.uuid4().hex
    stack.callback(lambda: leave_nothing(run_id, box_dir, plan.node, life))
    env = dict(os.environ)
    profiler = Profiler(config.nccl_profiler, env, has_device=has_device())
    stack.callback(profiler.stop)
    controller = _find_controller(config, plan, life, run_dir, env)
    config = msgspec.structs.replace(config, token_file=controller.token_file)
    agent = Attendance(
        lambda: companions.start_agent(controller.url, plan.node, box_root, run_dir, env, config.token_file),
        lambda: find_agents(box_root, plan.node),
        controller.url,
        alone=controller.own is not None and plan.max_nodes == 1,
    )
    stack.callback(agent.stop)
    pool = _warm_pool(config, plan, run_id, umask)
    if pool is not None:
        stack.callback(pool.stop)
    local_workers = life.local_workers = LocalWorkers(
        _place(config, plan, run_id, box_dir, umask),
        console=None if config.quiet else life.console,
        warm=pool,
        python=plan.program,
        companions=lambda: (agent.pid, controller.own.pid if controller.own else 0),
        profiler=profiler.variables,
    )
    stack.callback(local_workers.look_away)
    local_workers.write_round_file()
    say_where(config, plan, controller.url, is_own=controller.own is not None)
    code = _launch(config, plan, controller.url, local_workers, life, observe, is_own=controller.own is not None)
    life.child_grace_s = 0.0 if code else config.child_grace_s
    return code


def _claim_node_name(config: RunConfig, plan: Plan, box_root: Path, stack: ExitStack) -> Plan:
    """Hold this node's name until the run ends; return the plan under the name that was free."""
    held = leftovers.hold_place(box_root, plan.job, plan.node, others=plan.max_nodes > 1 and not config.node_name)
    stack.callback(held.release)
    return as_node(plan, held.node)


def _prepare_folders(config: RunConfig, plan: Plan, stack: ExitStack) -> int:
    """Make the folders of logs and checkpoints, and narrow our umask until the run ends; return the user's own."""
    for named in plan.checkpoint_dirs if config.checkpoint_dir else ():  # as open as the user's umask makes it
        prepare_folder(Path(named), "folder", "--checkpoint-dir")
    umask, widen_umask = narrow_umask()
    stack.callback(widen_umask)
    prepare_folder(Path(plan.log_dir), "folder", "--log-dir")
    for folder in plan.checkpoint_dirs:
        prepare_folder(Path(folder), "folder", "--checkpoint-dir")
    return umask


def _clean_up_before(box_root: Path, plan: Plan) -> None:
    """Remove what earlier runs on this node have left; log what was found of this job."""
    leftovers.sweep(box_root)
    found = leftovers.clean_up(box_root / plan.job, plan.node, plan.job)
    if found:
        log.warning("%s", found)


def _find_controller(config: RunConfig, plan: Plan, life: Life, run_dir: Path, env: dict[str, str]) -> Found:
    """Find the controller that was named, or start one that ends with the run and takes its files along."""
    read_too = {environment.CONFIG: str(Path(life.config_file).resolve())} if life.config_file else {}
    found = find_controller(config, plan.meeting, run_dir, {**env, **read_too})
    if found.own is not None:
        for name in (CONTROLLER_FILE,) if config.token_file else (CONTROLLER_FILE, TOKEN_FILE):
            life.stack.callback((run_dir / name).unlink, missing_ok=True)
        life.stack.callback(found.own.stop)
        if plan.max_nodes > 1:
            life.stack.callback(time.sleep, _FAREWELL_S)
    return found


def _place(config: RunConfig, plan: Plan, run_id: str, box_dir: Path, umask: int) -> Place:
    """Return where this node's ranks live and write."""
    return Place(
        job=plan.job,
        node=plan.node,
        run_id=run_id,
        nproc=plan.nproc,
        box_dir=str(box_dir),
        run_dir=plan.run_dir,
        checkpoint_dir=plan.checkpoint_dir,
        stop_grace_s=config.stop_grace_s,
        wrap=config.wrap,
        role=config.role,
        max_restarts=config.max_restarts,
        prefix_template=config.log_line_prefix_template,
        prefix_lines=plan.nproc > 1 or plan.max_nodes > 1,
        shown_ranks=plan.shown_ranks,
        has_gpus=plan.has_gpus,
        fixed_port=plan.master[1] > 0,
        profile_every=config.profile_every,
        umask=umask,
    )


def _launch(
    config: RunConfig,
    plan: Plan,
    url: str,
    local_workers: LocalWorkers,
    life: Life,
    observe: Callable[[str, JoinReply | Notice, str], None],
    *,
    is_own: bool,
) -> int:
    with GarbageKept():  # torch: 0.2 of 1.6 s of CPU time, with companions beside it that need the cores too
        from megascale_ops.runner import elastic
    from megascale_ops.link import BlockingLink
    from megascale_ops.runner import membership
    from megascale_ops.runner.rank_factory import install_factory
    from megascale_ops.runner.rendezvous import MegascaleRendezvous
    from megascale_ops.runner.summary import say_summary

    install_factory(local_workers)
    addr = config.local_addr or membership.local_address(url)
    terms = membership.Terms(plan.min_nodes, plan.max_nodes, addr, _policy(config), plan.meeting.node_rank)
    token = find_token(config.token_file, os.environ)
    link = BlockingLink(url, token)
    where = whereabouts_of(config, plan, url, is_own=is_own)

    def keep_and_observe(kind: str, reply: JoinReply | Notice) -> None:
        if isinstance(reply, JoinReply):
            keep_verdict(Path(plan.run_dir), reply)
        if gone := keep_newest(Path(plan.run_dir, "incidents"), config.keep_incidents):
            log.info("the evidence of the %d oldest incidents was removed (keep_incidents)", gone)
        observe(kind, reply, where)

    handler = MegascaleRendezvous(
        link, local_workers, terms, observe=keep_and_observe, master=plan.master, check=partial(_recheck, plan)
    )
    outcome, time_up = None, life.time_up
    began_mono_s = time.monotonic()
    if time_up is not None:
        time_up.watch(plan.job, link, handler.leave)
    try:
        outcome = elastic.launch(
            plan,
            handler,
            monitor_interval_s=config.monitor_interval_s,
            role=config.role,
            takes_sigterm=life.takes_sigterm if time_up is not None else None,
        )
    finally:
        word = outcome.word if outcome else "cancelled"
        life.begin_to_end(word)
        _end_part(handler, word, _why_left(outcome), is_lost=life.is_lost())
        link.close()
        why = outcome.reason if outcome is not None and _is_failure(outcome) else ""
        say_summary(url, token, plan.job, time.monotonic() - began_mono_s, plan.run_dir, where, why)
    if _is_failure(outcome):
        comment(life.step, outcome.reason)
    return outcome.code


def _is_failure(outcome: "Outcome") -> bool:
    """Return whether the job ended otherwise than its user wanted."""
    return outcome.word in ("failed", "stopped") and outcome.code != 0


def _policy(config: RunConfig) -> JobPolicy:
    """Return the job's policy, with the limit of torchrun's ``--max-restarts`` where it was given."""
    if config.max_restarts < 0:
        return config.policy
    return msgspec.structs.replace(config.policy, max_restarts=config.max_restarts)


def _why_left(outcome: "Outcome | None") -> str:
    """Return what other nodes are told of this runner's end.

    By which signal it was ended that no person at the terminal sends, or why it can't go on; "" where neither was.
    """
    if outcome is None or outcome.code == 128 + signal.SIGINT:
        return ""
    return outcome.reason if outcome.word in ("cancelled", "failed") else ""


def _end_part(handler: "MegascaleRendezvous", word: str, why: str, *, is_lost: bool) -> None:
    """Leave the job; a node that is lost only ends, for to leave would end the job on the others."""
    if is_lost:
        handler.set_closed()
    else:
        handler.leave(word, why)


def _recheck(plan: Plan, checks: tuple[str, ...]) -> NodeCheck:
    """Measure this node between two rounds."""
    return recheck_node(plan.node, Path(plan.run_dir), [plan.run_dir, plan.checkpoint_dir], checks)


def say_where(config: RunConfig, plan: Plan, url: str, *, is_own: bool) -> None:
    """Log what is started and how to look at it; never the token, since this line ends up in logs."""
    where = whereabouts_of(config, plan, url, is_own=is_own)
    ranks = f"{plan.nproc} {'rank' if plan.nproc == 1 else 'ranks'}"
    log.info(
        "job %s: %s on node %s, run folder %s; `megascale-ops status %s` shows it, as do `top` and `page`",
        plan.job,
        f"the ranks of {Path(plan.program).name}" if config.wrap else ranks,
        plan.node,
        plan.run_dir,
        where,
    )


def whereabouts_of(config: RunConfig, plan: Plan, url: str, *, is_own: bool) -> str:
    """Return the options by which the other verbs find this run."""
    if is_own or config.hosts:  # with --hosts: on the machine that has started all
        return f"--run-dir {shlex.quote(plan.run_dir)}" if config.run_dir else f"--job {shlex.quote(plan.job)}"
    token = f" --token-file {shlex.quote(config.token_file)}" if config.token_file else ""
    return f"--controller {url} --job {shlex.quote(plan.job)}{token}"


def keep_verdict(run_dir: Path, reply: JoinReply) -> None:
    """Write what ended the round before into the incident's folder, beside the evidence that the agent puts there.

    Nodes that share the folder all write the same.
    """
    if reply.verdict is None or not reply.incident:
        return
    folder = run_dir / "incidents" / reply.incident
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "verdict.json", msgspec.json.format(msgspec.json.encode(reply.verdict), indent=2))
    except OSError as error:
        log.warning("the verdict on %s could not be kept in %s (%s)", reply.incident, folder, error.strerror or error)


def _warm_pool(config: RunConfig, plan: Plan, run_id: str, umask: int) -> WarmPool | None:
    if not (config.warm or config.warm_gpu):
        return None
    env = {**os.environ, environment.RUN_ID: run_id}
    if plan.threads:
        env["OMP_NUM_THREADS"] = str(plan.threads)
    # Our plugin, or another one, has to find the rank whose communicators it hears of: no spare loads it.
    with_nccl = config.nccl_profiler == "off" and env.get(NCCL_VARIABLE, "none") == "none"
    return WarmPool(plan.nproc, env, config.warm_delay_s, umask, on_gpu=config.warm_gpu, with_nccl=with_nccl)


def leave_nothing(run_id: str, box_dir: Path, node: str, life: Life) -> None:
    """End whatever still carries our mark, and remove this node's black boxes."""
    leftovers.end_children(lambda: marked_processes(run_id), life.child_grace_s, life.way_out.is_hurried)
    leftovers.remove_boxes(box_dir, leftovers.read_round_file(box_dir / f"{node}.round.json"), node)
