# SPDX-License-Identifier: Apache-2.0
"""Whom a controller notifies: section ``[controller.notify]`` and one table for each target.

    [controller.notify]
    page = "https://ops.example.com:7070"

    [controller.notify.targets.oncall]
    kind = "slack"
    url_file = "/etc/megascale-ops/slack_url"
    severity = "error"
    solved = true

Addresses of webhooks are secrets: who has one may write there. They are kept in ``Secret``, which shows the host alone,
or in a file that only its owner may read; the password of a mail server is always in such a file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args
from urllib.parse import urlsplit

import msgspec

from megascale_ops.foreign import UNREADABLE
from megascale_ops.link.token_files import read_secret_file
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.suggest import unknown

# From the least to the worst; the words of the alert rules, and one between them.
SEVERITIES = {
    "warning": "training goes on, slower or at risk",
    "error": "training was stopped, and is brought back",
    "critical": "the job stays stopped",
}
_Kind = Literal["slack", "webhook", "email", "command"]
_Severity = Literal["warning", "error", "critical"]
_Security = Literal["starttls", "tls", "none"]
KINDS = get_args(_Kind)
# What only some kinds take, and which of it they need; a tuple: one of these.
_OWN = {"url", "url_file", "server", "user", "password_file", "sender", "to", "command"}
_TAKES: dict[str, set[str]] = {
    "slack": {"url", "url_file"},
    "webhook": {"url", "url_file"},
    "email": {"server", "user", "password_file", "sender", "to"},
    "command": {"command"},
}
_NEEDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "slack": (("url", "url_file"),),
    "webhook": (("url", "url_file"),),
    "email": (("server",), ("sender",), ("to",)),
    "command": (("command",),),
}
MOST_TARGETS = 64
_PORTS = {"starttls": 587, "tls": 465, "none": 25}


class Secret:
    """A text that is used and not shown: neither ``repr`` nor ``str`` tells more than the host of an address."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text, for the one call that needs it."""
        return self._text

    def __bool__(self) -> bool:
        return bool(self._text)

    def __str__(self) -> str:
        return shown_address(self._text) if self._text else ""

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other.reveal() == self._text

    def __hash__(self) -> int:
        return hash(self._text)


