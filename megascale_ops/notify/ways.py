# SPDX-License-Identifier: Apache-2.0
"""One attempt to bring one message to one target: by HTTP, by SMTP, by a command.

Each may be cancelled at any time and then leaves nothing behind: no connection, no thread that waits, no process. Who
calls sets the deadline. What goes wrong is one sentence that names the host or the program, and never an address.
"""

import asyncio
import contextlib
import os
import signal
import smtplib
import socket
import ssl
import tempfile
import threading
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import urlsplit

import msgspec

from megascale_ops.errors import MegascaleError
from megascale_ops.notify.config import Target, host_and_port
from megascale_ops.notify.message import Message, as_json, as_mail, as_slack, as_variables
from megascale_ops.schema.wording import printable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from email.message import EmailMessage

# 429 and the statuses of a proxy or a loaded server: the same message may be accepted later.
_PASSES = frozenset({408, 425, 429, 500, 502, 503, 504})
# 120 s: a longer Retry-After of a server is cut to this.
_MOST_PAUSE_S = 120.0
_MOST_SAID = 200
# 1 s for a process that was killed to be gone; one that hangs in the kernel is left to init.
_REAP_S = 1.0
# SMTP's 4xx: "transient negative completion", RFC 5321, 4.2.1.
_TRANSIENT = 400, 499


class NotSentError(MegascaleError):
    """A message did not go; ``is_final``: trying again is of no use; ``again_s``: no sooner than that."""

    def __init__(self, text: str, *, is_final: bool = False, again_s: float = 0.0) -> None:
        super().__init__(text)
        self.is_final = is_final
        self.again_s = again_s


