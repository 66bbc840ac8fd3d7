# SPDX-License-Identifier: Apache-2.0
"""Show boards: ``python -m megascale_kernels.progress FILE ... [--watch] [--json]``."""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence

from megascale_kernels.progress.text import describe, printable
from megascale_kernels.progress.view import BoardView, read_board, writer_lives
from megascale_kernels.progress.wait_chain import blame

REFRESH_S = 0.25
CLEAR = "\x1b[H\x1b[J"


def main(arguments: Sequence[str] | None = None) -> int:
    """Show boards; the exit code is 2 when a file is no board."""
    parser = argparse.ArgumentParser(
        prog="python -m megascale_kernels.progress",
        description="Show what the kernels of one or more ranks are doing, from their progress boards.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a board; give one per rank to see who waits for whom")
    parser.add_argument("--watch", action="store_true", help="show it again four times a second until Ctrl-C")
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="print JSON (with --watch: one line each time)"
    )
    options = parser.parse_args(arguments)
    try:
        return (
            _watch(options.files, as_json=options.as_json) if options.watch else _show(options.files, options.as_json)
        )
    except BrokenPipeError:
        # The reader of our output (`head`) has seen enough; nothing may be written any more, not even at exit.
        sys.stdout = None
        return 0
    except OSError as error:
        sys.stderr.write(f"the boards cannot be shown: {error.strerror}\n")
        sys.stdout = None
        return 2


def _show(files: Sequence[str], as_json: bool) -> int:
    views, errors = _read(files)
    if views or as_json:
        sys.stdout.write((_json(views, errors, indent=2) if as_json else _text(views, time.time_ns())) + "\n")
        sys.stdout.flush()
    for error in errors:
        sys.stderr.write(error + "\n")
    return 2 if errors else 0


def _watch(files: Sequence[str], *, as_json: bool) -> int:
    """Show boards until Ctrl-C, which is how it is meant to end; a file away for a moment is said, not fatal."""
    views, errors = _read(files)
    if not views:
        return _show(files, as_json)
    # A shell without job control starts its children with SIGINT ignored, and Python then installs no handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while True:
            if as_json:
                text = _json(views, errors, indent=None)
            else:
                shown = [_text(views, time.time_ns()), *(printable(error) for error in errors), ""]
                text = (CLEAR if sys.stdout.isatty() else "") + "\n".join(shown)
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            time.sleep(REFRESH_S)
            views, errors = _read(files)
    except KeyboardInterrupt:
        return 0


def _read(files: Sequence[str]) -> tuple[list[BoardView], list[str]]:
    """The boards, one per rank, and a sentence for each file that is none."""
    views: dict[int, BoardView] = {}
    errors = []
    for file in dict.fromkeys(files):
        try:
            view = read_board(file)
        except ValueError as error:
            errors.append(str(error))
            continue
        if view.rank in views:
            errors.append(f"{file} is a second board of rank {view.rank}: give one per rank, all of one job")
        else:
            views[view.rank] = view
    return [views[rank] for rank in sorted(views)], errors


def _text(views: Sequence[BoardView], now_ns: int) -> str:
    parts = ["\n".join(blame(views).lines)] if len(views) > 1 else []
    parts += [describe(view, now_ns, writer_alive=writer_lives(view)) for view in views]
    return "\n\n".join(parts)


def _json(views: Sequence[BoardView], errors: Sequence[str], indent: int | None) -> str:
    found = {
        "boards": [{"board": _plain(view), "writer_alive": writer_lives(view)} for view in views],
        "blame": _plain(blame(views)),
        "errors": list(errors),
    }
    return json.dumps(found, indent=indent)


def _plain(value: object) -> object:
    """Records as dictionaries, which JSON would otherwise make lists."""
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        parts = [_plain(part) for part in value]
        return dict(zip(fields, parts, strict=True)) if fields else parts
    return value


if __name__ == "__main__":
    sys.exit(main())
