# SPDX-License-Identifier: Apache-2.0
"""Files are written beside and renamed in one place; who renames by himself has a reason that stands here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("megascale_ops", "agents/megascale_agents", "kernels/megascale_kernels", "dashboards", ".ci")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
WHY = {
    "megascale_ops/whole_file.py": "the one place",
    "megascale_ops/blackbox/private_folder.py": "within an open folder, so that no link on the way leads elsewhere",
    "megascale_ops/blackbox/writer.py": "maps a box into memory, and keeps the one of before under another name",
    "megascale_ops/checkpoint/lock_files.py": "the name beside it says who writes; its leftovers are tidied up by that",
    "megascale_ops/checkpoint/storage.py": "moves whole folders",
    "megascale_ops/checkpoint/tiers/node_folder.py": "moves whole folders",
    "megascale_ops/controller/history/files.py": "puts a damaged file aside",
    "megascale_ops/controller/journal/salvage.py": "puts a damaged journal aside",
    "megascale_ops/recorder/nccl_profiler/build.py": "the compiler writes the file",
    "megascale_ops/runner/services/companions.py": "a token takes its place once its controller serves",
    "megascale_ops/runner/elastic.py": "puts the folder of an earlier run aside",
    "kernels/megascale_kernels/progress/atomic_file.py": "kernels import nothing of ours",
    "kernels/megascale_kernels/progress/board_file.py": "maps a board into memory",
    "agents/megascale_agents/ownership/files.py": "as the owner of the job, within an open folder",
}


# What `renames` looks for, as text: four files of five have none of it, and are not parsed.
CALLED_SO = re.compile(r"\.\s*(?:replace|renames?|move)\s*\(")


def renames(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that give a file another name: ``replace`` of one place (that of a text has two), ``rename``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of_os = isinstance(node.func.value, ast.Name) and node.func.value.id in {"os", "shutil"}
        named = {"replace", "rename", "renames", "move"} if of_os else {"replace", "rename"}
        alone = len(node.args) == 1 and not node.keywords
        if node.func.attr in named and (of_os or alone):
            yield node


def test_whoever_renames_a_file_has_a_reason() -> None:
    """Ten copies of the same lines differed in what they left behind, and in whose link they followed."""
    found = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if CALLED_SO.search(text := path.read_text(encoding="utf-8"))
        and next(renames(ast.parse(text)), None) is not None
    }

    assert found == set(WHY)


@pytest.mark.parametrize(
    "text",
    [
        "beside.replace(path)",
        "os.replace(a, b)",
        "os.rename(a, b, src_dir_fd=f)",
        "Path(a).rename(b)",
        "shutil.move(a, b)",
    ],
)
def test_one_more_would_be_found(text: str) -> None:
    """The negative control: ways to rename."""
    assert CALLED_SO.search(text)
    assert list(renames(ast.parse(text)))


@pytest.mark.parametrize(
    "text", ["said.replace('a', 'b')", "structs.replace(job, state=s)", "now.replace(tzinfo=None)"]
)
def test_what_is_only_called_alike_is_not_accused(text: str) -> None:
    """Texts, structs and times have a ``replace``, too."""
    assert not list(renames(ast.parse(text)))
