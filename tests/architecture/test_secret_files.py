# SPDX-License-Identifier: Apache-2.0
"""Files with tokens and passwords are opened in one place, so that one rule says which of them are refused.

A reader is found in two ways: a call that reads a file and names a token or a password, and a function that reads the
file whose name is handed to it where some call hands it the name of such a file.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("megascale_ops/**/*.py"), *ROOT.glob("agents/megascale_agents/**/*.py")])
THE_ONE = ROOT / "megascale_ops" / "link" / "token_files.py"

READS = {"open", "opened", "read", "read_text", "read_bytes", "fdopen"}
SECRET = re.compile(r"token|passw|secret", re.IGNORECASE)
SECRET_FILE = re.compile(r"(token|passw\w*|secret)_?(file|path)", re.IGNORECASE)


def called(call: ast.Call) -> str:
    """Return the last name of what is called."""
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Every call below."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def readers_of_what_they_are_given(tree: ast.AST) -> Iterator[str]:
    """Return the functions in which a call that reads a file names one of their parameters."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        given = {each.arg for each in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]}
        for call in (call for call in calls(function) if called(call) in READS):
            names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
            if names & given - {"self"}:
                yield function.name


def _calls_one_of(names: AbstractSet[str], text: str) -> bool:
    """Return whether a text may call one of these; where it can't, it need not be parsed."""
    return not names.isdisjoint(re.findall(r"\b(\w+)\s*\(", text))


def found_in(sources: Mapping[str, str]) -> list[str]:
    """Return every place that reads such a file by itself."""
    readers = {
        reader
        for text in sources.values()
        if _calls_one_of(READS, text)
        for reader in readers_of_what_they_are_given(ast.parse(text))
    }
    found = []
    for name, source in sources.items():
        if not SECRET.search(source) or not _calls_one_of(READS | readers, source):
            continue
        for call in calls(ast.parse(source)):
            if called(call) not in READS | readers:
                continue  # before it is written out: of tens of thousands of calls a few hundred read files
            text = ast.unparse(call)
            directly = called(call) in READS and SECRET.search(text)
            handed_on = called(call) in readers and any(
                SECRET_FILE.search(ast.unparse(each)) for each in [*call.args, *(word.value for word in call.keywords)]
            )
            if directly or handed_on:
                found.append(f"{name}:{call.lineno}: {text}")
    return found


def test_no_other_module_opens_a_file_with_a_secret() -> None:
    """Four readers had three rules once: one took a file that every user may read."""
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in SOURCES if path != THE_ONE}
    assert len(sources) > 300

    assert found_in(sources) == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(config):\n    return config.token_file.read_text()",
        "def f(config):\n    with open(config.token_file) as file:\n        return file.read()",
        "def f(token_path):\n    return Path(token_path).read_bytes()",
        "def f(path, x):\n    return Path(path).read_text()\n\ndef g(token_file):\n    return f(token_file, 0)",
        "def f(path):\n    return foreign.read(path, 99)\n\ndef g(o):\n    return f(path=o.password_file)",
        "def f(token):\n    return os.fdopen(os.open(token, 0))",
    ],
)
def test_a_reader_of_its_own_would_be_found(text: str) -> None:
    """The negative control: each of these is what the test above looks for."""
    assert found_in({"sample.py": text})


def test_what_only_carries_the_name_is_not_accused() -> None:
    """Names of such files may be handed on to the one reader, and other files may be read beside them."""
    text = """
def f(config, path):
    text = path.read_text()
    return text, read_token_file(config.token_file), start(f"--token-file={config.token_file}")
"""

    assert found_in({"sample.py": text}) == []