class Target(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """One place that is told of incidents, and of which."""

    HELP: ClassVar[dict[str, str]] = {
        "kind": "slack (any webhook that takes Slack's messages), webhook (JSON of ours), email or command.",
        "severity": "The least that is told: warning, error (training was stopped) or critical (the job is over).",
        "faults": "Only these classes of fault; none named: all.",
        "solved": "Tell once more when an incident is over.",
        "per_hour": "Messages an hour at most; what is left out is counted in the next one.",
        "timeout_s": "Seconds for each attempt, names, connecting and the answer together.",
        "attempts": "Attempts for each message, with growing pauses between them.",
        "url": "Address of the webhook; a secret, so better in a file: url_file.",
        "url_file": "File that holds the address, mode 0600.",
        "server": "Mail server, HOST or HOST:PORT.",
        "security": "starttls (port 587), tls (port 465) or none (port 25).",
        "user": "Name to log in with; none: no login.",
        "password_file": "File that holds the password, mode 0600.",
        "sender": "Address that mails come from.",
        "to": "Addresses that mails go to.",
        "command": "Program and arguments, as a list; the card comes on stdin, the rest as MEGASCALE_NOTIFY_*.",
    }

    kind: _Kind
    severity: _Severity = "warning"
    faults: tuple[str, ...] = ()
    solved: bool = False
    # 60 an hour: one a minute is more than a person reads; a restart loop must not fill a mailbox.
    per_hour: int = 60
    # 10 s: Slack answers in 0.3 s, a loaded mail server in some seconds.
    timeout_s: float = 10.0
    attempts: int = 3
    url: Secret = Secret("")
    url_file: Path | None = None
    server: str = ""
    security: _Security = "starttls"
    user: str = ""
    password_file: Path | None = None
    sender: str = ""
    to: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least, most in (("per_hour", 1, 3600), ("timeout_s", 0.1, 120), ("attempts", 1, 10)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be from {least} to {most}")
        for name in self.faults:
            if name not in FAULTS:
                raise ValueError(unknown("class of fault", name, FAULTS))
        self._check_way()

    def _check_way(self) -> None:
        """Check that what the kind needs is given, and what it does not take is not."""
        given = {name for name in _OWN if getattr(self, name)}
        for name in sorted(given - _TAKES[self.kind]):
            raise ValueError(f"{self.kind} takes no {name}")
        for names in _NEEDS[self.kind]:
            if len(given & set(names)) != 1:
                raise ValueError(f"{self.kind} needs {' or '.join(names)}")
        if self.url:
            check_address(self.url.reveal())
        if self.server:
            host_and_port(self.server, self.security)
        if bool(self.user) != (self.password_file is not None):
            raise ValueError("user and password_file go together")
        for address in (self.sender, *self.to) if self.kind == "email" else ():
            if "@" not in address or not address.isprintable() or " " in address:
                raise ValueError(f"{address!r} is no mail address")

    def address(self) -> str:
        """Return the webhook's address, from its file where it is kept there.

        Raises:
            UsageError: the file can't be read, others may read it, or it holds no address.
        """
        if self.url_file is None:
            return self.url.reveal()
        text = read_secret_file(self.url_file, "address")
        try:
            check_address(text)
        except ValueError as error:
            from megascale_ops.errors import UsageError

            raise UsageError(f"address file {self.url_file} can't be used: {error}") from None
        return text

    def password(self) -> str:
        """Return the mail server's password, "" for none; errors as ``address``."""
        return read_secret_file(self.password_file, "password") if self.password_file is not None else ""


class NotifyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section ``[controller.notify]``: whom to tell of incidents."""

    HELP: ClassVar[dict[str, str]] = {
        "page": "Address of the live page as people reach it, for links; none: where the controller listens.",
        "targets": "Who is told of incidents, by name: kind, severity, faults, and how it is reached.",
    }
    # A mistake in a target must not quote it: its address is a secret.
    HIDDEN: ClassVar[frozenset[str]] = frozenset({"targets"})

    page: str = ""
    targets: dict[str, Target] = {}

    @staticmethod
    def read_setting(name: str, raw: object) -> object:
        """Read a setting from a file, the environment (targets as JSON) or the command line.

        Raises:
            ValueError: what is wrong with it, one clause; it quotes no value of a target.
        """
        if name == "targets":
            return read_targets(raw)
        if not isinstance(raw, str):
            raise ValueError("an address is given as text")  # noqa: TRY004  a user's mistake
        check_address(raw)
        return raw

    @staticmethod
    def show_setting(name: str, value: Any) -> Any:  # noqa: ANN401  any setting's value
        """Return what may be shown of a setting: addresses without their paths, of commands the program."""
        if name != "targets":
            return value
        shown = msgspec.to_builtins(value, enc_hook=str)
        for table in shown.values():
            if len(table.get("command", ())) > 1:
                table["command"] = (table["command"][0], "…")
        return shown


def read_targets(raw: object) -> dict[str, Target]:
    """Return targets by name, from a table or its JSON text.

    Raises:
        ValueError: what is wrong with which of them.
    """
    if isinstance(raw, str):
        try:
            raw = msgspec.json.decode(raw)
        except UNREADABLE:
            raise ValueError("as text, targets are JSON: an object of objects") from None
    if not isinstance(raw, Mapping):
        raise ValueError("targets are tables, as in [controller.notify.targets.oncall]")  # noqa: TRY004  a user's mistake
    if len(raw) > MOST_TARGETS:
        raise ValueError(f"{len(raw)} targets are too many: {MOST_TARGETS} at most")
    return {
        str(name): target if isinstance(target, Target) else _target(str(name), target) for name, target in raw.items()
    }


def _target(name: str, raw: object) -> Target:
    if not name.isprintable() or not name or len(name) > 100:
        raise ValueError("a target's name has 1 to 100 printable characters")
    if not isinstance(raw, Mapping):
        raise ValueError(f"target {name}: a table is needed, as in [controller.notify.targets.{name}]")  # noqa: TRY004  same
    for key in raw:
        if key not in Target.__struct_fields__:
            raise ValueError(f"target {name}: {unknown('key', key, Target.__struct_fields__)}")
    if "kind" not in raw:
        raise ValueError(f"target {name}: kind is missing: {', '.join(KINDS)}")
    for key, known in (("kind", KINDS), ("severity", tuple(SEVERITIES)), ("security", tuple(_PORTS))):
        if key in raw and raw[key] not in known:
            raise ValueError(f"target {name}: {unknown(key, raw[key], known)} ({', '.join(known)})")
    try:
        return msgspec.convert(dict(raw), Target, dec_hook=_decode)
    except msgspec.ValidationError as error:
        text = str(error).replace("`", "")
        raise ValueError(f"target {name}: {text[:1].lower()}{text[1:]}") from None


def _decode(kind: type, value: Any) -> Any:  # noqa: ANN401  msgspec's hook, for types that it does not support
    if not isinstance(value, str | Path):
        raise ValueError("text is needed")  # noqa: TRY004  msgspec makes a sentence of ValueErrors
    return Secret(str(value)) if kind is Secret else Path(value)


def check_address(url: str) -> None:
    """Check the address of a web server.

    Raises:
        ValueError: what is wrong with it; the address, a secret, is not quoted.
    """
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("the address must look like https://HOST/...")


def shown_address(url: str) -> str:
    """Return of an address what may be shown: its scheme and host."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "(hidden)"
    rest = "/…" if parts.path.strip("/") or parts.query else ""
    return f"{parts.scheme}://{parts.hostname}{port}{rest}"


def host_and_port(server: str, security: str) -> tuple[str, int]:
    """Return host and port of a mail server; the port that its security is served at unless one is named.

    Raises:
        ValueError: it is neither HOST nor HOST:PORT.
    """
    try:
        parts = urlsplit(f"//{server}")
        host, port = parts.hostname or "", parts.port or _PORTS[security]
    except ValueError:
        host, port = "", 0
    if not host or parts.path or "@" in server or not server.isprintable() or " " in server:
        raise ValueError(f"mail server {server!r:.100} must look like HOST or HOST:PORT")
    return host, port
