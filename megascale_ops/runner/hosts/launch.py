# SPDX-License-Identifier: Apache-2.0
"""``run --hosts FILE``: look at every host, bring the controller up here, start a run on each by ssh, wait for all.

Nothing is started anywhere before every host has been looked at, so a mistake costs seconds and one sentence a host.
Each host's run gets the whole configuration, the same folder and the controller's token by its stdin; nothing has to be
copied there by hand, and the token stands in no command line.
"""

import importlib.metadata
import logging
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.link import BlockingLink
from megascale_ops.link.token_files import find_token
from megascale_ops.link.whereabouts import CONTROLLER_FILE, TOKEN_FILE, Whereabouts, write_whereabouts
from megascale_ops.runner.config import BY_STEP, RunConfig
from megascale_ops.runner.hosts import ssh
from megascale_ops.runner.hosts.far import Far, Ways, end, wait
from megascale_ops.runner.hosts.handed_over import Handed
from megascale_ops.runner.hosts.hostfile import Host, choose, read_hosts
from megascale_ops.runner.meeting import is_loopback
from megascale_ops.runner.plan import default_job, parse_nnodes, with_whole_paths
from megascale_ops.runner.preflight import look_at_machine
from megascale_ops.runner.run_folder import narrow_umask, prepare_run_folder
from megascale_ops.runner.services import companions
from megascale_ops.schema.events import OVER
from megascale_ops.schema.identity import check_name

log = logging.getLogger(__name__)

# 60 s for a look: 10 of them are ssh's for the connection, the rest a busy login.
_LOOK_S = 60.0
# 64 at once: each takes a process here.
_AT_ONCE = 64
# 2 s: the controller is a process of this machine, or one that all hosts reach.
_ANSWER_S = 2.0
# What a script may be told by its environment, beside what is ours: other variables belong to the machine.
_HANDED_ON = ("MEGASCALE_", "NCCL_", "GLOO_", "UCX_", "TORCH_", "OMP_NUM_THREADS", "PYTHONPATH")
_STAYS_HERE = ("MEGASCALE_TOKEN", "MEGASCALE_CONFIG", "MEGASCALE_RUN_")


def over_hosts(config: RunConfig, command: tuple[str, ...], environ: Mapping[str, str]) -> int:
    """Run ``command`` on the hosts of ``config.hosts`` until it ends; return the exit code, as ``runner.main.run``.

    Raises:
        MegascaleError: with one sentence for each host that can't take part, when nothing was started.
    """
    machine = look_at_machine()
    config = with_whole_paths(config, machine.cwd)
    if not command:
        raise UsageError("nothing to run: give the training script after `--`, as in `run --hosts FILE -- train.py`")
    hosts, nnodes = _hosts(config)
    line = _words(config.ssh)
    python = config.remote_python or machine.python
    before = {name: environ[name] for name in ("PYTHONPATH",) if environ.get(name)}
    there = _look(line, hosts, python, before)
    alone = not config.controller
    job = check_name("job", config.job or default_job(command, alone=alone, stamp=machine.stamp))
    run_dir = Path(config.run_dir or f"{machine.state_root}/{job}")
    config = msgspec.structs.replace(config, job=job, run_dir=str(run_dir), nnodes=nnodes)
    log.info(
        "job %s on %d hosts by ssh: %s; a host whose connection ends is lost to the job until ssh reaches it again "
        "(with more hosts than --nnodes a spare takes its place); when this process ends, all end",
        *(job, len(hosts), ", ".join(host.target for host in hosts)),
    )
    with ExitStack() as stack:
        _umask, widen = narrow_umask()
        stack.callback(widen)
        token = str(find_token(config.token_file, environ) or "")
        port, controller = 0, config.controller
        if not config.controller:
            controller, token = _controller(
                stack, prepare_run_folder(run_dir, is_named=bool(config.run_dir)), environ, there
            )
            port = int(controller.rpartition(":")[2])
        env = {name: value for name, value in environ.items() if _is_handed_on(name)}

        def start(host: Host, told: ssh.There) -> "subprocess.Popen[bytes]":
            url = config.controller or f"http://{_bracketed(told.seen_from)}:{port}"
            own = _own(config, host, hosts.index(host), url)
            return _start(line, host, python, before, Handed(own, command, machine.cwd, env, token))

        ways = Ways(start, lambda host: _begin_look(line, host, python, before), _why_not(python), _LOOK_S)
        far: list[Far] = []
        stack.callback(end, far)
        for host in hosts:
            far.append(Far(host, ways, there[host]))  # noqa: PERF401  those that were started are ended, whatever comes
        return wait(far, lambda: _is_over(controller, token, job), config.policy.join_timeout_s)


