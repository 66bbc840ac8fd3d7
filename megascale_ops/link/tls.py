# SPDX-License-Identifier: Apache-2.0
"""Whom a client of ours trusts over https, and what it shows: from the environment, as SSL_CERT_FILE is.

``MEGASCALE_TLS_CA`` is the authority to trust instead of the system's, ``MEGASCALE_TLS_CERT`` and ``MEGASCALE_TLS_KEY``
are the certificate and key to show where a controller asks for one (mutual TLS). They hold for all clients of a
process alike, so that no verb needs an option. After a connection that failed changed files are read again.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from megascale_ops.errors import UsageError
from megascale_ops.schema import environment


class ClientTls:
    """Certificates of one client.

    Args:
        authority: file with whom to trust; "": whom the system trusts.
        certificate: file with what is shown; "": nothing.
        key: the certificate's; "": in the same file.

    Raises:
        UsageError: a file can't be used.
    """

    def __init__(self, authority: str = "", certificate: str = "", key: str = "") -> None:
        import ssl  # 4 MB that plain HTTP does without

        self._files = (authority, certificate, key)
        if key and not certificate:
            raise UsageError(f"{environment.TLS_KEY} is of no use without {environment.TLS_CERT}")
        try:
            self.context: ssl.SSLContext = ssl.create_default_context(cafile=authority or None)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"certificate file {authority} can't be used: {error}") from error
        self._state = self._look()
        self._load()

    def refresh(self) -> None:
        """Read files again that have changed since; they count from the next connection on.

        Raises:
            UsageError: a file can't be used.
        """
        state = self._look()
        if state != self._state:
            self._load()
            self._state = state

    def _load(self) -> None:
        authority, certificate, key = self._files
        if certificate:
            try:
                self.context.load_cert_chain(certificate, key or None)
            except OSError as error:  # ssl.SSLError is one
                raise UsageError(f"client certificate {certificate} can't be used: {error}") from error
        if authority:
            try:
                self.context.load_verify_locations(authority)
            except OSError as error:
                raise UsageError(f"certificate file {authority} can't be used: {error}") from error

    def _look(self) -> tuple[int, ...]:
        times = []
        for file in filter(None, self._files):
            try:
                times.append(Path(file).stat().st_mtime_ns)
            except OSError:
                times.append(0)
        return tuple(times)


def client_tls(ca_file: Path | None = None, environ: Mapping[str, str] | None = None) -> ClientTls | None:
    """Return what the environment says; None where it says nothing and no ``ca_file`` is given.

    Raises:
        UsageError: a file can't be used.
    """
    given = os.environ if environ is None else environ
    authority = str(ca_file or given.get(environment.TLS_CA, ""))
    certificate, key = given.get(environment.TLS_CERT, ""), given.get(environment.TLS_KEY, "")
    return ClientTls(authority, certificate, key) if authority or certificate or key else None
