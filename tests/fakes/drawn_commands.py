# SPDX-License-Identifier: Apache-2.0
"""Command lines that are given wrongly, drawn for every verb from the parameters that it declares.

Nothing here names a verb or an option: one that is added tomorrow is drawn tomorrow. A line has what the verb asks
for, some of it plausible, and up to three options with values beyond what their type allows, places that are not what
they should be, and texts that nobody expects. It is typed in some weather: a full disk, a terminal without UTF-8, a
folder that has been removed, variables with nonsense.
"""

from collections.abc import Iterator, Mapping
from random import Random
from typing import NamedTuple

import click

from megascale_ops.cli.config import configuration
from megascale_ops.cli.config.settings import settings_of
from megascale_ops.cli.main import program

PROGRAM = "megascale-ops: "
# What stands in the folder that `tests.fixtures.drawn_places` makes: what a file or folder may turn out to be.
GOOD = ("good/run", "good/token", "good/ops.toml", "good/one.recording", "good/checkpoints")
PLACES = (
    *("no/such/file", "empty", "noise", "folder", "closed/file", "closed", "fifo", "deep.json", "list.json"),
    *("bad.toml", "nul.toml", "latin1", "a b/ünï ☃", "huge", "/dev/full", "/dev/null", "/dev/zero", "/proc/self/mem"),
    *("loop", "red\x01\x1b[31m", "x" * 300, "", ".", "/", "~nobody/x", "-", "damaged/run", "damaged/run/journal.db"),
)
# {html} and its like: the port of a server of `tests.fakes.wrong_servers`.
ADDRESSES = (
    *("http://127.0.0.1:9", "http://no-such-host.invalid:7070", "127.0.0.1", "http://", "https://127.0.0.1:9"),
    *("ftp://127.0.0.1/x", "http://127.0.0.1:99999", "http://[::1", "http://a b", "http://\x1b[31m", "unix:/x", "//"),
    *("http://user:secret@127.0.0.1:9", "http://127.0.0.1:{html}", "http://127.0.0.1:{cut}", "http://127.0.0.1:{null}"),
    *("http://127.0.0.1:{list}", "http://127.0.0.1:{deep}", "http://127.0.0.1:{odd}", "http://127.0.0.1:{moved}"),
    *("http://127.0.0.1:{refuses}", "http://127.0.0.1:{breaks}", "http://127.0.0.1:{nothing}"),
    *("http://127.0.0.1:{noise}", "https://127.0.0.1:{html}"),
)
TEXTS = (
    *("", " ", "-1", "0", "1", "2", "nan", "inf", "1e999", "9" * 30, "9" * 5000, "x", "x=", "=x", "a=b", "a=b=c", "%s"),
    *("a/b", "../../etc", "\x1b[31mred", "a\nb", "ünï ☃", "\udcff", "[" * 3000, "[]", "null", "0:0", "2:1", "0-", "*"),
    *("gpt", "gpt-1", "gpt-99", "1,,2", "5-3", "-1-2", "0x10", "1_000", "٣", "x" * 5000, "auto", "none", "all", "'"),
    *("node-a", "silence_floor_s=nan", "max_restarts=-9", "actions.killed=dance", "(", "a(b", "1979-05-27", "1d"),
)
NUMBERS = ("-1", "0", "1", "2", "-9" * 12, "9" * 30, "9" * 5000, "1e3", "1e400", "nan", "-inf", "0.5", "", "٣", "0x10")
_VARIABLES = (
    *("LOG_LEVEL", "LOG_FORMAT", "CONFIG", "TOKEN_FILE", "TOKEN", "BOX_ROOT", "CONTROLLER"),
    *(
        name.removeprefix("MEGASCALE_")
        for section in configuration.SECTIONS
        for setting in settings_of(configuration.struct_of(section))
        for name in configuration.variables_of(section, setting)
        if name.startswith("MEGASCALE_")
    ),
)


def _addressed(text: str, ports: Mapping[str, int]) -> str:
    for kind, port in ports.items():
        text = text.replace("{" + kind + "}", str(port))
    return text


class Line(NamedTuple):
    """What is typed, and whether it can't be right: one of its values is none of its type."""

    words: tuple[str, ...]
    is_wrong: bool

    def addressed(self, ports: Mapping[str, int]) -> tuple[str, ...]:
        """Return the words, with the ports of servers that run."""
        return tuple(_addressed(word, ports) for word in self.words)

    def __str__(self) -> str:
        short = (word if len(word) < 80 else f"{word[:40]}...({len(word)} characters)" for word in self.words)
        return " ".join(map(repr, short))


class Weather(NamedTuple):
    """What a command finds around it.

    Attributes:
        out: where stdout leads: "file", "full", "gone" (a pipe that nobody reads), "shut".
        encoding: of stdout and stderr.
        env: variables.
        cwd: where it is typed, "gone": a folder that has been removed.
    """

    out: str = "file"
    encoding: str = "utf-8"
    env: tuple[tuple[str, str], ...] = ()
    cwd: str = "."

    def addressed(self, ports: Mapping[str, int]) -> "Weather":
        """Return it with the ports of servers that run."""
        return self._replace(env=tuple((name, _addressed(value, ports)) for name, value in self.env))

    @classmethod
    def drawn(cls, draw: Random) -> "Weather":
        """Draw one; half of them are fine."""
        if draw.random() < 0.5:
            return cls()
        nonsense = draw.choice((*TEXTS, *PLACES, *ADDRESSES))
        env = draw.choice(
            (
                ("COLUMNS", draw.choice(("1", "20", "-3", "x", "99999"))),
                ("HOME", draw.choice(("/proc", "no/such", "", "noise", "/root/\x1b"))),
                ("XDG_STATE_HOME", draw.choice(("noise", "/proc/1", "closed", "a b/ünï ☃", "loop", "damaged"))),
                ("TMPDIR", draw.choice(("/no/such", "noise", "closed"))),
                ("TERM", draw.choice(("dumb", "", "xterm-256color", "\x1b"))),
                ("TZ", draw.choice(("Mars/Olympus", ":", "\x01", "/dev/zero"))),
                ("LC_ALL", draw.choice(("C", "POSIX", "xx_XX.utf-9"))),
                (f"MEGASCALE_{draw.choice(_VARIABLES)}", nonsense),
                ("MEGASCALE_CONTROLLER", draw.choice(ADDRESSES)),
            )
        )
        out = draw.choice(("file", "file", "full", "gone", "shut"))
        encoding = draw.choice(("utf-8", "utf-8", "ascii", "latin-1"))
        return cls(out, encoding, (env,), draw.choice((".", ".", "a b/ünï ☃", "gone")))