def _words(command: str) -> list[str]:
    """Return the user's ssh as words.

    Raises:
        UsageError: its quotes do not match, or it has none.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--ssh {command!r} can't be read: {str(error).lower()}") from None
    if not words:
        raise UsageError("--ssh is empty: name the program, as in --ssh 'ssh -p 2222'")
    return words


def _hosts(config: RunConfig) -> tuple[tuple[Host, ...], str]:
    """Return the hosts, and how many nodes they are as ``--nnodes`` has it."""
    try:
        text = Path(config.hosts).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"the hosts can't be read from {config.hosts}: {why}") from None
    hosts = read_hosts(text, config.hosts)
    most = 0 if config.nnodes == BY_STEP else parse_nnodes(config.nnodes)[1]
    nproc = "" if config.nproc_per_node == BY_STEP else config.nproc_per_node
    return choose(hosts, config.hosts, most_nodes=most, nproc=nproc), str(len(hosts)) if not most else config.nnodes


def _own(config: RunConfig, host: Host, place: int, url: str) -> RunConfig:
    """Return one host's configuration."""
    nproc = str(host.slots) if host.slots else config.nproc_per_node
    return msgspec.structs.replace(
        config,
        controller=url,
        node_name=check_name("node", host.name),
        node_rank=place,
        nproc_per_node="1" if nproc == BY_STEP else nproc,
        rdzv_endpoint="",
        rdzv_backend="",
    )


def _is_handed_on(name: str) -> bool:
    return name.startswith(_HANDED_ON) and not name.startswith(_STAYS_HERE)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _look(line: Sequence[str], hosts: Sequence[Host], python: str, env: Mapping[str, str]) -> dict[Host, ssh.There]:
    """Ask every host who we are there; return their answers.

    Raises:
        UsageError: a sentence for each host that can't take part.
    """
    version = importlib.metadata.version("megascale-ops")

    def look(host: Host) -> tuple[ssh.There, str]:
        try:
            done = subprocess.run(
                ssh.look(line, host, python, env),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_LOOK_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ssh.There("", ""), f"line {host.line}: {host.target}: no answer within {_LOOK_S:g} s"
        except OSError as error:
            raise UsageError(f"{line[0]} can't be started ({error.strerror}): name ssh with --ssh") from None
        why = ssh.why_not(host, python, version, done.returncode, done.stdout, done.stderr)
        return ssh.read_look(done.stdout), why

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(look, hosts))
    wrong = [why for _, why in answers if why]
    if wrong:
        raise UsageError("nothing was started: " + "\n".join(wrong))
    return {host: told for host, (told, _) in zip(hosts, answers, strict=True)}


def _begin_look(line: Sequence[str], host: Host, python: str, env: Mapping[str, str]) -> "subprocess.Popen[str]":
    """Ask a host that was lost who we are there; what it tells is a few lines, for which pipes have room."""
    return subprocess.Popen(
        ssh.look(line, host, python, env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # a Ctrl-C is ours
    )


def _why_not(python: str) -> Callable[[Host, int, str, str], str]:
    version = importlib.metadata.version("megascale-ops")
    return lambda host, code, output, errors: ssh.why_not(host, python, version, code, output, errors)


def _is_over(url: str, token: str, job: str) -> bool | None:
    """Return whether the job is over, by its controller; None where that does not tell."""
    try:
        with BlockingLink(url, token or None, timeout_s=_ANSWER_S) as link:
            found = next((one for one in link.status(job, brief=True).jobs if one.job == job), None)
    except MegascaleError as error:
        log.debug("whether the job is over is not known: %s", error)
        return None
    return found is not None and found.state in OVER


def _listen(seen: set[str]) -> str:
    """Return where to listen, by the addresses at which hosts see this machine: on loopback where all do."""
    is_six = any(":" in one for one in seen)
    if all(map(is_loopback, seen)) and (len(seen) == 1 or not is_six):
        return "[::1]" if is_six else "127.0.0.1"
    return "[::]" if is_six else "0.0.0.0"  # noqa: S104  other hosts must reach it


def _controller(
    stack: ExitStack, run_dir: Path, environ: Mapping[str, str], there: Mapping[Host, ssh.There]
) -> tuple[str, str]:
    """Bring the controller up where all hosts reach it; return its address for this machine, and its token."""
    listen = _listen({one.seen_from for one in there.values()})
    companion, found = companions.start_controller(run_dir, dict(environ), f"{listen}:0")
    stack.callback((run_dir / CONTROLLER_FILE).unlink, missing_ok=True)
    stack.callback((run_dir / TOKEN_FILE).unlink, missing_ok=True)
    stack.callback(companion.stop)
    port = int(found.url.rpartition(":")[2])
    here = "[::1]" if listen.startswith("[") else "127.0.0.1"
    url = f"http://{here}:{port}"
    write_whereabouts(run_dir, Whereabouts(url, companion.pid, os.getpid(), found.token_file))
    return url, str(find_token(found.token_file, {}) or "")


def _start(
    line: Sequence[str], host: Host, python: str, env: Mapping[str, str], handed: Handed
) -> "subprocess.Popen[bytes]":
    """Start a host's run."""
    arguments = ("-m", "megascale_ops.cli.main", "run", "--handed-over")
    process = subprocess.Popen(
        ssh.command(line, host, python, env, arguments),
        stdin=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C is ours: ssh would end before the ranks have
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, and `_wait` says so
        process.stdin.write(msgspec.json.encode(handed) + b"\n")
        process.stdin.flush()
    return process
