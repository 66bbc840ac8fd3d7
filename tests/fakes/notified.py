# SPDX-License-Identifier: Apache-2.0
"""Real servers on loopback that take notifications: a web server that may refuse, drip or hang, and a mail server.

with WebTarget() as web:
web.answers[:] = [500, 200]     # the first answer, and the one that stays
...
web.wait_for(1)
"""

import json
import ssl
import threading
import warnings
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import default
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

from tests.fakes.servers import until


class WebTarget:
    """Keeps what it is sent; ``answers`` are status codes, of which the last one stays."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.answers = [200]
        self.says = b"ok"
        self.hangs = threading.Event()  # while it is set, requests are read and not answered
        self._goes_on = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.paths.append(self.path)
                if outer.hangs.is_set():
                    outer._goes_on.wait(60.0)
                    return
                code = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                if 200 <= code < 300:
                    outer.got.append(body)
                self.send_response(code)
                self.send_header("Content-Length", str(len(outer.says)))
                self.end_headers()
                self.wfile.write(outer.says)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self.url = f"http://127.0.0.1:{self._server.server_port}/services/T0SECRET/B0SECRET"

    def wait_for(self, count: int) -> list[dict[str, Any]]:
        """Return what was taken, once it is so many."""
        until(lambda: len(self.got) >= count, f"{count} notifications; so far: {self.got}")
        return self.got

    def __enter__(self) -> Self:
        """Begin to listen."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self._goes_on.set()
        self._server.shutdown()
        self._thread.join(5.0)
        self._server.server_close()


class _AnyPort(Controller):
    """Listens on a port that is free, and takes logins without TLS, of which aiosmtpd warns."""

    def factory(self) -> SMTP:
        """Return the protocol of one connection."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return super().factory()

    def _trigger_server(self) -> None:
        assert self.server is not None
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()


class MailTarget:
    """A mail server that keeps mails; with ``password`` it wants a login of the user "ops"."""

    def __init__(self, password: str = "", refuses: str = "", tls: ssl.SSLContext | None = None) -> None:
        self.got: list[EmailMessage] = []
        self.envelopes: list[Envelope] = []
        self._refuses = refuses

        def check(_server: SMTP, _session: Session, _envelope: Envelope, _kind: str, data: object) -> AuthResult:
            known = isinstance(data, LoginPassword) and data == LoginPassword(b"ops", password.encode())
            return AuthResult(success=known, handled=False)

        extra: dict[str, Any] = {"tls_context": tls} if tls is not None else {}
        extra |= {"authenticator": check, "auth_required": True, "auth_require_tls": False} if password else {}
        self._controller = _AnyPort(self, hostname="127.0.0.1", port=0, **extra)
        self.server = ""

    async def handle_DATA(self, _server: SMTP, _session: Session, envelope: Envelope) -> str:  # noqa: N802  aiosmtpd's name
        """Take a mail."""
        if self._refuses:
            return self._refuses
        assert isinstance(envelope.content, bytes)
        self.envelopes.append(envelope)
        self.got.append(BytesParser(_class=EmailMessage, policy=default).parsebytes(envelope.content))
        return "250 taken"

    def __enter__(self) -> Self:
        """Begin to listen."""
        self._controller.start()
        self.server = f"127.0.0.1:{self._controller.port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self._controller.stop()