class Answer(NamedTuple):
    """How a command ended.

    Attributes:
        code: its exit code, negative: a signal.
        out: what it printed.
        err: what it said.
        has_begun: it was about to do its work, and was ended.
        is_late: it was ended because it took too long.
        has_left: a process of it still lived.
    """

    code: int
    out: str = ""
    err: str = ""
    has_begun: bool = False
    is_late: bool = False
    has_left: bool = False


def complaints(line: Line, weather: Weather, answer: Answer) -> list[str]:
    """Return what is wrong with how a command ended; a wrong command ends with one sentence, and not with 0."""
    if answer.is_late:
        return ["has not ended"]
    said = answer.err.splitlines()
    sentences = [one for one in said if one.startswith(PROGRAM)]
    shows_where = any("debug" in word for word in (*line.words, *(value for _, value in weather.env)))
    is_told = bool(said or answer.out or weather.out != "file")
    wrong = {
        "a traceback": "Traceback (most recent" in answer.err + answer.out and not shows_where,
        f"exit code {answer.code}": answer.code not in {0, 1, 2} and not answer.has_begun,
        f"taken ({answer.code}), though a value is none of its type": line.is_wrong and answer.code != 2,
        "no sentence": answer.code in {1, 2} and not is_told,
        f"{len(sentences)} sentences": len(sentences) > 1,
        "control characters": not all(map(str.isprintable, sentences)),
        "a sentence without end": any(len(one) > 2000 for one in sentences),
        "a process left behind": answer.has_left,
    }
    return [name for name, is_so in wrong.items() if is_so]


def commands(
    group: click.Command = program, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command that does something, with the words by which it is called."""
    if not isinstance(group, click.Group):
        yield path, group
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None, name
        yield from commands(found, (*path, name))


def drawn_lines(draw: Random, each: int, only: str = "") -> Iterator[tuple[Line, Weather]]:
    """Draw so many lines for each command, each with its weather."""
    for path, command in commands():
        if " ".join(path).startswith(only):
            yield from ((drawn(path, command, draw), Weather.drawn(draw)) for _ in range(each))


def drawn(path: tuple[str, ...], command: click.Command, draw: Random) -> Line:
    """Draw one line for a command."""
    options = [one for one in command.params if isinstance(one, click.Option)]
    chosen = draw.sample(options, min(len(options), draw.choice((0, 1, 1, 1, 2, 3))))
    chosen += [one for one in options if one.required and one not in chosen and draw.random() < 0.8]
    words: list[str] = [*path]
    is_wrong = False
    for option in chosen:
        name = draw.choice(option.opts)
        value = _value(option, draw)
        if option.is_flag:
            words.append(name)
            continue
        is_wrong |= not _is_taken(option, value)
        words += [f"{name}={value}"] if name.startswith("--") else [name, value]
    for argument in command.params:
        if isinstance(argument, click.Argument):
            values = _values(argument, draw)
            is_wrong |= "" in values and argument.type is not click.UNPROCESSED
            words += values
    return Line(tuple(words), is_wrong)


def _values(argument: click.Argument, draw: Random) -> list[str]:
    if not argument.required and draw.random() < 0.5:
        return []
    count = draw.choice((0, 1, 1, 2, 3)) if argument.nargs == -1 else draw.choice((0, 1, 1, 1, 1, 1))
    return [_value(argument, draw) for _ in range(count)]


def _value(param: click.Parameter, draw: Random) -> str:
    kind = param.type
    place = draw.choice((draw.choice(GOOD), draw.choice(PLACES), draw.choice(PLACES)))
    if isinstance(kind, click.Choice):
        return draw.choice([*map(str, kind.choices), "", "\x1b[1m", draw.choice(TEXTS)])
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        ends = [str(end) for end in (getattr(kind, "min", None), getattr(kind, "max", None)) if end is not None]
        return draw.choice([*NUMBERS, *ends])
    if isinstance(kind, click.Path):
        return place
    said = f"{param.name} {getattr(param, 'help', '')} {param.metavar}".lower()
    if any(word in said for word in ("url", "address", "http", "host")):
        return draw.choice(ADDRESSES)
    if any(word in said for word in ("file", "folder", "dir", "root", "path")):
        return place
    return draw.choice((*TEXTS, *PLACES, *ADDRESSES, *GOOD))


def _is_taken(param: click.Parameter, value: str) -> bool:
    """Say whether the type of a parameter takes a value, asked as click does; of a place that depends on the folder."""
    if isinstance(param.type, click.Path):
        return True
    try:
        param.type.convert(value, param, None)
    except (click.UsageError, ValueError):
        return False
    return True
