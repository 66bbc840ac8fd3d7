# SPDX-License-Identifier: Apache-2.0
"""Write the byte code of all tests once, before many workers of pytest begin together.

In a fresh clone each of them would rewrite the asserts of the same files in the same order as its neighbours, and
compile the same modules of ours: what one has written the others have just made, too. 666 files are 7 s of CPU.

    python .ci/rewrite_tests.py [FOLDER]    of a folder of tests; without one, of all tests, and our own modules

pytest has no public way to it. Where a newer one does it in another way this says so and leaves the work to the
workers: nothing but time is lost.
"""

import compileall
import sys
from pathlib import Path

from _pytest.assertion import install_importhook, rewrite
from _pytest.config import get_config

ROOT = Path(__file__).parents[1]
OURS = ("megascale_ops", "agents", "kernels", "tests/fakes", "tests/fixtures")


def rewrite_tests(folder: Path) -> int:
    """Write what pytest would write of each test file that has no byte code of its present text; return how many."""
    config = get_config()
    install_importhook(config)
    count = 0
    for path in sorted({*folder.rglob("test_*.py"), *folder.rglob("conftest.py")}):
        kept = rewrite.get_cache_dir(path)
        code_path = kept / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, code_path) is None:
            stat, code = rewrite._rewrite_test(path, config)
            rewrite.try_makedirs(kept)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, code_path)
            count += 1
    return count


def main() -> None:
    """Do it, and say how many files it was."""
    named = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    try:
        sys.stdout.write(f"{rewrite_tests(named or ROOT / 'tests')} test files rewritten\n")
    except (AttributeError, TypeError, ValueError, SyntaxError) as error:
        sys.stderr.write(f"tests are left to pytest's workers to rewrite: {error}\n")
    for folder in () if named else OURS:
        compileall.compile_dir(ROOT / folder, quiet=1)


if __name__ == "__main__":
    main()
