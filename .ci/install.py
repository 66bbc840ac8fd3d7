# SPDX-License-Identifier: Apache-2.0
"""Install by uv, as pip is configured here; by pip itself where uv can't be had or can't do it.

    python .ci/install.py -c constraints.txt -e '.[dev]'    what follows is handed on to ``pip install``

uv chooses and installs 185 packages with a fifth of pip's CPU time, but reads none of pip's settings: files, variables
(PIP_FIND_LINKS, as for a build of torch without CUDA). They are asked for and handed on. A setting that this does not
know leaves the work to pip.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Callable

# Pip's name of a setting: uv's option. Both may be given several times.
MANY = {
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
# Said to uv by its environment: an index's address may have a password in it, and command lines are for all to read.
VARIABLES = {
    "extra-index-url": "UV_INDEX",
    "index-url": "UV_DEFAULT_INDEX",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
}
VARIABLES["timeout"] = VARIABLES["default-timeout"]
# Of pip's own look only, or the way it works anyway.
WITHOUT_MEANING = {
    "cache-dir", "config-file", "disable-pip-version-check", "no-cache-dir", "no-color", "no-input",
    "no-warn-script-location", "progress-bar", "quiet", "retries", "root-user-action", "use-feature", "verbose",
}  # fmt: skip
# An index that is slow; one that is away ends by its own patience before.
INSTALL_S = 1800.0
# The newest wherever it lies, as pip chooses: where a local index has a release, others may have a newer one.
STRATEGY = "unsafe-best-match"


class UnknownSettingError(Exception):
    """Pip is configured in a way that this does not hand on."""


def settings_of(listed: str, ask: Callable[[str], str]) -> dict[str, str]:
    """Return what holds of pip's settings, by name, where ``pip config list`` prints them all.

    Args:
        listed: One line for each setting of each file, files in the order of their names.
        ask: Called with a setting of which two files say different things: what holds.

    Raises:
        UnknownSettingError: with a line that is no setting.
    """
    said: dict[str, set[str]] = {}
    for line in listed.splitlines():
        key, is_setting, value = line.partition("=")
        try:
            said.setdefault(key, set()).add(str(ast.literal_eval(value)))
        except (SyntaxError, ValueError):
            is_setting = ""
        if not is_setting:
            raise UnknownSettingError(line)
    found: dict[str, str] = {}
    for key in sorted(said, key=lambda key: (key.startswith(":env:"), key.startswith("install."))):
        found[key.rpartition(".")[2]] = said[key].pop() if len(said[key]) == 1 else ask(key)
    return found


def for_uv(settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the options and the variables that tell uv what pip is told.

    Raises:
        UnknownSettingError: with the name of one that uv can't be told.
    """
    options: list[str] = []
    variables: dict[str, str] = {}
    for name, value in settings.items():
        if name in MANY:
            options += [word for one in value.split() for word in (MANY[name], one)]
        elif name == "no-index" and value.lower() in {"1", "true", "yes", "on"}:
            options.append("--no-index")
        elif name in VARIABLES:
            variables[VARIABLES[name]] = " ".join(value.split())
        elif name not in WITHOUT_MEANING:
            raise UnknownSettingError(name)
    return options, variables


def told_by_pip(*words: str) -> str:
    """Return what ``pip config`` prints."""
    command = [sys.executable, "-m", "pip", "config", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60.0).stdout


def by_uv(arguments: list[str]) -> bool:
    """Install by uv; False where that can't be done here, which is said in one line."""
    pip = [sys.executable, "-m", "pip"]
    quiet = ["--quiet", "--disable-pip-version-check"]
    try:
        options, variables = for_uv(settings_of(told_by_pip("list"), lambda key: told_by_pip("get", key).strip()))
        subprocess.run([*pip, "install", *quiet, "--no-compile", "uv"], check=True, timeout=INSTALL_S)
        environment = {**variables, **os.environ, "UV_INDEX_STRATEGY": STRATEGY}
        words = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable, *options]
        subprocess.run([*words, *arguments], check=True, env=environment, timeout=INSTALL_S)
    except UnknownSettingError as error:
        sys.stderr.write(f"pip installs, and not uv: a setting of pip's here is not handed on ({error})\n")
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"pip installs, and not uv: what was tried ended with {error.returncode}\n")
    except subprocess.TimeoutExpired as error:
        sys.stderr.write(f"pip installs, and not uv, which had not ended after {error.timeout:g} s\n")
    else:
        return True
    return False


def main(arguments: list[str]) -> int:
    """Install what is named, and return the exit code."""
    if by_uv(arguments):
        return 0
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    # The pip that comes with Python 3.11 takes three times as long to choose releases as its newest; it may stay.
    subprocess.run([*pip, "--upgrade", "pip"], check=False, timeout=INSTALL_S)
    return subprocess.run([*pip, *arguments], check=False, timeout=INSTALL_S).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.TimeoutExpired as error:
        sys.exit(f"pip had not ended after {error.timeout:g} s: is its index slow, or away?")
    except KeyboardInterrupt:
        sys.exit(130)
