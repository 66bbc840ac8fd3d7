# SPDX-License-Identifier: Apache-2.0
"""What a PromQL expression asks for: the names of its series and the labels it selects them by.

No parser: a name is an identifier that is neither a function, nor a keyword, nor a label in a list of labels. What is
found here of an expression is true of every expression that Prometheus accepts; whether it accepts one, only Prometheus
knows. Grammar: https://prometheus.io/docs/prometheus/latest/querying/basics/.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

_LABEL_LISTS = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_KEYWORDS = _LABEL_LISTS | {"and", "or", "unless", "bool", "offset", "atan2", "inf", "nan", "start", "end"}
_TOKEN = re.compile(
    r"""
      (?P<comment>\#[^\n]*)
    | (?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`)
    | (?P<number>\d[\w.]*)                       # 5, 1.5e3, 0x1F, 5m
    | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    | (?P<mark>[{}\[\]()=!~,])
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
# $name, ${name}, ${name:format}, [[name]]; $1 is label_replace's own. Syntax:
# https://grafana.com/docs/grafana/latest/dashboards/variables/variable-syntax/
_VARIABLE = re.compile(r"\$\{([a-zA-Z_]\w*)(?:[.:][^}]*)?\}|\$([a-zA-Z_]\w*)|\[\[(\w+)(?::\w+)?\]\]")
_MATCHER = re.compile(r'(=~|!~|!=|=)\s*"([^"]*)"')


class Selector(NamedTuple):
    """Series of one ``name``, chosen by ``labels``."""

    name: str
    labels: tuple[str, ...]


def selectors(expression: str) -> list[Selector]:
    """Return what an expression selects, in its order; variables of Grafana may stand in it."""
    tokens = [
        (match.lastgroup or "", match.group())
        for match in _TOKEN.finditer(_VARIABLE.sub("1", expression))
        if match.lastgroup != "comment" and not match.group().isspace()
    ]
    found: list[Selector] = []
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        after = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        at += 1
        if text == "[":
            at = _behind(tokens, at, "]")
        elif text == "{":  # {__name__="x"}: a selector without a name in front
            end = _behind(tokens, at, "}")
            found += [Selector(name, labels) for name, labels in _unnamed(tokens[at:end])]
            at = end
        elif kind != "name":
            continue
        elif text.lower() in _KEYWORDS:
            if text.lower() in _LABEL_LISTS and after == "(":
                at = _behind(tokens, at + 1, ")")
        elif after == "{":
            end = _behind(tokens, at + 1, "}")
            found.append(Selector(text, _labels(tokens[at + 1 : end])))
            at = end
        elif after != "(" and after.lower() not in {"by", "without"}:
            found.append(Selector(text, ()))
    return found


def _behind(tokens: list[tuple[str, str]], at: int, close: str) -> int:
    """Return the place behind the next ``close``; neither braces nor brackets nor lists of labels nest."""
    while at < len(tokens) and tokens[at][1] != close:
        at += 1
    return at + 1


def _labels(tokens: list[tuple[str, str]]) -> tuple[str, ...]:
    """Return the labels of ``{a="x", b=~"y"``: each name in front of a matcher."""
    return tuple(
        text
        for (kind, text), (_, after) in pairwise(tokens)
        if kind == "name" and after in {"=", "!", "~"} and text != "__name__"
    )


def _unnamed(tokens: list[tuple[str, str]]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the name that a selector without one gives by ``__name__="x"``; a pattern names nothing."""
    texts = [text for _, text in tokens]
    if texts[:2] == ["__name__", "="] and len(tokens) > 2 and tokens[2][0] == "text":
        return [(texts[2][1:-1], _labels(tokens[3:]))]
    return []


def filled(expression: str, values: Mapping[str, str]) -> str:
    """Return an expression with Grafana's variables put in, so that Prometheus can be asked.

    A matcher whose text has a variable without a value selects everything; elsewhere such a variable is 5, which can
    stand as a number and, with Grafana's own for times in ``values``, nowhere else.

    Args:
        expression: as a dashboard has it.
        values: of variables, by name.
    """

    def value(match: re.Match[str]) -> str:
        return values.get(match[1] or match[2] or match[3], "5")

    def matcher(match: re.Match[str]) -> str:
        names = {one[1] or one[2] or one[3] for one in _VARIABLE.finditer(match[2])}
        if not names - values.keys():
            return match[0]
        return '=~".*"' if match[1] in {"=", "=~"} else '!=" "'

    return _VARIABLE.sub(value, _MATCHER.sub(matcher, expression))


def variables(text: str) -> set[str]:
    """Return the names of Grafana's variables in a text."""
    return {one[1] or one[2] or one[3] for one in _VARIABLE.finditer(text)}
