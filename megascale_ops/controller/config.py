# SPDX-License-Identifier: Apache-2.0
"""What can be set about a controller, and the checks that need the machine: address and token file."""

import ipaddress
import os
import tempfile
from pathlib import Path
from typing import Literal

import msgspec

from megascale_ops.errors import UsageError
from megascale_ops.notify.config import NotifyConfig
from megascale_ops.schema.recording.entries import FOLDER

# 16 MB: the records of jobs with 12,500 nodes, and what happened of late.
LEAST_JOURNAL_MB = 16


class ControllerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to serve. Loopback by default; beyond it a token is required."""

    listen: str = "127.0.0.1:7070"  # HOST:PORT; port 0 takes any free one
    store: str = "sqlite:///ops.db"  # or postgresql+psycopg://USER@HOST/DATABASE
    # 1,024 MB: 100,000 incidents with what was decided about them. Beyond it the oldest events go, then the oldest
    # incidents; the state of jobs is never deleted.
    journal_mb: int = 1024
    # 60 s: a PostgreSQL that is started again, or fails over to its standby, answers within that time.
    store_wait_s: float = 60.0
    # "": what is listened on, with the host's name where that is every address.
    advertise: str = ""  # http://HOST:PORT by which clients and other controllers on the same database reach this one
    token_file: Path | None = None
    open_page: bool = False  # clients of the port may read what the page shows, without the token
    port_file: Path | None = None  # the bound port is written there
    run_dir: Path | None = None  # where incidents are kept when the job's runner names no folder
    exit_with_parent: int = 0  # end when this process is gone; 0: never
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None  # mutual TLS: clients must show a certificate of this authority
    # auto: a controller that Slurm has started, in a step or batch script, speaks to Slurm. Kubernetes must be named: a
    # job's pod has an account too, which may change no node.
    engine: Literal["auto", "slurm", "kubernetes", "none"] = "auto"
    # 60 s: one call of sinfo a minute; what an administrator drains goes on with what it runs anyway.
    node_states_s: float = 60.0
    otlp_endpoint: str = ""  # an OpenTelemetry collector, http://HOST:4318; none: nothing is sent
    record: Path | None = None  # folder for recordings of what comes in; default: recording, beside the journal
    # 64 MB: hours of a small job, some five minutes of 12,288 ranks; 0: nothing is recorded.
    record_mb: int = 64
    # 60 minutes: a person who sees an incident within the hour can still export what led to it.
    record_minutes: float = 60.0
    notify: NotifyConfig = NotifyConfig()  # targets for messages about incidents


def parse_listen(listen: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` (``[::1]:7070`` for IPv6).

    Raises:
        UsageError: it is no such address.
    """
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"listen address {listen!r} can't be used: it looks like HOST:PORT, e.g. 127.0.0.1:7070")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_token(config: ControllerConfig) -> None:
    """Refuse to serve beyond this machine without a token.

    Raises:
        UsageError: the address is reachable from elsewhere and no token is given.
    """
    host, _port = parse_listen(config.listen)
    if config.token_file is None and not is_loopback(host):
        raise UsageError(
            f"refusing to listen on {host} without a token: anybody who reaches it could stop jobs; "
            "give --token-file FILE (`megascale-ops token new FILE` makes one) or listen on 127.0.0.1"
        )


def recording_folder(config: ControllerConfig) -> Path | None:
    """Return where what comes in is recorded; None: nowhere.

    Raises:
        UsageError: bounds that can't be.
    """
    if config.record_mb < 0 or not config.record_minutes > 0:
        raise UsageError(
            f"record_mb = {config.record_mb}, record_minutes = {config.record_minutes:g} can't be: at least 0 MB "
            "(nothing is recorded) and more than 0 minutes"
        )
    if not config.record_mb:
        return None
    if config.record is not None:
        return config.record
    if config.run_dir is not None:
        return config.run_dir / FOLDER
    file = config.store.removeprefix("sqlite:///")
    return Path(file).expanduser().absolute().parent / FOLDER if file and file != config.store else None


def require_recording(config: ControllerConfig) -> None:
    """Refuse to serve where what a person wants recorded can't be: the folder that was named is made and written to.

    The default folder was not asked for: what can't be recorded there is told later, once.

    Raises:
        UsageError: nothing can be written there, or bounds that can't be.
    """
    folder = recording_folder(config)
    if folder is None or config.record is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        # A file that is in the way may be the folder's own name or one above it.
        above = (folder, *folder.parents)
        in_the_way = next((one for one in above if os.path.lexists(one) and not os.path.isdir(one)), None)  # noqa: PTH112  Path's raise
        number = getattr(error, "errno", None)
        why = f"{in_the_way} is no folder" if in_the_way is not None else os.strerror(number) if number else str(error)
        raise UsageError(
            f"nothing can be recorded in {folder}: {why}; give --record another folder, or --record-mb 0 to record "
            "nothing"
        ) from error


def limit_of(config: ControllerConfig) -> int:
    """Return how many bytes the journal may have.

    Raises:
        UsageError: so few that a job could not be journaled.
    """
    if config.journal_mb < LEAST_JOURNAL_MB:
        raise UsageError(f"journal_mb = {config.journal_mb} is too little: at least {LEAST_JOURNAL_MB} are needed")
    return config.journal_mb * 1024 * 1024
