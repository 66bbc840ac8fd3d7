# SPDX-License-Identifier: Apache-2.0
"""The file of tuned choices: it survives damage, neighbours and changes of version."""

import json
import logging
import multiprocessing
from pathlib import Path

import pytest
from megascale_kernels.autotune import store
from megascale_kernels.autotune.store import Entry, bucket, digest_of, entry_key, read, write
from megascale_kernels.planning.config import Config, read_config

ENTRY = Entry(Config(block_n=128, splits=2), 0.0013, 0.0016)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Entries come back whole, the serial path's too, and those of another environment do not."""
    path = tmp_path / "deep" / "choices.json"

    assert write(path, "here", "a", ENTRY)
    assert write(path, "here", "b", Entry(None, 2.0, 1.0))
    assert write(path, "elsewhere", "a", Entry(Config(), 1.0, 2.0))

    assert read(path, "here") == {"a": ENTRY, "b": Entry(None, 2.0, 1.0)}
    assert read(path, "nowhere") == {}
    assert [file.name for file in path.parent.iterdir() if file.suffix == ".new"] == []


def test_no_file_is_no_memory(tmp_path: Path) -> None:
    """The first start finds nothing and says nothing."""
    assert read(tmp_path / "choices.json", "here") == {}


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 99, "environments": {}}',
        '{"format": 1, "environments": {"here": 3}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_told_once_and_replaced(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs the memory, not the run, and the next writing repairs it."""
    path = tmp_path / "choices.json"
    path.write_text(damage, encoding="utf-8")

    with caplog.at_level(logging.WARNING, "megascale_kernels.autotune"):
        assert read(path, "here") == {}
        assert read(path, "here") == {}
        assert write(path, "here", "a", ENTRY)

    assert [str(path) in record.getMessage() for record in caplog.records] == [True]
    assert read(path, "here") == {"a": ENTRY}


@pytest.mark.parametrize(
    "change",
    [{"block_m": "128"}, {"block_m": 0}, {"carrier": "pigeon"}, {"surprise": 1}, {"kernel": None}, {"stages": True}],
)
def test_an_entry_that_makes_no_sense_is_ignored(
    tmp_path: Path, change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """A hand-edited configuration of the wrong kind never reaches a kernel; its neighbours stay."""
    path = tmp_path / "choices.json"
    write(path, "here", "good", ENTRY)
    write(path, "here", "bad", ENTRY)
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["environments"]["here"]["bad"]["config"].update(change)
    path.write_text(json.dumps(raw), encoding="utf-8")

    assert read(path, "here") == {"good": ENTRY}
    assert "bad" in caplog.text


def test_a_time_beyond_all_numbers_is_ignored(tmp_path: Path) -> None:
    """A damaged time of 400 digits is one entry lost."""
    path = tmp_path / "choices.json"
    write(path, "here", "good", ENTRY)
    write(path, "here", "bad", ENTRY)
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["environments"]["here"]["bad"]["time_s"] = 10**400
    path.write_text(json.dumps(raw), encoding="utf-8")

    assert read(path, "here") == {"good": ENTRY}


def test_without_a_home_the_process_remembers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container that runs under a number without a name has no home: that costs the memory, not the call."""
    monkeypatch.delenv("MEGASCALE_KERNEL_CACHE", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])

    assert store.cache_file() is None
    assert read(store.cache_file(), "here") == {}
    assert not write(store.cache_file(), "here", "a", ENTRY)
    assert "no home folder, and MEGASCALE_KERNEL_CACHE" in caplog.text


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tuning goes on; the result lives as long as the process."""
    (tmp_path / "file").write_text("", encoding="utf-8")

    assert not write(tmp_path / "file" / "choices.json", "here", "a", ENTRY)
    assert "this process only" in caplog.text


def test_a_full_disk_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every tuning tries again, and what each began would fill the disk further."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)

    assert not write(tmp_path / "choices.json", "here", "a", ENTRY)
    assert [file.name for file in tmp_path.iterdir()] == ["choices.lock"]


def _write_many(path: Path, who: int) -> None:
    for number in range(10):
        write(path, "here", f"{who}-{number}", ENTRY)


@pytest.mark.processes
def test_jobs_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Four processes write ten entries each into one file; all forty are there."""
    path = tmp_path / "choices.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, who)) for who in range(4)]

    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=180)

    assert [writer.exitcode for writer in writers] == [0] * 4
    assert len(read(path, "here")) == 40


def test_rows_share_a_choice_within_a_bucket() -> None:
    """Powers of two and three quarters of them end a bucket."""
    assert [bucket(m) for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 6144, 6145, 8192, 8193)] == [
        1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 6144, 8192, 8192, 12288,
    ]  # fmt: skip
    assert entry_key("ag_gemm", 7000, 7168, 8192) == "ag_gemm m8192 n7168 k8192"


def test_the_environment_names_everything_a_measurement_depends_on() -> None:
    """GPU, multiprocessors, libraries, our code, ranks, type."""
    name = store.environment_key("NVIDIA H200", 132, 4, "bfloat16")

    assert name.startswith("NVIDIA H200 | 132 | torch ")
    assert name.endswith(" | world 4 | bfloat16")
    assert "triton 3" in name
    assert "nccl" in name
    assert "megascale" in name


def test_the_place_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MEGASCALE_KERNEL_CACHE names the folder; without it the home's cache serves."""
    monkeypatch.setenv("MEGASCALE_KERNEL_CACHE", str(tmp_path))
    assert store.cache_file() == tmp_path / "choices.json"

    monkeypatch.delenv("MEGASCALE_KERNEL_CACHE")
    assert store.cache_file() == Path.home() / ".cache" / "megascale-ops" / "kernels" / "choices.json"


def test_every_configuration_survives_the_file() -> None:
    """What `_asdict` gives, `read_config` takes."""
    for config in (
        Config(), Config(carrier="sm", comm_ctas=8), Config(kernel="hopper", tail_split=2, planned=True),
        Config(mixed=True), Config(mixed=False, lead=2),
    ):  # fmt: skip
        assert read_config(json.loads(json.dumps(config._asdict()))) == config


@pytest.mark.parametrize(
    ("file", "counts"),
    [("gemm_ar.py", True), ("device/gemm.py", True), ("ag_gemm/hopper.py", True), ("bench/rows.py", False)],
)
def test_a_measurement_belongs_to_the_code_of_every_room_that_is_launched(
    tmp_path: Path, file: str, *, counts: bool
) -> None:
    """A changed kernel starts a new environment, in whichever room it stands; a changed benchmark does not."""
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("1", encoding="utf-8")
    before = digest_of(tmp_path)

    path.write_text("2", encoding="utf-8")

    assert (digest_of(tmp_path) != before) is counts
