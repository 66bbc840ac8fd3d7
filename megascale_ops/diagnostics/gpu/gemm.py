# SPDX-License-Identifier: Apache-2.0
"""How fast each GPU multiplies matrices in bf16, all of them at once, and what holds them back meanwhile.

All at once, because power and air of a chassis are shared: a GPU that is fast alone may not be in a job. 8,192 cubed
fills every model of today for milliseconds, and inputs are random: zeros would take less power and run faster.
"""

from statistics import median

from megascale_ops.diagnostics.check import Check, Reading, Task, doing
from megascale_ops.diagnostics.gpu.devices import devices, seconds_of
from megascale_ops.diagnostics.gpu.load import LoadWatch
from megascale_ops.diagnostics.report import CheckFinding, Figure

CHECK = Check(
    "gemm", "matrix products of GPUs", ("gpu", "torch"), quick_s=20.0, full_s=150.0, alone=True, process="cuda"
)

_SIZE = 8192
_REPETITIONS = 10
# 0.1 s and 6 s each on a GPU of 700 TFLOP/s: quick, and long enough for a chassis to become hot.
_QUICK_PRODUCTS, _FULL_PRODUCTS = 64, 3840
# 0.5 s: clocks settle under the power limit within some hundred milliseconds.
_WARM_PRODUCTS = 320
# A tenth of the time: less costs a step less than one percent. The agent's own bar (``hardware/findings.py``).
_HELD_BACK_SHARE = 0.1
_FLOP = 2 * _SIZE**3


def measure(task: Task) -> Reading:
    """Multiply."""
    import torch

    found, missing = devices(3 * _SIZE * _SIZE * 2 + (64 << 20))
    products = _FULL_PRODUCTS if task.thorough else _QUICK_PRODUCTS
    operands = {}
    for one in found:
        doing(f"allocating on {one.label}")
        a, b, c = (torch.empty(_SIZE, _SIZE, dtype=torch.bfloat16, device=f"cuda:{one.place}") for _ in range(3))
        operands[one.place] = (a.normal_(), b.normal_(), c)

    def work(index: int) -> None:
        a, b, c = operands[index]
        torch.mm(a, b, out=c)

    indices = [one.place for one in found]
    doing("multiplying on all GPUs")
    seconds_of(work, indices, _WARM_PRODUCTS, 1)
    watch = LoadWatch(found)
    watch.begin()
    seconds = seconds_of(work, indices, products, _REPETITIONS)
    watch.end()
    figures = []
    for one in found:
        rates = tuple(products * _FLOP / each for each in seconds[one.place])
        figures.append(Figure("gemm_bf16", one.label, median(rates), rates, one.model))
        figures.append(Figure("gemm_spread", one.label, (max(rates) - min(rates)) / median(rates)))
    return Reading((*figures, *watch.figures()), tuple(watch.facts()), tuple(missing))


def judge(reading: Reading) -> list[CheckFinding]:
    """Find GPUs that were held back by heat or by a brake on their power."""
    clocks, heats = reading.values("gpu_clock"), reading.values("gpu_temperature")
    reasons = reading.texts("clock_reasons")
    found = []
    for gpu, share in reading.values("throttled").items():
        if share >= _HELD_BACK_SHARE:
            text = (
                f"{gpu}: clocks were lowered for {share:.0%} of the load's time ({reasons.get(gpu, '')}), "
                f"{clocks.get(gpu, 0) / 1e6:.0f} MHz at {heats.get(gpu, 0):.0f} C"
            )
            following = "look at fans, inlet temperature and power supplies; nvidia-smi -q -d PERFORMANCE,POWER"
            found.append(CheckFinding("warn", gpu, text, following))
    return found