class Way:
    """How one target is reached; its secrets are read once, when it is made.

    Raises:
        UsageError: a file with a secret can't be used.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._address = target.address() if target.kind in ("slack", "webhook") else ""
        self._password = target.password()
        self._send: Callable[[Message], Awaitable[None]] = {
            "slack": self._post,
            "webhook": self._post,
            "email": self._mail,
            "command": self._start,
        }[target.kind]

    async def send(self, message: Message) -> None:
        """Make one attempt.

        Raises:
            NotSentError: it did not go.
        """
        await self._send(message)

    @property
    def goes_to(self) -> str:
        """The host or program, for sentences."""
        target = self._target
        if target.kind == "command":
            return target.command[0]
        if target.kind == "email":
            return host_and_port(target.server, target.security)[0]
        return urlsplit(self._address).hostname or ""

    async def _post(self, message: Message) -> None:
        import aiohttp

        body = as_slack(message) if self._target.kind == "slack" else as_json(message)
        host = self.goes_to
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(
                    self._address,
                    data=msgspec.json.encode(body),
                    headers={"Content-Type": "application/json", "User-Agent": "megascale-ops"},
                    allow_redirects=False,  # a message is for the host that was named
                    proxy=_proxy_of(self._address),
                ) as reply,
            ):
                said = await reply.content.read(_MOST_SAID)
                status, wait = reply.status, reply.headers.get("Retry-After", "")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NotSentError(f"{host} can't be reached: {_why(error)}") from None
        if 200 <= status < 300:
            return
        again_s = min(float(wait), _MOST_PAUSE_S) if wait.isascii() and wait.isdigit() else 0.0
        # Slack's errors are words (no_service, invalid_token). Other text may repeat the address, so it stays unsaid.
        word = said.decode("ascii", "replace").strip()
        told = f" ({word})" if word.replace("_", "").isalpha() and word not in self._address else ""
        moved = "; it leads elsewhere, and the address must be the one that takes messages" * (300 <= status < 400)
        raise NotSentError(f"{host} answered {status}{told}{moved}", is_final=status not in _PASSES, again_s=again_s)

    async def _mail(self, message: Message) -> None:
        """Hand a mail over in a thread: smtplib waits at each step, and ends at once when its socket is cut."""
        mail = as_mail(message, self._target.sender, self._target.to)
        events = asyncio.get_running_loop()
        done: asyncio.Future[None] = events.create_future()
        talk = _Talk(self._target, self._password)

        def tell(error: NotSentError | None) -> None:
            if not done.done():
                done.set_exception(error) if error else done.set_result(None)

        def work() -> None:
            try:
                talk.hand_over(mail)
            except NotSentError as error:
                told: NotSentError | None = error
            else:
                told = None
            with contextlib.suppress(RuntimeError):  # the deadline has passed, and no caller waits any more
                events.call_soon_threadsafe(tell, told)

        threading.Thread(target=work, name="notify-mail", daemon=True).start()
        try:
            await done
        finally:
            talk.cut()

    async def _start(self, message: Message) -> None:
        """Run the command with the card on its stdin; it is killed, children and all, when time is up."""
        name = self.goes_to
        with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as said:
            told.write(message.text.encode() + b"\n")
            told.seek(0)
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._target.command,
                    stdin=told,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=said,
                    env={**os.environ, **as_variables(message)},
                    start_new_session=True,
                )
            except OSError as error:
                raise NotSentError(f"{name} can't be started: {error.strerror or error}", is_final=True) from None
            try:
                status = await process.wait()
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError, TimeoutError):
                        os.killpg(process.pid, signal.SIGKILL)
                        await asyncio.wait_for(process.wait(), _REAP_S)
            if status:
                raise NotSentError(f"{name} ended with status {status}{_last_line(said)}")


class _Talk:
    """One talk with a mail server; ``cut`` ends it from another thread."""

    def __init__(self, target: Target, password: str) -> None:
        self._target = target
        self._password = password
        self._socket: socket.socket | None = None
        self._is_cut = False

    def cut(self) -> None:
        """End it where it stands."""
        self._is_cut = True
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def hand_over(self, mail: "EmailMessage") -> None:
        """Connect, log in and hand a mail over.

        Raises:
            NotSentError: it was not taken.
        """
        host, port = host_and_port(self._target.server, self._target.security)
        try:
            with socket.create_connection((host, port), self._target.timeout_s) as plain:
                self._socket = plain
                self._say(_Client(host, _encrypted(plain, host) if self._target.security == "tls" else plain), mail)
        except smtplib.SMTPRecipientsRefused as error:
            code, said = next(iter(error.recipients.values()))
            raise _refused(host, code, said) from None
        except smtplib.SMTPResponseException as error:
            raise _refused(host, error.smtp_code, error.smtp_error) from None
        except smtplib.SMTPNotSupportedError:
            raise NotSentError(f"{host} does not offer what is asked of it: {self._asked()}", is_final=True) from None
        except (OSError, smtplib.SMTPException) as error:
            raise NotSentError(f"{host} port {port} can't be reached: {_why(error)}") from None
        except ValueError as error:
            raise NotSentError(f"the mail can't be sent as it is: {error}", is_final=True) from None

    def _asked(self) -> str:
        return "STARTTLS" if self._target.security == "starttls" else "a login"

    def _say(self, client: "_Client", mail: "EmailMessage") -> None:
        try:
            client.greet()
            if self._target.security == "starttls":
                client.starttls(context=ssl.create_default_context())
                client.ehlo()
            if self._target.user:
                client.login(self._target.user, self._password)
            if not self._is_cut:
                client.send_message(mail)
            with contextlib.suppress(smtplib.SMTPException, OSError):
                client.quit()  # the mail is accepted; an error at QUIT changes nothing
        finally:
            client.close()


class _Client(smtplib.SMTP):
    """smtplib's client on a connection that was made before, so that it can be cut from the beginning on."""

    def __init__(self, host: str, connection: socket.socket) -> None:
        super().__init__()
        self._host = host  # the name that STARTTLS checks the certificate against
        self.sock = connection

    def greet(self) -> None:
        """Hear the server's greeting and say ours."""
        code, said = self.getreply()
        if code != 220:
            raise smtplib.SMTPConnectError(code, said)
        self.ehlo_or_helo_if_needed()


def _encrypted(plain: socket.socket, host: str) -> socket.socket:
    return ssl.create_default_context().wrap_socket(plain, server_hostname=host)


def _refused(host: str, code: int, said: bytes | str) -> NotSentError:
    text = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
    is_final = not _TRANSIENT[0] <= code <= _TRANSIENT[1]
    return NotSentError(f"{host} answered {code}: {printable(text)[:_MOST_SAID]}", is_final=is_final)


def _why(error: Exception) -> str:
    """Return what went wrong on the way, without whatever a library quotes there."""
    for cause in (error, error.__cause__, getattr(error, "os_error", None)):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate can't be trusted ({cause.verify_message})"
        if isinstance(cause, ssl.SSLError):
            return "it does not speak TLS there"
        if isinstance(cause, socket.gaierror):
            return "there is no such host"
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno).lower() if cause.errno > 0 else "there is no such host"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return "it ended the talk" if isinstance(error, smtplib.SMTPServerDisconnected) else type(error).__name__


def _proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for an address."""
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


def _last_line(said: BinaryIO) -> str:
    """Return the last line that a command wrote to stderr, behind a colon."""
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - 2 * _MOST_SAID))
    lines = said.read().decode("utf-8", "replace").strip().splitlines()
    return f": {printable(lines[-1])[:_MOST_SAID]}" if lines else ""
