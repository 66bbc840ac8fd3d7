# SPDX-License-Identifier: Apache-2.0
"""Answer, on every call of an operator, which configuration it runs with.

A table per workspace: opened at the first question, when rank 0 hands out what its cache file knows and which GPU it
stands on; later questions are one look-up in a dictionary.
"""

import json
import math
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

from megascale_kernels.autotune import store
from megascale_kernels.autotune.contest import MOST_WAYS
from megascale_kernels.autotune.handout import from_rank_zero
from megascale_kernels.autotune.space import candidates, planned, taken_apart
from megascale_kernels.planning.config import Config, read_config
from megascale_kernels.planning.cost_model import Machine, blocks, machine_of, predict, predict_serial

if TYPE_CHECKING:
    from megascale_kernels.memory.workspace import Workspace

MOST_REMEMBERED = 65536  # shapes; a server whose M takes every value must not grow for ever
# The model is good to a tenth; where it promises less than this over serial, the serial path is the safe choice.
PROMISE = 1.02
# What a short gemm_rs in wide tiles loses among more than two ranks that the model does not see: 38 and 40 us at M 512
# and 1024 on 4 x H200, 2 to 12 us from M 2048. In narrow ones it was mostly less than 20 us below M 2048, and with a
# doubt of SMALL_DOUBT_S none of 22 was chosen that serial was faster than (random_gemm_rs_4gpu_h200_467203.csv,
# beside_gemm_rs_4gpu_h200.txt). Between two ranks the model was never wrong by more than SMALL_DOUBT_S.
DOUBT_S = 40e-6
DOUBT_ROWS = 2048
SMALL_DOUBT_S = 10e-6
NARROW = 128  # columns of a narrow tile
# With fewer rows on a rank communication is latency alone: at M 512 on four, ag_gemm reached 0.77 to 1.02 of serial and
# gemm_rs 0.94 to 1.05. With 256 and more both gained on nearly every shape, on two ranks (M 512) as on four (M 1024).
FEWEST_SHARD_ROWS = 256
# In fewer waves of 128 x 256 tiles than this, 128 x 128 tiles waste less of the last one and wait less for the last
# rows: measured on 36 shapes of ag_gemm.
FEW_WAVES = 3.7
# In gemm_rs it is where waves times K are less than this, a product of some 90 us: the last tile's end, with the peers'
# partials to add, is hidden by nothing. On 60 shapes, 2 x H200, narrow tiles took 0.76 to 1.04 of the time of wide ones
# there, and 0.99 to 1.21 everywhere else; on 56, 4 x H200, 0.70 to 1.07 there (0.88 in the geometric mean of 28), and
# 0.95 to 1.30 elsewhere (random_gemm_rs_4gpu_h200_467203.csv, beside_gemm_rs_4gpu_h200.txt).
SHORT_SCATTER = 9000
# ag_gemm follows a timetable. It overrates 128 x 128 tiles a little, so they are taken where it promises
# this much. On 60 shapes, 2 x H200, that was 1.2 % slower than the best of three (either tile by timetable, and
# FEW_WAVES) at most, 0.1 % on average, and 1.04 times as fast as by FEW_WAVES. Among four and eight it was rehearsed
# on one GPU (ag_gemm_rehearsed_1gpu.txt): with 256 rows or more on a rank 1.4 and 3.5 % slower than FEW_WAVES at most,
# and 1.02 and 1.01 times as fast on average.
WORTH_NARROW = 1.03
# Among more than two ranks short gathers take longer than foretold, 12 us in rehearsal where the foretold is 65.
PLANNED_DOUBT_S = 15e-6
# A contest (`contest.py`) is between all ways that are predicted to take less than this times the best one's time: the
# model errs by 12 and 10 % (our kernels and the serial path, root mean squares of 624 shapes at random on two and four
# H200), so that the ratio of two ways errs by 16 %, and this is three times that: a contest costs 69 calls at most, a
# wrong choice all that follow. None of the 130 shapes at which the serial path was left out by such a bound was behind
# it.
LIKELY = 1.5
# With fewer rows latencies decide, which the model knows least, and all ways are tried.
FEW_ROWS = 1024
# Fewer rows on a rank: neither tile is filled by half, and a launch is latency alone.
FEWEST_CONTESTED_ROWS = 64


