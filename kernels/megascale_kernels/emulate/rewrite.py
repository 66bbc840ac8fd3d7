# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN401, SLF001
# (Triton has no types: what comes from it, or goes to it, is Any; its interpreter has no public face)
"""Make `@triton.jit` functions callable on a CPU, whether or not TRITON_INTERPRET was set when they were made.

Triton's interpreter decides when a function is decorated, and its rewriting leaves names behind in the module of
the kernel. Here the decision is taken per launch: inside `interpreting`, calling a jit function runs a rewritten
copy of its source, the copy lives in a cache of ours, and all patches are undone at the end.

The rewriting itself is what Triton's compiler does to integers: what is assigned becomes a tensor, and so does the
variable of a loop (except `tl.static_range`), so that `.to(...)` works on them.
"""

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from megascale_kernels.device import signals
from megascale_kernels.emulate.errors import EmulationError
from megascale_kernels.emulate.quick import quicken
from megascale_kernels.emulate.semantic import Semantic, member_of

# The interpreter's private parts that are used here were read in these versions.
KNOWN_TRITON = ("3.6.", "3.7.", "3.8.", "3.9.")
# triton 3.6's interpreter breaks on the scalars of numpy 2.4 (triton issue 9171); 3.7 takes them.
OLD_SCALARS = "3.6."
FIRST_BAD_NUMPY = (2, 4)

Hook = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_BRIDGE = "__emulated__"
_one_at_a_time = threading.Lock()


class _Bridge:
    """What rewritten functions reach for: the running session."""

    def __init__(self) -> None:
        self.semantic: Any = None
        self.hooks: dict[Any, Hook] = {}

    def to_tensor(self, value: Any) -> Any:
        if type(value) is tl.tensor:
            return value
        return self.semantic.to_tensor(value, False)  # noqa: FBT003 (Triton's own positional flag)


_bridge = _Bridge()
_PATCHED = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
# Taken before anything can have patched them: a nested call in Triton's own interpreter leaves its patches behind.
_builtins = [
    (owner, name, member)
    for owner in _PATCHED
    for name, member in inspect.getmembers(owner)
    if tl.core.is_builtin(member)
]
_rewritten: dict[Any, Callable[..., Any]] = {}
KERNEL_FILES: set[str] = set()  # those that rewritten functions come from


def check_versions() -> None:
    """Refuse an interpreter that this emulator was not written for.

    Raises:
        EmulationError: the message names the versions that fit.
    """
    if not triton.__version__.startswith(KNOWN_TRITON):
        known = ", ".join(f"{version}x" for version in KNOWN_TRITON)
        raise EmulationError(f"the emulator knows the interpreter of triton {known}; this is {triton.__version__}")
    is_new = tuple(int(part) for part in np.__version__.split(".")[:2]) >= FIRST_BAD_NUMPY
    if is_new and triton.__version__.startswith(OLD_SCALARS):
        raise EmulationError(
            f"the interpreter of triton {triton.__version__} needs numpy < 2.4; this is {np.__version__}: install "
            "'numpy<2.4' or 'triton>=3.7'"
        )


def python_of(function: Any) -> Callable[..., Any]:
    """The rewritten Python function of a jit function.

    Raises:
        EmulationError: not a jit function.
    """
    if not isinstance(function, JITFunction | stock.InterpretedFunction) or type(function).__name__.startswith("Gluon"):
        raise EmulationError(f"{function!r} is not a @triton.jit function; only those can be emulated")
    plain = function.fn
    if plain not in _rewritten:
        if isinstance(function, JITFunction):
            # As it was when the module was imported; the file may have changed since.
            lines, first = function.raw_src, function.starting_line_number
        else:
            lines, first = inspect.getsourcelines(plain)
        _rewritten[plain] = _rewrite(plain, lines, first)
    return _rewritten[plain]


