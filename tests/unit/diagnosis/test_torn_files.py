# SPDX-License-Identifier: Apache-2.0
"""A rank that died over a file which is not whole says so in words that people understand; no other error does."""

import pytest

from megascale_ops.diagnosis.exits.classify import Ended, classify
from megascale_ops.diagnosis.exits.error_records import TORN
from megascale_ops.diagnosis.exits.last_traceback import with_error
from megascale_ops.schema.messages import RankExit

FRAMES = {
    "load": '  File "/opt/py/site-packages/torch/serialization.py", line 1432, in load\n',
    "map": '  File "/opt/py/site-packages/torch/storage.py", line 411, in from_file\n',
    "zip": '  File "/usr/lib/python3.12/zipfile/__init__.py", line 1349, in _RealGetContents\n',
    "own": '  File "/w/train.py", line 88, in load_checkpoint\n',
    "socket": '  File "/usr/lib/python3.12/socket.py", line 700, in setsockopt\n',
    "step": '  File "/w/train.py", line 12, in step\n',
}


@pytest.mark.parametrize(
    ("frames", "raised", "is_torn"),
    [
        ("load", "OSError: [Errno 22] Invalid argument", True),
        ("map", "OSError: [Errno 22] Invalid argument: '/ck/optim_5.pt'", True),
        ("own", "OSError: [Errno 22] Invalid argument", True),
        ("zip", "OSError: [Errno 22] Invalid argument", True),
        ("load", "EOFError: Ran out of input", True),
        ("own", "EOFError", True),
        (
            "step",
            "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
            True,
        ),
        ("step", "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer", True),
        ("step", "tarfile.ReadError: unexpected end of data", True),
        ("socket", "OSError: [Errno 22] Invalid argument", False),
        ("step", "OSError: [Errno 22] Invalid argument", False),
        ("step", "EOFError", False),
        ("load", "KeyError: 'optimizer'", False),
        ("load", "FileNotFoundError: [Errno 2] No such file or directory: '/ck/a.pt'", False),
    ],
)
def test_a_torn_file_is_told(frames: str, raised: str, is_torn: bool) -> None:
    """The reason carries the hint; it stays an exception, and an error of a socket or of a step carries none."""
    text = f"Traceback (most recent call last):\n{FRAMES[frames]}{raised}\n"
    exit_ = with_error(RankExit(3, 3, 9, 1, 0.0, stderr_tail=text))

    judged = classify(Ended("n1", exit_, 0.1), None, None)

    assert judged.fault == "exception"
    assert (TORN in judged.why) is is_torn, judged.why
