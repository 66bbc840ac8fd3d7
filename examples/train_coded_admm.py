# SPDX-License-Identifier: Apache-2.0
"""Least squares that agents on a ring agree on, each with edge workers of its own, by coded stochastic ADMM.

No rank sees all data. Each agent has a model and hands a token on; at its turn its edge workers compute the gradient of
a mini-batch by a gradient code, so that the slowest need not be waited for (`megascale_ops.coded.admm` has the source).
Ranks are divided into agents of 1 + ``--edges`` ranks each: with the defaults 10 agents of 3 edge workers, 40 ranks,
which mostly wait: one agent at a time has the token. 50,400 samples of 3 numbers, as generated data of such papers has.

    megascale-ops run --nproc-per-node 40 -- examples/train_coded_admm.py --slow-rank 2 --slow-s 0.1
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a rank each core; before numpy is imported

import numpy as np
import numpy.typing as npt

from megascale_ops.coded import Agent, GradientCode, Master, Worker
from megascale_ops.coded.code import KINDS
from megascale_ops.coded.messages import meeting_name
from megascale_ops.coded.ring import Ring
from megascale_ops.coded.tally import Tally
from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.recorder import recorder

Array = npt.NDArray[np.float64]


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=int, default=3, help="edge workers of an agent")
    parser.add_argument("--code", choices=(*KINDS, "none"), default="cyclic", help="none: every answer is needed")
    parser.add_argument("--stragglers", type=int, default=1, help="edge workers of an agent that a turn may do without")
    parser.add_argument("--samples", type=int, default=50_400)
    parser.add_argument("--features", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=100, help="how often the token goes round")
    parser.add_argument("--batch", type=int, default=0, help="samples of a partition that a turn looks at; 0: all")
    parser.add_argument("--rho", type=float, default=1.0)
    parser.add_argument("--c-tau", type=float, default=1.0)
    parser.add_argument("--c-gamma", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grace-s", type=float, default=0.0, help="how long to wait for the rest once the sum follows")
    parser.add_argument("--slow-rank", type=int, nargs="*", default=[], help="these edge workers are slow")
    parser.add_argument("--slow-s", type=float, default=0.1, help="by so much, each time")
    parser.add_argument("--out", type=Path, help="agent 0 writes the token into this file (.npy)")
    return parser.parse_args()


def samples_of(options: argparse.Namespace, agents: int, agent: int, partition: int) -> tuple[Array, Array]:
    """Return one partition of an agent's data: (count, features) and (count,)."""
    count = max(1, options.samples // (agents * options.edges))
    truth = np.random.default_rng([options.seed, 1 << 20]).standard_normal(options.features)
    chance = np.random.default_rng([options.seed, agent, partition])
    samples = chance.standard_normal((count, options.features))
    return samples, samples @ truth + 0.1 * chance.standard_normal(count)


def best(options: argparse.Namespace, agents: int) -> Array:
    """Return what minimises the sum of all costs: what the agents should agree on."""
    square, right = np.zeros((options.features, options.features)), np.zeros(options.features)
    for agent in range(agents):
        for partition in range(options.edges):
            samples, labels = samples_of(options, agents, agent, partition)
            square += samples.T @ samples
            right += samples.T @ labels
    return np.linalg.solve(square, right)


def lead(options: argparse.Namespace, code: GradientCode, number: int, agents: int) -> None:
    """Be an agent: wait for the token, let the edge workers compute, hand it on."""
    agent = Agent(
        options.features,
        agents,
        rho=options.rho,
        c_tau=options.c_tau,
        c_gamma=options.c_gamma,
        decays=bool(options.batch),
    )
    wanted = best(options, agents) if number == 0 else None
    tally = Tally(options.code, code.workers, code.stragglers, code.load)
    ring = Ring(number, agents, options.features)
    token = np.zeros(options.features)
    with Master(code, options.features, name=meeting_name(part=f"agent-{number}")) as master:
        for cycle in range(options.cycles):
            if (number or cycle) and agents > 1:
                began_s = time.monotonic()
                _, token = ring.receive()
                recorder.waited(time.monotonic() - began_s)
            if wanted is not None and cycle % 10 == 0:
                print(f"cycle {cycle} error {_error(token, wanted):.3e}", flush=True)
            master.ask(cycle, agent.x)
            found = master.gather(grace_s=options.grace_s)
            recorder.waited(found.took_s)
            count = options.batch or max(1, options.samples // (agents * options.edges))
            token = agent.turn(cycle * agents + number + 1, token, found.combined.vector / (count * options.edges))
            ring.send(cycle * agents + number + 1, token)
            for line in tally.note(cycle, found):
                print(f"agent {number}: {line}", flush=True)
            recorder.step(cycle)
        if number == 0 and agents > 1:  # the last agent's turn ends the last cycle
            _, token = ring.receive()
    ring.close()
    if wanted is not None:
        print(f"done: {options.cycles} cycles, error {_error(token, wanted):.3e}", flush=True)
        if options.out:
            np.save(options.out, token)
    late = {worker: one.late for worker, one in tally.record.by_worker.items() if one.late}
    print(f"agent {number}: late by edge worker: {late or 'none'}", flush=True)


def _error(token: Array, wanted: Array) -> float:
    return float(np.linalg.norm(token - wanted) / np.linalg.norm(wanted))


def work(options: argparse.Namespace, code: GradientCode, number: int, agents: int, edge: int) -> None:
    """Be an edge worker of an agent."""
    data = {one: samples_of(options, agents, number, one) for one in code.partitions_of(edge)}
    name = meeting_name(part=f"agent-{number}")
    with Worker(code, edge, options.features, name=name, waited=recorder.waited) as worker:
        for task in worker.tasks():
            if number * (1 + options.edges) + 1 + edge in options.slow_rank:
                time.sleep(options.slow_s)

            def gradient_of(partition: int, x: Array = task.vector, turn: int = task.step) -> Array:
                samples, labels = data[partition]
                if options.batch:  # the mini-batches of a partition in turn, the same on all who hold it
                    where = (turn * options.batch + np.arange(options.batch)) % len(samples)
                    samples, labels = samples[where], labels[where]
                found: Array = samples.T @ (samples @ x - labels)
                return found

            worker.answer(task.step, gradient_of)
            recorder.step(task.step)


def main() -> None:
    """Train as the rank that this is."""
    options = read_arguments()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        agents, left = divmod(ranks, 1 + options.edges)
        if options.edges < 1 or left or not agents:
            raise UsageError(
                f"{ranks} ranks are no agents with {options.edges} edge workers each: start a multiple of "
                f"{1 + max(1, options.edges)}"
            )
        kind, stragglers = ("clustered", 0) if options.code == "none" else (options.code, options.stragglers)
        code = GradientCode(options.edges, stragglers, kind)
        number, member = divmod(rank, 1 + options.edges)
        if member == 0:
            lead(options, code, number, agents)
        else:
            work(options, code, number, agents, member - 1)
    except MegascaleError as error:
        sys.exit(f"rank {rank}: {error}")


if __name__ == "__main__":
    main()
