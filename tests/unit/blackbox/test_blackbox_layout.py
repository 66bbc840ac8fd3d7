# SPDX-License-Identifier: Apache-2.0
"""The map of the black box holds together, and C sees the same one."""

import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from megascale_ops import blackbox
from megascale_ops.blackbox.layout import FILE_BYTES, HEADER_BYTES, HOT_BYTES, HOT_OFFSET, RINGS, Ring, render_header
from megascale_ops.schema.version import BOX_VERSION

HEADER_FILE = Path(blackbox.__file__).with_name("blackbox.h")


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: ring.name)
def test_fields_are_aligned_and_inside_their_slot(ring: Ring) -> None:
    """Every number stands at a multiple of its size, no field reaches beyond its slot, slots begin at words."""
    assert ring.offset % 8 == 0
    assert ring.stride % 8 == 0
    assert ring.codec.size <= ring.stride
    for field in ring.fields:
        assert field.kind == "chars" or field.offset % field.size == 0, field.name


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: ring.name)
def test_a_ring_survives_a_writer_killed_in_the_middle(ring: Ring) -> None:
    """Whatever begins with a sequence has two slots at least, so one whole record is always left."""
    assert ring.fields[0].name != "sequence" or ring.slots >= 2


def test_rings_do_not_overlap() -> None:
    """Each ring ends before the next begins, within the file; the file is at most 400 KiB."""
    ends = [(ring.offset, ring.offset + ring.size) for ring in RINGS]

    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert ends[-1][1] <= FILE_BYTES <= 404 * 1024
    assert RINGS[2].offset == HEADER_BYTES == HOT_OFFSET
    assert HOT_BYTES <= 4096


def test_the_committed_header_is_printed_from_the_table() -> None:
    """``blackbox.h`` is what ``python -m megascale_ops.blackbox.layout`` prints."""
    assert HEADER_FILE.read_text() == render_header(BOX_VERSION)


def test_the_compiler_agrees_with_python(tmp_path: Path) -> None:
    """The system's C compiler finds every offset and size where Python has it."""
    prints = []
    expected = {}
    for ring in RINGS:
        c_type = f"struct megascale_box_{ring.name}"
        expected[ring.name] = (ring.offset, ring.slots, ring.stride)
        macro = f"MEGASCALE_BOX_{ring.name.upper()}"
        prints.append(f'printf("{ring.name} %u %u %zu\\n", {macro}_OFFSET, {macro}_SLOTS, sizeof({c_type}));')
        for field in ring.fields:
            expected[f"{ring.name}.{field.name}"] = (field.offset, field.size, 0)
            member = f"offsetof({c_type}, {field.name}), sizeof((({c_type} *)0)->{field.name})"
            prints.append(f'printf("{ring.name}.{field.name} %zu %zu 0\\n", {member});')
    program = tmp_path / "show.c"
    program.write_text(f'#include "{HEADER_FILE}"\n#include <stdio.h>\nint main(void) {{ {"".join(prints)} }}\n')

    compile_c = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-o", str(tmp_path / "show"), str(program)]
    subprocess.run(compile_c, check=True, timeout=60)
    shown = subprocess.run([str(tmp_path / "show")], check=True, timeout=10, capture_output=True, text=True).stdout

    found = {name: tuple(map(int, rest)) for name, *rest in (line.split() for line in shown.splitlines())}
    assert found == expected


def test_the_header_compiles_as_cpp(tmp_path: Path) -> None:
    """CUDA sources are C++: the header is that, too."""
    program = tmp_path / "show.cc"
    program.write_text(f'#include "{HEADER_FILE}"\nint main() {{ return 0; }}\n')

    done = subprocess.run(["cc", "-std=c++17", "-fsyntax-only", str(program)], check=False, timeout=60)

    assert done.returncode == 0


def test_the_header_names_no_path_of_a_machine() -> None:
    """What is committed is the same wherever it was printed."""
    assert not re.search(r"/(home|root|tmp|usr)/", HEADER_FILE.read_text())
