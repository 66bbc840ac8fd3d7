# SPDX-License-Identifier: Apache-2.0
"""Merge the traces of several ranks: ``python -m megascale_kernels.tracing FILE ... -o JSON``."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megascale_kernels.progress.atomic_file import is_plain, put
from megascale_kernels.progress.text import printable
from megascale_kernels.tracing.chrome import chrome_trace
from megascale_kernels.tracing.dump import load_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge dumps of several ranks into one file for Perfetto; the exit code is 2 when that cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m megascale_kernels.tracing",
        description="Merge the traces of several ranks into one file for https://ui.perfetto.dev.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="what save_trace wrote, one per rank")
    parser.add_argument("-o", "--output", required=True, metavar="JSON", help="the file to write")
    options = parser.parse_args(arguments)
    try:
        return _merge(options.files, options.output)
    except KeyboardInterrupt:
        return 130  # a shell's exit code for: ended by SIGINT
    except BrokenPipeError:
        # The reader of our output (`head`) has seen enough; nothing may be written any more, not even at exit.
        sys.stdout = None
        return 0
    except OSError as error:
        sys.stderr.write(f"the summary cannot be written: {error.strerror}\n")
        sys.stdout = None
        return 2


def _merge(files: Sequence[str], output: str) -> int:
    try:
        trace = chrome_trace(load_trace(file) for file in dict.fromkeys(files))
        _write(output, json.dumps(trace))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    facts = ", ".join(f"{name}: {value}" for name, value in trace["otherData"].items())
    # Where the trace itself goes into a pipe, no sentence may follow it.
    where = sys.stdout if is_plain(Path(output)) else sys.stderr
    where.write(printable(f"{output}: {facts}") + "\n")
    where.flush()
    return 0


def _write(output: str, text: str) -> None:
    try:
        put(Path(output), text.encode())
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