@contextmanager
def interpreting(builder: Any, hooks: Mapping[Any, Hook], polls_per_look: int) -> Iterator[None]:
    """Let jit functions be called, on a builder.

    Args:
        builder: performs the operations.
        hooks: {jit function: hook}; a hook gets the rewritten function and its arguments, and calls it.
        polls_per_look: replaces `signals.POLLS_PER_LOOK`, since a poll costs more here than on a device.

    Raises:
        EmulationError: another emulation is running in this process.
    """
    check_versions()
    if not _one_at_a_time.acquire(blocking=False):
        raise EmulationError("another emulation is running in this process: triton.language can be patched only once")
    scope = stock._LangPatchScope()
    try:
        _bridge.semantic = Semantic(builder)
        _bridge.hooks = {function.fn: hook for function, hook in hooks.items()}
        # From 3.7 on patched functions reach for the module's own, whatever builder they were patched with.
        scope.set_attr(stock, "interpreter_semantic", _bridge.semantic)
        _patch(scope)
        scope.set_attr(signals.POLLS_PER_LOOK, "value", polls_per_look)
        yield
    finally:
        scope.restore()
        _bridge.semantic, _bridge.hooks = None, {}
        _one_at_a_time.release()


def _patch(scope: Any) -> None:
    if not any(name == "load" for _, name, _ in _builtins):
        raise EmulationError(
            "triton's own interpreter has left its patches in triton.language: import megascale_kernels.emulate before "
            "it runs, or emulate in a fresh process"
        )
    for owner, name, member in _builtins:
        scope.set_attr(owner, name, member_of(owner, name, member, _bridge.semantic))
    quicken(scope)
    stock._patch_lang_tensor(tl.tensor, scope)
    for language in (tl, tl.core):
        stock._patch_lang_core(language, scope)
    # Triton's own __index__ warns under numpy 2: it converts an array of one element.
    scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
    for name, member in list(vars(tl.tensor).items()):
        if isinstance(member, JITFunction):
            scope.set_attr(tl.tensor, name, _method(member))
    for kind in (JITFunction, stock.InterpretedFunction):
        scope.set_attr(kind, "__call__", _call)


def _method(function: Any) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return method


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    plain = function.fn
    python = _rewritten.get(plain) or python_of(function)
    hook = _bridge.hooks.get(plain)
    return python(*args, **kwargs) if hook is None else hook(python, args, kwargs)


class _Rewriter(ast.NodeTransformer):
    """Turns assigned integers and loop variables into tensors."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list = []
        node.returns = None
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            argument.annotation = None
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = _as_tensor(node.value)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        static = isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func).endswith("static_range")
        if isinstance(node.target, ast.Name) and not static:
            variable = node.target.id
            value = _as_tensor(ast.Name(variable, ast.Load()))
            node.body.insert(0, ast.Assign([ast.Name(variable, ast.Store())], value))
            ast.copy_location(node.body[0], node)
        return node


def _as_tensor(value: ast.expr) -> ast.expr:
    function = ast.Attribute(ast.Name(_BRIDGE, ast.Load()), "to_tensor", ast.Load())
    return ast.copy_location(ast.Call(function, [value], []), value)


def _rewrite(plain: FunctionType, lines: list[str], first: int) -> Callable[..., Any]:
    tree = ast.parse(textwrap.dedent("".join(lines)))
    tree = _Rewriter().visit(tree)
    file = inspect.getsourcefile(plain) or plain.__code__.co_filename
    captured = inspect.getclosurevars(plain).nonlocals
    definition = tree.body[0]
    factory = ast.parse(f"def factory({', '.join((_BRIDGE, *captured))}): pass")
    outer = factory.body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [definition, ast.Return(ast.Name(definition.name, ast.Load()))]
    ast.fix_missing_locations(factory)
    ast.increment_lineno(factory, first - 1)
    made: dict[str, Any] = {}
    # Its globals are the kernel's module, and stay as they are.
    exec(compile(factory, file, "exec"), plain.__globals__, made)  # noqa: S102 (the source is the kernel's own)
    KERNEL_FILES.add(file)
    function: Callable[..., Any] = made["factory"](_bridge, **captured)
    return function
