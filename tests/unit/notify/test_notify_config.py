# SPDX-License-Identifier: Apache-2.0
"""How targets are written down, what is said about a wrong one, and that no secret is ever shown."""

from pathlib import Path

import pytest

from megascale_ops.cli.config.configuration import effective, load
from megascale_ops.cli.main import main
from megascale_ops.controller.config import ControllerConfig
from megascale_ops.errors import UsageError
from megascale_ops.notify.config import Secret, Target, shown_address

SECRET = "https://hooks.example.com/services/T0SECRET/B0SECRET?key=K0SECRET"  # noqa: S105  a made-up one


def written(tmp_path: Path, text: str, name: str = "oncall") -> Path:
    """Return a configuration file with one target."""
    path = tmp_path / "ops.toml"
    path.write_text(f"[controller.notify.targets.{name}]\n{text}\n")
    return path


def read(path: Path) -> ControllerConfig:
    """Return what a controller would make of it."""
    config: ControllerConfig = load("controller", None, path, {})[0]
    return config


def test_a_target_of_each_kind_is_read_as_it_is_written(tmp_path: Path) -> None:
    """Slack, a webhook, a mail server, a command: with what all take and with what each needs."""
    path = tmp_path / "ops.toml"
    path.write_text(f"""
[controller.notify]
page = "https://ops.example.com"
[controller.notify.targets.chat]
kind = "slack"
url = "{SECRET}"
severity = "critical"
faults = ["killed", "node_lost"]
solved = true
[controller.notify.targets.robot]
kind = "webhook"
url_file = "/etc/ops/url"
timeout_s = 3
[controller.notify.targets.mail]
kind = "email"
server = "mail.example.com"
sender = "ops@example.com"
to = ["a@example.com", "b@example.com"]
[controller.notify.targets.pager]
kind = "command"
command = ["/usr/bin/page", "--now"]
""")

    notify = read(path).notify

    assert notify.page == "https://ops.example.com"
    assert list(notify.targets) == ["chat", "robot", "mail", "pager"]
    chat = notify.targets["chat"]
    assert (chat.severity, chat.faults, chat.solved) == ("critical", ("killed", "node_lost"), True)
    assert chat.address() == SECRET
    assert notify.targets["robot"].timeout_s == 3.0
    assert notify.targets["mail"].to == ("a@example.com", "b@example.com")
    assert notify.targets["pager"].command == ("/usr/bin/page", "--now")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('kind = "slak"', "did you mean 'slack'?"),
        ('severity = "error"', "kind is missing"),
        ('kind = "slack"', "slack needs url or url_file"),
        ('kind = "slack"\nurl = "https://h/"\nurl_file = "/x"', "slack needs url or url_file"),
        ('kind = "slack"\nurl = "ftp://h/K0SECRET"', "the address must look like https://HOST/..."),
        ('kind = "slack"\nurl = "https://h/K0SECRET"\nseverty = "error"', "did you mean 'severity'?"),
        ('kind = "slack"\nurl = "https://h/K0SECRET"\nseverity = "eror"', "did you mean 'error'?"),
        ('kind = "slack"\nurl = "https://h/K0SECRET"\nserver = "h"', "slack takes no server"),
        ('kind = "slack"\nurl = "https://h/K0SECRET"\nfaults = ["kiled"]', "did you mean 'killed'?"),
        ('kind = "slack"\nurl = "https://h/K0SECRET"\nper_hour = 0', "per_hour must be from 1 to 3600"),
        ('kind = "slack"\nurl = "https://h/K0SECRET"\nattempts = "3"', "expected int, got str"),
        ('kind = "slack"\nurl = ["K0SECRET"]', "text is needed"),
        ('kind = "command"\ncommand = "page K0SECRET"', "expected array, got str"),
        ('kind = "email"\nserver = "h"\nsender = "o@h"\nto = ["me"]', "'me' is no mail address"),
        (
            'kind = "email"\nserver = "h"\nsender = "o@h"\nto = ["m@h"]\nuser = "ops"',
            "user and password_file go",
        ),
        ('kind = "email"\nserver = "h:x"\nsender = "o@h"\nto = ["m@h"]', "must look like HOST or HOST:PORT"),
    ],
)
def test_a_wrong_target_is_refused_in_one_sentence_without_its_secret(tmp_path: Path, text: str, said: str) -> None:
    """Which target, what is wrong with it and the nearest name; what was given is never quoted."""
    path = written(tmp_path, text)

    with pytest.raises(UsageError) as refused:
        read(path)

    sentence = str(refused.value)
    assert said in sentence
    assert "oncall" in sentence
    assert "SECRET" not in sentence


def test_targets_come_from_one_variable_too() -> None:
    """A container has an environment and no file: JSON there is read as the table is; nonsense there is not quoted."""
    variable = "MEGASCALE_CONTROLLER_NOTIFY_TARGETS"

    config = load("controller", None, None, {variable: '{"x": {"kind": "command", "command": ["true"]}}'})[0]

    assert config.notify.targets == {"x": Target(kind="command", command=("true",))}
    with pytest.raises(UsageError, match="are JSON") as refused:
        load("controller", None, None, {variable: f'{{"x": "{SECRET}'})
    assert "SECRET" not in str(refused.value)
    with pytest.raises(UsageError, match="are JSON"):
        load("controller", None, None, {variable: "[" * 100_000})


def test_no_secret_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``config show`` as a table and as JSON names the host of a webhook and the program of a command, nothing more."""
    path = written(tmp_path, f'kind = "webhook"\nurl = "{SECRET}"')
    path.write_text(path.read_text() + '[controller.notify.targets.c]\nkind = "command"\ncommand = ["p", "K0SECRET"]\n')

    assert main(["config", "show", "controller", "--config", str(path)]) == 0
    assert main(["config", "show", "controller", "--config", str(path), "--json"]) == 0

    shown = capsys.readouterr().out
    assert "hooks.example.com" in shown
    assert "SECRET" not in shown
    assert "B0SECRET" not in repr(read(path))
    assert "SECRET" not in str(effective(path, {}))


def test_an_address_shows_its_host_alone() -> None:
    """Also a user and a password in front of it stay unsaid, and nonsense is hidden as a whole."""
    assert shown_address("https://me:pw@h.example:8443/a/b?c=d") == "https://h.example:8443/…"
    assert shown_address("http://h/") == "http://h"
    assert shown_address("https://h:port/secret") == "(hidden)"
    assert str(Secret("")) == ""


def test_a_file_with_an_address_must_be_its_owners_alone(tmp_path: Path) -> None:
    """Mode 0600 or it is refused, as a token's is; what stands in it must be an address."""
    path = tmp_path / "url"
    path.write_text(SECRET + "\n")
    path.chmod(0o644)
    target = Target(kind="slack", url_file=path)

    with pytest.raises(UsageError, match="chmod 600"):
        target.address()
    path.chmod(0o600)

    assert target.address() == SECRET
    path.write_text("K0SECRET\n")
    with pytest.raises(UsageError, match="must look like") as refused:
        target.address()
    assert "K0SECRET" not in str(refused.value)


def test_every_setting_of_a_target_has_its_line_of_help() -> None:
    """A field without a line, or a line without a field, fails."""
    assert set(Target.HELP) == set(Target.__struct_fields__)