class Question(NamedTuple):
    """What a choice depends on."""

    operator: str
    m: int
    n: int
    k: int


class Table:
    """What one workspace's ranks have agreed on.

    Args:
        machine: the GPU of rank 0.
        world_size: ranks.
        environment: the name of the environment, for writing.
        tuned: what was measured, by `store.entry_key`.
    """

    def __init__(self, machine: Machine, world_size: int, environment: str, tuned: dict[str, Config | None]) -> None:
        self.machine = machine
        self.world_size = world_size
        self.environment = environment
        self.tuned = tuned
        self.answers: dict[tuple[str, int, int, int], Config | None] = {}

    def decide(self, question: Question) -> Config | None:
        """Answer a question for the first time and remember the answer."""
        key = store.entry_key(*question)
        answer = self.tuned[key] if key in self.tuned else default(*question, self.world_size, self.machine)
        if len(self.answers) >= MOST_REMEMBERED:
            self.answers.clear()
        self.answers[question] = answer
        return answer

    def learn(self, question: Question, config: Config | None) -> None:
        """Take over what a tuning has found; every rank must."""
        self.tuned[store.entry_key(*question)] = config
        self.answers.clear()


_tables: "WeakKeyDictionary[Workspace, Table]" = WeakKeyDictionary()


def default(operator: str, m: int, n: int, k: int, world_size: int, machine: Machine) -> Config | None:
    """The answer where nothing was tuned: what measured best on shapes like it, or None for the serial path."""
    if world_size == 1 or not machine.known or (operator != "gemm_ar" and m < FEWEST_SHARD_ROWS * world_size):
        return None
    best = likely(operator, m, n, k, world_size, machine)
    ours = predict(operator, m, n, k, world_size, best, machine)
    serial = predict_serial(operator, m, n, k, world_size, machine)
    return best if serial.total_s >= PROMISE * (ours.total_s + doubt(operator, m, world_size, best)) else None


def contenders(operator: str, m: int, n: int, k: int, workspace: "Workspace") -> list[Config | None]:
    """The ways that may be best for a shape, the one that `choose` gives first; only that where it is sure.

    Args:
        operator: "ag_gemm", "gemm_rs" or "gemm_ar".
        m: rows of the whole input.
        n: columns of the weight on one rank.
        k: rows of the weight on one rank.
        workspace: its group, element type and device decide too.
    """
    chosen = choose(operator, m, n, k, workspace)
    table = open_table(workspace)
    known = store.entry_key(operator, m, n, k) in table.tuned or not table.machine.known
    if known or operator == "gemm_ar" or m < FEWEST_CONTESTED_ROWS * workspace.world_size:
        return [chosen]
    world_size, machine = workspace.world_size, table.machine
    ways: dict[Config | None, float] = {
        config: predict(operator, m, n, k, world_size, config, machine).total_s
        for config in (*tiles(operator), *taken_apart(operator, world_size))
    }
    ways[None] = predict_serial(operator, m, n, k, world_size, machine).total_s
    bound_s = LIKELY * min(ways.values()) if m >= FEW_ROWS else math.inf
    # sorted() is stable: equals stay in the order written above, so every rank makes the same list.
    likely_ways = sorted((way for way in ways if ways[way] < bound_s), key=ways.__getitem__)
    return list(dict.fromkeys([chosen, *likely_ways]))[:MOST_WAYS]


def tiles(operator: str) -> list[Config]:
    """Our kernel in wide and in narrow tiles."""
    planned = operator == "ag_gemm"
    return [Config(128, columns, group_m=16, kernel="hopper", planned=planned) for columns in (256, 128)]


