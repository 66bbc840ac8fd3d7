# SPDX-License-Identifier: Apache-2.0
"""Who is let in: the controller's tokens and certificates, read again when their files change, without a restart.

``megascale-ops token rotate FILE`` writes a new token and keeps the one before beside it (``FILE.former``); both are
valid until that file is gone. A certificate, its key, and the authority whose certificates clients must show
(``tls_client_ca``: mutual TLS) count from the next connection on. What can't be read changes nothing: the controller
goes on with what it has, and says so once.
"""

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from megascale_ops.controller.access import Access
from megascale_ops.controller.config import ControllerConfig, check_token
from megascale_ops.errors import UsageError
from megascale_ops.link.token_files import former_of, read_token_file

log = logging.getLogger(__name__)

# 1 s: two looks at files of a few KB.
LOOK_S = 1.0

Tokens = tuple[str, str]
Signature = tuple[int, int, int]  # inode, time of change in ns, size


class Entrance:
    """What one controller asks of its clients.

    Args:
        config: names the files.

    Raises:
        UsageError: one of them can't be used.
    """

    def __init__(self, config: ControllerConfig) -> None:
        check_token(config)
        self._config = config
        self._token_file = config.token_file
        self._tokens = _read_tokens(config.token_file)
        self.access = Access(self._tokens[0], time.time, self._tokens[1])
        self.tls: ssl.SSLContext | None = None
        self._token_known_by: Signature | None = None
        self._state = self._look()
        if config.tls_cert is not None and config.exit_with_parent:
            log.warning("tls_cert is not used: the controller that a run starts for itself serves http")
        elif config.tls_cert is not None:
            self.tls = _context(config)
        elif config.tls_client_ca is not None:
            raise UsageError("tls_client_ca is of no use without tls_cert: certificates are asked for over TLS alone")

    @property
    def context(self) -> Callable[[], ssl.SSLContext | None]:
        """Returns what the next connection is met with."""
        return lambda: self.tls

    async def follow(self) -> None:
        """Take in what changes, until cancelled."""
        told = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await asyncio.to_thread(self.poll)
                told = ""
            except UsageError as error:
                if str(error) != told:
                    log.error("tokens and certificates stay as they were: %s", error)  # noqa: TRY400  it is complete
                told = str(error)

    def poll(self) -> None:
        """Read files that have changed.

        Raises:
            UsageError: one can't be used; all is as it was.
        """
        if self._token_file is not None and not self._token_file.exists():
            self._token_file = _renamed(self._token_file, self._token_known_by)
        state = self._look()
        if state == self._state:
            return
        tokens = _read_tokens(self._token_file)
        tls = _context(self._config) if self.tls is not None else None
        if tls is not None:
            log.info("certificate and key were read again: they count from the next connection on")
        if tokens != self._tokens:
            also = "the one before is valid, too, until the change is ended" if tokens[1] else "no other one is valid"
            log.warning("the token in %s was read again: %s", self._token_file, also)
            self.access.renew(*tokens)
        self._state, self._tokens, self.tls = state, tokens, tls

    def _look(self) -> tuple[Signature | None, ...]:
        config = self._config
        files = [config.tls_cert, config.tls_key, config.tls_client_ca]
        if self._token_file is not None:
            files += [self._token_file, former_of(self._token_file)]
            self._token_known_by = _signature(self._token_file) or self._token_known_by
        return tuple(_signature(one) for one in files if one is not None)


def _signature(path: Path) -> Signature | None:
    """Return by what a change of a file is known; Kubernetes changes a link in the way to it."""
    try:
        found = os.stat(path)  # noqa: PTH116  following links
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _renamed(path: Path, known_by: Signature | None) -> Path:
    """Return where a file is that was renamed in its folder, as a run does with its own controller's; else ``path``."""
    try:
        return next((one for one in path.parent.iterdir() if known_by and _signature(one) == known_by), path)
    except OSError:
        return path


def _read_tokens(path: Path | None) -> Tokens:
    """Return the own token and the one before, "" for none."""
    if path is None:
        return "", ""
    former = former_of(path)
    return read_token_file(path), read_token_file(former) if former.exists() else ""


def _context(config: ControllerConfig) -> ssl.SSLContext:
    assert config.tls_cert is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"certificate {config.tls_cert} can't be used: {error}") from error
    if config.tls_client_ca is not None:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"authority {config.tls_client_ca} of clients can't be used: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context
