"""The file of API keys: its owner and mode, its contents, and errors without keys."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from vlm_server.api.http.access.key_file import MAX_FILE_BYTES, KeyEntry, WatchedKeyFile, read
from vlm_server.errors import ConfigError

SECRET = "swordfish-and-chips"
GOOD = f'[laptop]\nkey = "{SECRET}"\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def write(path: Path, text: str | bytes = GOOD, mode: int = 0o600) -> Path:
    path.touch()
    path.chmod(0o600)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def test_key_file_holds_names_keys_and_limits(path: Path) -> None:
    more = '[agents]\nkey = "another-key-é"\nmax_requests = 3\nadmin = true\n'
    assert read(write(path, GOOD + more)) == {
        "laptop": KeyEntry(SECRET),
        "agents": KeyEntry("another-key-é", admin=True, max_requests=3),
    }


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o777, 0o610])
def test_key_file_open_to_others_is_refused(path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        read(write(path, mode=mode))


def test_key_file_of_another_user_is_refused(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(write(path), 12345, -1)
    with pytest.raises(ConfigError, match="another user"):
        read(path)


def test_key_file_that_is_not_regular_is_refused_at_once(path: Path) -> None:
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="regular file"):
        read(path)
    with pytest.raises(ConfigError):
        read(path.parent)


def test_link_to_private_key_file_is_followed(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(write(path))
    assert list(read(link)) == ["laptop"]
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read(link)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no API keys"),
        ("# nothing\n", "no API keys"),
        (f'[laptop]\nkey = "{SECRET}', "not valid TOML"),
        (f'[{SECRET}', "not valid TOML"),
        (f'[x]\nkey = "{SECRET}"\n[x]\nkey = "{SECRET}"\n', "not valid TOML"),
        (b'[x]\nkey = "swordfish-and-chips\xff"', "not UTF-8"),
        (f'laptop = "{SECRET}"', "must be a table"),
        (f'[[laptop]]\nkey = "{SECRET}"', "must be a table"),
        (f'"{SECRET}" = "laptop"', "must be a table"),
        (f'["{SECRET} "]\nkey = "x"', "its name"),
        (f'["a\\nforged"]\nkey = "{SECRET}"', "its name"),
        (f'[""]\nkey = "{SECRET}"', "its name"),
        (f'[laptop]\nKey = "{SECRET}"', "a field other"),
        (f'[laptop]\n"{SECRET}" = 1', "a field other"),
        ("[laptop]\nadmin = true", "key"),
        ("[laptop]\nkey = 12345678", "str"),
        (f'[laptop]\nkey = "{SECRET}"\nmax_requests = 0', "max_requests"),
        (f'[laptop]\nkey = "{SECRET}"\nmax_requests = true', "max_requests"),
        (f'[laptop]\nkey = "{SECRET}"\nadmin = 1', "admin"),
        ('[laptop]\nkey = ""', "fewer than 8"),
        ('[laptop]\nkey = "1234567"', "fewer than 8"),
        ('[laptop]\nkey = "          "', "blank"),
        (f'[laptop]\nkey = "{SECRET} "', "blank"),
        (f'[laptop]\nkey = "{SECRET}\\u0000"', "control"),
        (f'[laptop]\nkey = "{SECRET}\\u007f"', "control"),
        (f'[laptop]\nkey = "{SECRET}\\u2003x"', "blank"),
        (f'[one]\nkey = "{SECRET}"\n[two]\nkey = "{SECRET}"', "the same key"),
        ("#" * (MAX_FILE_BYTES + 1), "larger than"),
    ],
)  # fmt: skip
def test_key_file_errors_do_not_show_key(path: Path, text: str | bytes, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        read(write(path, text))
    assert "swordfish" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_key_file_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.toml: No such file"):
        read(path)


def test_key_file_is_read_again_only_after_change(path: Path) -> None:
    watched = WatchedKeyFile(write(path))
    assert list(watched.read()) == ["laptop"]
    assert watched.read_if_changed() is None
    write(path, GOOD.replace("laptop", "desktop"))
    assert list(watched.read_if_changed() or {}) == ["desktop"]
    assert watched.read_if_changed() is None


def test_broken_key_file_is_logged_once_and_read_after_repair(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = WatchedKeyFile(write(path))
    watched.read()
    breaks = [
        lambda: write(path, f"[{SECRET}"),
        lambda: write(path, ""),
        lambda: path.chmod(0o644),
        path.unlink,
    ]
    for number, damage in enumerate(breaks, start=1):
        damage()
        assert watched.read_if_changed() is None
        assert watched.read_if_changed() is None
        assert caplog.text.count("stay valid") == number
    write(path, GOOD.replace("laptop", "desktop"))
    assert list(watched.read_if_changed() or {}) == ["desktop"]
    assert "swordfish" not in caplog.text
    assert [record.levelno for record in caplog.records][:4] == [logging.ERROR] * 4