def doubt(operator: str, m: int, world_size: int, config: Config) -> float:
    """Seconds that a launch may take longer than the model predicts."""
    if world_size <= 2:
        return SMALL_DOUBT_S
    if operator == "ag_gemm":
        return PLANNED_DOUBT_S
    return DOUBT_S if m < DOUBT_ROWS and config.block_n > NARROW else SMALL_DOUBT_S


def likely(operator: str, m: int, n: int, k: int, world_size: int, machine: Machine) -> Config:
    """The configuration to begin with."""
    if operator == "gemm_ar":
        return candidates(operator, m, n, k, world_size, machine)[0]
    if operator == "ag_gemm" and world_size > 1:
        return by_timetable(m, n, k, world_size, machine)
    return by_waves(operator, m, n, k, world_size, machine)


def by_timetable(m: int, n: int, k: int, world_size: int, machine: Machine) -> Config:
    """The better of an all-gather's wide and narrow tiles, each as its timetable has it."""
    wide, narrow = planned("ag_gemm", m, n, k, world_size, machine)
    wide_s, narrow_s = (predict("ag_gemm", m, n, k, world_size, one, machine).total_s for one in (wide, narrow))
    return narrow if narrow_s * WORTH_NARROW < wide_s else wide


def by_waves(operator: str, m: int, n: int, k: int, world_size: int, machine: Machine) -> Config:
    """Wide tiles, or narrow ones where few waves would leave much of the last one empty."""
    waves = blocks(blocks(m, world_size), 128) * blocks(n, 256) * world_size / machine.processors
    is_short = waves < FEW_WAVES if operator == "ag_gemm" else world_size > 1 and waves * k < SHORT_SCATTER
    return Config(block_m=128, block_n=NARROW if is_short else 256, group_m=16, kernel="hopper")


def choose(operator: str, m: int, n: int, k: int, workspace: "Workspace") -> Config | None:
    """The configuration to run with, equal on all ranks; None means the serial path.

    The first call on a workspace is collective: all ranks of its group make it, as they do by calling an operator.

    Args:
        operator: "ag_gemm", "gemm_rs" or "gemm_ar".
        m: rows of the whole input.
        n: columns of the weight on one rank.
        k: rows of the weight on one rank.
        workspace: its group, element type and device decide too.

    Raises:
        ValueError: an unknown operator or a size below one.
        KernelError: rank 0 did not come to the first call.
    """
    table = _tables.get(workspace)
    if table is None:
        table = open_table(workspace)
    try:
        return table.answers[operator, m, n, k]
    except KeyError:
        return table.decide(Question(operator, m, n, k))


def open_table(workspace: "Workspace") -> Table:
    """The workspace's table; when it is new, rank 0 reads the file and hands it out."""
    if workspace in _tables:
        return _tables[workspace]
    dtype = str(workspace.dtype).removeprefix("torch.")
    said = ""
    if workspace.rank == 0:
        gpu, processors = describe(workspace.device)
        environment = store.environment_key(gpu, processors, workspace.world_size, dtype)
        entries = store.read(store.cache_file(), environment)
        configs = {key: entry.config and entry.config._asdict() for key, entry in entries.items()}
        said = json.dumps({"gpu": gpu, "processors": processors, "environment": environment, "configs": configs})
    heard = json.loads(from_rank_zero(workspace.group, workspace.rank, workspace.world_size, said, "choice of kernels"))
    tuned = {key: config and read_config(config) for key, config in heard["configs"].items()}
    table = Table(machine_of(heard["gpu"], heard["processors"]), workspace.world_size, heard["environment"], tuned)
    _tables[workspace] = table
    return table


def describe(device: torch.device) -> tuple[str, int]:
    """Name and multiprocessors of a device."""
    if device.type != "cuda":
        return device.type, 1
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count
