# SPDX-License-Identifier: Apache-2.0
"""Of a data loader's workers the one that has a batch to make is told from those that wait for work."""

import pytest
from megascale_agents.evidence.frame_classes import Frame
from megascale_agents.evidence.loader_workers import makes_a_batch, standing

TORCH = "/opt/lib/python3.11/site-packages/torch/utils/data/"
LOOP = (Frame("_worker_loop", TORCH + "_utils/worker.py", 334), Frame("run", "/usr/lib/python3.11/process.py", 108))
FETCH = (Frame("fetch", TORCH + "_utils/fetch.py", 54), *LOOP)
READS = (Frame("read", "/usr/lib/python3.11/site-packages/PIL/Image.py", 3), Frame("__getitem__", "/job/data.py", 12))


@pytest.mark.parametrize(
    ("frames", "makes"),
    [
        ((*READS, *FETCH), True),
        ((Frame("collate", TORCH + "_utils/collate.py", 398), *FETCH), True),
        (
            (Frame("select", "/usr/lib/python3.11/selectors.py", 415), Frame("get", "/usr/lib/queues.py", 113), *LOOP),
            False,
        ),
        ((Frame("_try_get_data", TORCH + "dataloader.py", 1291),), False),  # a loader within a worker waits itself
        ((Frame("fetch", "/job/fetch.py", 9),), False),
        ((), False),
    ],
)
def test_who_makes_a_batch(frames: tuple[Frame, ...], makes: bool) -> None:
    """What stands below torch's own loop of fetching or collating."""
    assert makes_a_batch(frames) is makes


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ((*READS, *FETCH), "read (PIL/Image.py:3) from __getitem__ (/job/data.py:12)"),
        ((READS[1], *FETCH), "__getitem__ (/job/data.py:12)"),
        (FETCH, "fetch (torch/utils/data/_utils/fetch.py:54)"),
    ],
)
def test_where_it_stands(frames: tuple[Frame, ...], words: str) -> None:
    """Its innermost frame, and the script's line that led there."""
    assert standing(frames) == words
