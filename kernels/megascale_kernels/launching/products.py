# SPDX-License-Identifier: Apache-2.0
"""Products by cuBLAS at the cost of one call: planned once, launched by `launcher.c` beside copies and kernels.

`torch.mm(..., out=)` costs the host 15 to 25 us: views, checks, and cuBLAS choosing its algorithm anew. Here layouts
and algorithm are chosen once for a shape (`cublasLtMatmulAlgoGetHeuristic`), with the library that torch has loaded and
as much scratch memory as torch gives it on Hopper. Partial sums of a product cut along K are added in fp32 alone.

Where the library is not found, or knows no algorithm, there is no such product, and torch multiplies.

cuBLAS counts columns first: the product of rows X [M, K] and W [K, N] is, to it, W^T (N x K) times X^T (K x M).
"""

import ctypes
import logging
import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from megascale_kernels.launching.native import Launcher

LOG = logging.getLogger("megascale_kernels")
SCRATCH_BYTES = 32 << 20
TYPES = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType_t
COMPUTE_32F, REAL_32F = 68, 0
TRANSPOSE_A, EPILOGUE = 3, 7  # attributes of a product
WITH_BIAS = 4  # an epilogue
MOST_SCRATCH, REDUCTIONS, ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # attributes of a preference; of a, b, c and d
IN_FP32 = 2
ALGORITHM_BYTES = 64
PREFERENCE = "cublasLtMatmulPreference"
CALLED = (
    "cublasLtMatmul", "cublasLtMatmulDescSetAttribute", "cublasLtMatmulDescDestroy", "cublasLtMatrixLayoutDestroy",
)  # fmt: skip


class Operand(NamedTuple):
    """Where a matrix of a product lies.

    Attributes:
        source: which of a call's addresses (`launching.ready`).
        first: bytes from there to its first element.
        stride: elements from one row to the next.
        alignment: bytes of which every address of it is a multiple.
    """

    source: int
    first: int
    stride: int
    alignment: int = 16

    def at(self, first: int) -> "Operand":
        """The same, beginning so many bytes further."""
        return self._replace(first=self.first + first, alignment=math.gcd(self.alignment, first))


