# SPDX-License-Identifier: Apache-2.0
"""The reference of what a script or a notebook imports, read from signatures and docstrings without running any of it.

Reading the source (``ast``) instead of importing it needs neither torch nor Triton.
"""

import ast
import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import NamedTuple

from megascale_docs.markdown import page, prose

ROOT = Path(__file__).parents[2]
_Definition = ast.FunctionDef | ast.ClassDef


class Room(NamedTuple):
    """What is imported from where: ``names`` of each source file, in the order in which they are told."""

    title: str
    about: str
    files: dict[str, tuple[str, ...]]


# What else is public in these is for rooms of ours: it opens a recording, or carries a kernel's launch.
_FOR_USERS = {"Recorder": ("step", "loss", "mesh", "phase"), "Workspace": ("close", "meet", "check", "reset")}
_ROOMS = (
    Room(
        "megascale_ops.client",
        "Ask a controller, or what a run left behind. Needs no torch.",
        {"megascale_ops/client.py": ("Client", "Judged", "runs", "rows", "rank_rows", "step_rows")},
    ),
    Room(
        "megascale_ops.recorder",
        "`from megascale_ops.recorder import recorder`, in a training script that wants to say more. Outside of a run "
        "every call does nothing.",
        {"megascale_ops/recorder/recording/api.py": ("Recorder",)},
    ),
    Room(
        "megascale_ops.checkpoint",
        "Checkpoints that are whole or not there, verified before they are loaded.",
        {
            "megascale_ops/checkpoint/manager.py": ("CheckpointManager",),
            "megascale_ops/checkpoint/manifest.py": ("CheckpointReport",),
            "megascale_ops/checkpoint/latest.py": ("newest", "verify"),
            "megascale_ops/checkpoint/state/per_rank.py": ("PerRank", "RandomStates"),
            "megascale_ops/checkpoint/tiers/settings.py": ("LocalTier",),
        },
    ),
    Room(
        "megascale_kernels",
        "Matrix products that overlap their communication; needs the extra `kernels`.",
        {
            "kernels/megascale_kernels/memory/workspace.py": ("Workspace",),
            "kernels/megascale_kernels/torch_api/operators.py": (
                "ag_gemm",
                "gemm_rs",
                "swiglu_gemm_rs",
                "gated_mlp",
                "gemm_ar",
            ),
            "kernels/megascale_kernels/torch_api/layers.py": ("ColumnParallelLinear", "RowParallelLinear"),
            "kernels/megascale_kernels/torch_api/gated_mlp.py": ("GatedMLP",),
            "kernels/megascale_kernels/torch_api/activations.py": ("swiglu",),
            "kernels/megascale_kernels/torch_api/parallel_styles.py": ("OverlapColwise", "OverlapRowwise"),
            "kernels/megascale_kernels/torch_api/sequence_parallel.py": ("sp_attention", "SequenceParallelAttention"),
            "kernels/megascale_kernels/torch_api/moe_ops.py": ("MoELayer", "moe_experts"),
            "kernels/megascale_kernels/moe/schedules/expert_pipeline.py": ("moe_pipelined",),
            "kernels/megascale_kernels/moe/schedules/parm.py": ("moe_parm", "ParmGroups", "ParmRouting"),
            "kernels/megascale_kernels/moe/schedules/schedule_model.py": ("Links",),
            "kernels/megascale_kernels/torch_api/moe_shortcut.py": ("ShortcutExperts", "ShortcutBlock"),
            "kernels/megascale_kernels/moe/schedules/locality.py": ("locality_loss", "local_experts", "capacity_bound"),
            "kernels/megascale_kernels/moe/moe_config.py": ("MoeConfig",),
            "kernels/megascale_kernels/attention/sharding.py": ("shard_sequence", "unshard_sequence", "positions_of"),
            "kernels/megascale_kernels/attention/problem.py": ("AttentionConfig",),
            "kernels/megascale_kernels/planning/config.py": ("Config",),
            "kernels/megascale_kernels/errors.py": (
                "KernelError",
                "MissingDependency",
                "RankMismatch",
                "TileTimeout",
                "Unsupported",
                "WorkspaceTooSmall",
            ),
        },
    ),
)


def python_api() -> str:
    """Return the page.

    Raises:
        LookupError: a name that is told of is not in its file.
    """
    return page("Python API", *(text for room in _ROOMS for text in _room(room)))


def _room(room: Room) -> Iterator[str]:
    yield f"## {room.title}"
    yield room.about
    for path, names in room.files.items():
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        found = {node.name: node for node in tree.body if isinstance(node, _Definition)}
        for name in names:
            if name not in found:
                raise LookupError(f"{path} has no {name}: python_api.py tells of it")
            yield from _definition(found[name])


def _definition(node: _Definition) -> Iterator[str]:
    """Yield a function, or a class with its public methods."""
    yield f"### {node.name}"
    yield f"```python\n{_signature(node)}\n```"
    yield _docstring(node)
    if isinstance(node, ast.ClassDef):
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
        for method in methods:
            if method.name in _FOR_USERS.get(node.name, (method.name,)):
                yield f"#### {node.name}.{method.name}"
                yield f"```python\n{_signature(method)}\n```"
                yield _docstring(method)


def _signature(node: _Definition) -> str:
    """Return the line that defines it, of a class with what is given to construct one."""
    if isinstance(node, ast.FunctionDef):
        before = "".join(f"@{ast.unparse(one)}\n" for one in node.decorator_list if ast.unparse(one) == "property")
        return (
            f"{before}def {node.name}({_arguments(node)}){f' -> {ast.unparse(node.returns)}' if node.returns else ''}"
        )
    made = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    if made is not None:
        return f"class {node.name}({_arguments(made)})"
    fields = [
        ast.unparse(one)
        for one in node.body
        if isinstance(one, ast.AnnAssign) and not ast.unparse(one.target).startswith("_")
    ]
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    return f"class {node.name}({bases})" + "".join(f"\n    {one}" for one in fields)


def _arguments(node: ast.FunctionDef) -> str:
    words = ast.unparse(node.args)
    return re.sub(r"^self(, )?", "", words)


def _docstring(node: _Definition) -> str:
    """Return a docstring: its paragraphs, its sections (Args, Raises) as lists."""
    shown = []
    for paragraph in cleandoc(ast.get_docstring(node) or "").split("\n\n"):
        head, _, rest = paragraph.partition("\n")
        if re.fullmatch(r"(Args|Raises|Returns|Attributes|Yields):", head):
            shown += [f"**{head}**", "\n".join(f"- {prose(one)}" for one in _items(rest))]
        elif head.startswith("    "):
            shown.append(f"```python\n{cleandoc(paragraph)}\n```")
        else:
            shown.append(prose(" ".join(paragraph.split())))
    return "\n\n".join(shown)


def _items(text: str) -> list[str]:
    """Return what a section lists; a line that is indented further goes on with the one before."""
    items: list[str] = []
    for line in text.splitlines():
        name, colon, meaning = line.strip().partition(": ")
        if line.startswith("        ") and items:
            items[-1] += f" {line.strip()}"
        else:
            items.append(f"``{name}``: {meaning}" if colon else line.strip())
    return items
