# SPDX-License-Identifier: Apache-2.0
"""The words that may stay in a recording that is made anonymous: those that our judges know.

What a judge looks for in a text stands in its own source: in its patterns, its tables, and the strings of its
functions. All words there are no secret, and all other words tell it nothing. So the list is made of them, and a new
pattern brings its own words.
"""

import builtins
import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType

_ROOMS = ("megascale_ops.diagnosis", "megascale_ops.schema")
_WORD = re.compile(r"[^\W\d_](?:[^\W\d]|(?<=\w)\d)*")
# What stands for itself in a pattern: \bout, [Ff]ailed, (?P<name>...).
_ESCAPED = re.compile(r"\\[A-Za-z]")
_EITHER = re.compile(r"\[([A-Za-z])([A-Za-z])\]([A-Za-z]+)")
_NAMED = re.compile(r"\(\?P<\w+>")
# 6 deep: a table of rows of tuples of patterns.
_DEEP = 6
# Names that libraries print and no pattern of ours spells out.
_LIBRARIES = """
torch cuda nccl gloo autograd distributed multiprocessing nn optim utils data numpy python Python site packages dist lib
File line in Traceback most recent call last Error Exception Warning rank RANK Rank process Process node NCCL CUDA
AcceleratorError OutOfMemoryError DistBackendError DistNetworkError DistStoreError DistError CalledProcessError
ChildFailedError default_pg pg float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 bool Float Half BFloat16
Double Long Int MainThread Thread stderr stdout True False None GiB MiB KiB
R S D T Z X I K W P
"""


@lru_cache(maxsize=1)
def vocabulary() -> frozenset[str]:
    """Return all words that may stay, as they are written."""
    found = set(_LIBRARIES.split())
    for name, value in vars(builtins).items():
        if isinstance(value, type) and issubclass(value, BaseException):
            found.add(name)
    for module in _modules():
        for value in list(vars(module).values()):
            for text in _texts(value, module.__name__, 0):
                found.update(_words(text))
    return frozenset(found)


def _modules() -> Iterator[ModuleType]:
    for room in _ROOMS:
        package = importlib.import_module(room)
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{room}."):
            yield importlib.import_module(found.name)


def _texts(value: object, module: str, depth: int) -> Iterator[str]:
    """Yield the strings and patterns in a module's variable; of functions, those in their code but for docstrings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, re.Pattern):
        yield _plain(str(value.pattern))
    elif isinstance(value, (FunctionType, type)):
        if value.__module__ == module:
            yield from _of_code(value)
    elif depth < _DEEP and isinstance(value, (tuple, list, set, frozenset, dict)):
        items = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        for one in items:
            yield from _texts(one, module, depth + 1)


def _of_code(value: FunctionType | type) -> Iterator[str]:
    functions = [value] if isinstance(value, FunctionType) else vars(value).values()
    for one in functions:
        if isinstance(one, FunctionType):
            yield from _constants(one.__code__, one.__doc__)


def _constants(code: CodeType, doc: str | None) -> Iterator[str]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _constants(one, None)
        elif isinstance(one, str) and one != doc:
            yield one
        elif isinstance(one, (tuple, frozenset)):
            yield from (item for item in one if isinstance(item, str))


def _plain(pattern: str) -> str:
    """Return a pattern with what is no text in it taken out."""
    both = _EITHER.sub(lambda found: f" {found[1]}{found[3]} {found[2]}{found[3]} ", pattern)
    return _ESCAPED.sub(" ", _NAMED.sub("(", both))


def _words(text: str) -> Iterator[str]:
    yield from _WORD.findall(text)
    for whole in re.findall(r"[A-Za-z]\w*", text):
        yield whole
        yield from whole.split("_")