class Shape(NamedTuple):
    """Sizes of [M, K] x [K, N], and how the weight lies."""

    m: int
    n: int
    k: int
    is_nk: bool


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * (ALGORITHM_BYTES // 8)), ("scratch_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int), ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


class CublasError(Exception):
    """cuBLAS refused a call; the message names it."""


class Products:
    """Plans products for one workspace; all of them share its scratch memory, so they run on one stream at a time.

    Args:
        native: what launches them.
        device: where the scratch memory is.
        dtype: of all operands.
    """

    def __init__(self, native: Launcher, device: torch.device, dtype: torch.dtype) -> None:
        self._native, self._kind = native, TYPES.get(dtype)
        self._library = cublas(device) if self._kind is not None else None
        # Made now: a plan may be made while torch records a graph, to which memory that is allocated then belongs.
        room = SCRATCH_BYTES if self._library is not None else 0
        self._scratch = torch.empty(room, dtype=torch.uint8, device=device)

    def product(self, shape: Shape, x: Operand, w: Operand, out: Operand, bias: int = -1) -> object | None:
        """A product for `Launcher.launch`, or None where torch has to multiply.

        Args:
            shape: sizes; K is at most the stride of x, N at most that of out.
            x: [M, K].
            w: [N, K] or [K, N].
            out: [M, N].
            bias: which of a call's addresses is that of a bias [N], added before the sum is rounded; -1 is none.
        """
        if self._library is None or 0 in shape[:3]:
            return None
        try:
            return self._planned(self._library, shape, x, w, out, bias)
        except CublasError as error:
            _say_once(str(error))
            return None

    def _planned(
        self, library: "Cublas", shape: Shape, x: Operand, w: Operand, out: Operand, bias: int
    ) -> object:  # fmt: skip
        with _Plan(library) as plan:
            product = plan.make("cublasLtMatmulDesc", COMPUTE_32F, REAL_32F)
            plan.tell("cublasLtMatmulDesc", product, TRANSPOSE_A, ctypes.c_int32(int(shape.is_nk)))
            if bias >= 0:
                plan.tell("cublasLtMatmulDesc", product, EPILOGUE, ctypes.c_int32(WITH_BIAS))
            weight = (shape.k, shape.n) if shape.is_nk else (shape.n, shape.k)
            sizes = ((weight, w), ((shape.k, shape.m), x), ((shape.n, shape.m), out))
            layouts = tuple(
                plan.make("cublasLtMatrixLayout", self._kind, *map(ctypes.c_uint64, size), ctypes.c_int64(one.stride))
                for size, one in sizes
            )
            algorithm = plan.algorithm(product, layouts, (w.alignment, x.alignment, out.alignment, out.alignment))
            made: object = self._native.product(
                tuple(map(library.address, CALLED)), library.handle, product, layouts,
                *((one.source, one.first) for one in (w, x, out)), bias, algorithm,
                self._scratch.data_ptr(), self._scratch.numel(),
            )  # fmt: skip
            plan.hand_over()
        return made


class Cublas:
    """The library with a handle of ours, one a device."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        made = ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(made))
        self.handle = made.value

    def call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 - of any C type
        """Call a function of the library.

        Raises:
            CublasError: it returned a status.
        """
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise CublasError(f"{name}: status {status}")

    def address(self, name: str) -> int:
        """Where a function lies."""
        return ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0


class _Plan:
    """What a product is planned with: destroyed at the end, unless the product has it then."""

    def __init__(self, library: Cublas) -> None:
        self._library = library
        self._made: list[tuple[str, int]] = []

    def __enter__(self) -> Self:
        """The plan."""
        return self

    def __exit__(self, *_: object) -> None:
        """Destroy what no product has taken over."""
        for kind, made in reversed(self._made):
            self._library.call(f"{kind}Destroy", ctypes.c_void_p(made))

    def make(self, kind: str, *arguments: Any) -> int:  # noqa: ANN401 - of any C type
        """A description, layout or preference."""
        made = ctypes.c_void_p()
        self._library.call(f"{kind}Create", ctypes.byref(made), *arguments)
        self._made.append((kind, made.value or 0))
        return self._made[-1][1]

    def tell(self, kind: str, made: int, attribute: int, value: Any) -> None:  # noqa: ANN401 - of any C type
        """Set an attribute."""
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._library.call(f"{kind}SetAttribute", ctypes.c_void_p(made), attribute, ctypes.byref(value), size)

    def algorithm(self, product: int, layouts: tuple[int, ...], alignments: tuple[int, ...]) -> bytes:
        """The algorithm that the library holds for the fastest.

        Raises:
            CublasError: it knows none.
        """
        preference = self.make(PREFERENCE)
        told: list[tuple[int, Any]] = [
            (MOST_SCRATCH, ctypes.c_uint64(SCRATCH_BYTES)), (REDUCTIONS, ctypes.c_uint32(IN_FP32)),
        ]  # fmt: skip
        told += [(which, ctypes.c_uint32(bytes_)) for which, bytes_ in zip(ALIGNMENTS, alignments, strict=True)]
        for attribute, value in told:
            self.tell(PREFERENCE, preference, attribute, value)
        result, count = _Result(), ctypes.c_int(0)
        a, b, out = map(ctypes.c_void_p, layouts)
        self._library.call(
            "cublasLtMatmulAlgoGetHeuristic", ctypes.c_void_p(self._library.handle), ctypes.c_void_p(product), a, b,
            out, out, ctypes.c_void_p(preference), 1, ctypes.byref(result), ctypes.byref(count),
        )  # fmt: skip
        if count.value < 1 or result.state != 0:
            raise CublasError(f"cublasLtMatmulAlgoGetHeuristic: no algorithm, state {result.state}")
        return bytes(result.algorithm)

    def hand_over(self) -> None:
        """The product destroys the description and the layouts from now on."""
        self._made = [one for one in self._made if one[0] == PREFERENCE]


@cache
def cublas(device: torch.device) -> Cublas | None:  # noqa: ARG001 - a handle belongs to one
    """The library that torch has loaded, with a handle on the current device, which is `device`; None without one."""
    path = _loaded("libcublasLt.so")
    if path is None:
        return None
    try:
        return Cublas(ctypes.CDLL(path))
    except (OSError, AttributeError, CublasError) as error:
        _say_once(str(error))
        return None


def _loaded(name: str) -> str | None:
    """The file of a library that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((path for line in lines if name in (path := line.split(maxsplit=5)[-1])), None)


@cache
def _say_once(reason: str) -> None:
    LOG.info("torch multiplies, at some 20 us more of the host a product: %s", reason)
