# SPDX-License-Identifier: Apache-2.0
"""Compile a kernel for sm_90 on a machine without a GPU, and read what came out.

The Triton wheel carries ptxas and the disassemblers, so a test can hold the compiler to a contract: the fences are
there, the matrix instructions are Hopper's, nothing spills.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


class Machine(NamedTuple):
    """What came out of the compiler.

    Attributes:
        ptx: the PTX text.
        sass: the disassembly.
        registers: registers per thread.
        shared_bytes: dynamic shared memory per CTA, bytes.
        spilled_bytes: local memory per thread (stack frame and spills), bytes.
    """

    ptx: str
    sass: str
    registers: int
    shared_bytes: int
    spilled_bytes: int


def compile_for_hopper(kernel: Any, types: Mapping[str, Any], constants: Mapping[str, Any], *, warps: int = 8,
                       stages: int = 3) -> Machine:  # fmt: skip
    """Compile a `@triton.jit` kernel for sm_90.

    Args:
        kernel: the jit function.
        types: signature of the run-time arguments ("*bf16", "i32", "tensordesc<bf16[128, 64]>").
        constants: the constexpr arguments.
        warps: warps per CTA.
        stages: depth of the software pipeline.
    """
    source = ASTSource(kernel, *_described(kernel, types, constants))
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages}
    )
    return read_machine(compiled)


def compile_gluon(kernel: Any, types: Mapping[str, Any], constants: Mapping[str, Any], *, warps: int = 4,
                  registers: int | None = None) -> Machine:  # fmt: skip
    """Compile a `@gluon.jit` kernel for sm_90.

    Args:
        kernel: the jit function.
        types: signature of the run-time arguments; a descriptor's has its layout ("tensordesc<bf16[64, 64],...>").
        constants: the constexpr arguments, and None for arguments that are missing.
        warps: warps of the default partition.
        registers: registers per thread at the start; None lets the compiler choose.
    """
    from triton.experimental.gluon._runtime import GluonASTSource

    source = GluonASTSource(kernel, *_described(kernel, types, constants))
    options = {"num_warps": warps} | ({} if registers is None else {"maxnreg": registers})
    return read_machine(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))


def _described(kernel: Any, types: Mapping[str, Any], constants: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the compiler wants to know of the arguments: types in order, constants, and that pointers are aligned."""
    signature = dict(types) | dict.fromkeys(constants, "constexpr")
    ordered = {name: signature[name] for name in kernel.arg_names}
    pointers = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(ordered.values())
        if isinstance(kind, str) and kind.startswith("*")
    }
    return ordered, dict(constants), pointers


def read_machine(compiled: Any) -> Machine:
    """Registers, shared memory, spills and texts of a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run("cuobjdump", "--dump-resource-usage", str(cubin))
        sass = _run("nvdisasm", str(cubin)) if _tool("nvdisasm") else _run("cuobjdump", "--dump-sass", str(cubin))
    registers, stack, local = (
        int(match.group(1)) if (match := re.search(rf"{word}:(\d+)", usage)) else 0
        for word in ("REG", "STACK", "LOCAL")
    )
    return Machine(compiled.asm["ptx"], sass, registers, compiled.metadata.shared, stack + local)


def _tool(name: str) -> str | None:
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return str(path) if path.exists() else None


def _run(name: str, *arguments: str) -> str:
    program = _tool(name)
    if program is None:
        raise FileNotFoundError(f"the Triton wheel carries no {name}; install triton>=3.6 from PyPI")
    return subprocess.run([program, *arguments], check=True, capture_output=True, text=True, timeout=60).stdout
