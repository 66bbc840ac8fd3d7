# SPDX-License-Identifier: Apache-2.0
"""``make setup`` installs as pip is configured (``.ci/install.py``): uv, which reads nothing of that, is told."""

import importlib.util
import itertools
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("install", ROOT / ".ci/install.py")
assert _spec is not None
assert _spec.loader is not None
install = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(install)


ASK = {"global.cert": "/c.crt"}.__getitem__  # another file of this machine may have one


def pip_says(folder: Path, lines: str, **variables: str) -> str:
    """Return what the real pip lists of a file with these lines and of these variables."""
    file = folder / "pip.conf"
    file.write_text(lines)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": str(file), "HOME": str(folder), **variables}
    command = [sys.executable, "-m", "pip", "config", "list"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout


def test_what_pip_is_told_uv_is_told(tmp_path: Path) -> None:
    """Indexes, folders with wheels, constraints and certificates, of files and of variables, which win."""
    lines = (
        "[global]\nfind-links = /one /two\nindex-url = https://a/simple\ncert = /c.crt\n[install]\nconstraint = /k.txt"
    )
    listed = pip_says(
        tmp_path,
        lines,
        PIP_INDEX_URL="https://b/simple",
        PIP_EXTRA_INDEX_URL="https://c/whl/cpu\n https://user:secret@d/simple",
    )
    settings = {
        name: value for name, value in install.settings_of(listed, ASK).items() if name in lines + "extra-index-url"
    }
    options, variables = install.for_uv(settings)

    for words in (("--find-links", "/one"), ("--find-links", "/two")):
        assert words in list(itertools.pairwise(options))
    assert ("--constraint", "/k.txt") in list(itertools.pairwise(options))
    assert variables["UV_DEFAULT_INDEX"] == "https://b/simple"
    assert variables["UV_INDEX"] == "https://c/whl/cpu https://user:secret@d/simple"
    assert "secret" not in " ".join(options)
    assert variables["SSL_CERT_FILE"] == "/c.crt"


def test_of_two_files_pip_says_which_holds() -> None:
    """They are listed by their names, and hold in another order."""
    listed = "global.timeout='5'\nglobal.cert='/a'\nglobal.cert='/b'\nglobal.timeout='5'\ninstall.cert='/c'\n"
    asked: list[str] = []

    def ask(key: str) -> str:
        asked.append(key)
        return "/b"

    assert install.settings_of(listed, ask) == {"timeout": "5", "cert": "/c"}
    assert install.settings_of(listed.partition("install")[0], ask)["cert"] == "/b"
    assert set(asked) == {"global.cert"}


@pytest.mark.parametrize("line", ["global.client-cert='/mine.pem'", "global.no-binary=':all:'", "nonsense"])
def test_what_uv_is_not_told_leaves_the_work_to_pip(line: str) -> None:
    """The control: a setting of which this knows nothing is not left out silently."""
    with pytest.raises(install.UnknownSettingError):
        install.for_uv(install.settings_of(line, ASK))


@pytest.mark.parametrize(("variables", "said"), [({}, ""), ({"PIP_NO_BINARY": "none"}, "pip installs, and not uv")])
def test_either_installs(tmp_path: Path, variables: dict[str, str], said: str) -> None:
    """No index, a folder with one wheel: it is found by uv, and by pip where a setting is none that uv is told."""
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny_thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_thing.py", "FOUND = 1\n")
        wheel.writestr("tiny_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_thing-1.0.dist-info/RECORD", "")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), **variables}

    command = [sys.executable, str(ROOT / ".ci/install.py"), "--target", str(target), "tiny-thing"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)
    assert (target / "tiny_thing.py").read_text() == "FOUND = 1\n"
