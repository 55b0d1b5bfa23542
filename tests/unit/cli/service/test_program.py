"""A service runs a permanent program, however that was installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.service import program

TAG = "Signature: 8a477f597d28d172789f06886806bc55\n"


def make_environment(environment: Path) -> Path:
    """An environment with a `vlm-server`, tagged as uv tags its own."""
    program_path = environment / "bin/vlm-server"
    program_path.parent.mkdir(parents=True)
    program_path.touch()
    (environment / "CACHEDIR.TAG").write_text(TAG)
    return program_path


def test_installed_program_is_next_to_interpreter() -> None:
    assert program.installed_program() == Path(sys.executable).absolute().with_name("vlm-server")


@pytest.mark.parametrize(
    "where", ["uv/tools/vlm-server", "pipx/venvs/vlm-server", "clone/.venv", "venv"]
)
def test_permanent_environment_is_accepted(where: str, tmp_path: Path) -> None:
    program_path = make_environment(tmp_path / where)
    assert program.throw_away_folder(program_path, [str(tmp_path / "cache")]) is None
    assert program.permanent_path(program_path) == program_path


@pytest.mark.parametrize(
    ("cache", "where"),
    [("uv", "archive-v0/e_ISkCMdmjn8y2tG"), ("pipx/.cache", "e8460caec8b2edb")],
)
def test_cache_environment_is_detected_by_tag(cache: str, where: str, tmp_path: Path) -> None:
    """`uvx` and `pipx run`, wherever their caches are."""
    program_path = make_environment(tmp_path / cache / where)
    (tmp_path / cache / "CACHEDIR.TAG").write_text(TAG)
    assert program.throw_away_folder(program_path, []) == tmp_path / cache


def test_temporary_environment_is_detected_through_symlink(tmp_path: Path) -> None:
    make_environment(tmp_path / "temporary/pip-build-env-1")
    link = tmp_path / "venv"
    link.symlink_to(tmp_path / "temporary/pip-build-env-1")
    found = program.throw_away_folder(link / "bin/vlm-server", [str(tmp_path / "temporary")])
    assert found == tmp_path / "temporary"


def test_temporary_environment_is_refused_with_advice(tmp_path: Path) -> None:
    program_path = make_environment(tmp_path / "env")
    with pytest.raises(CommandFailed, match="'uv tool install' or 'pipx install'") as failure:
        program.permanent_program(program_path, [str(tmp_path)])
    assert f"{tmp_path} may be cleaned up" in str(failure.value)
    assert "\n" not in str(failure.value)


def test_clone_in_temporary_folder_is_accepted(tmp_path: Path) -> None:
    program_path = make_environment(tmp_path / "clone/.venv")
    (tmp_path / "clone/pyproject.toml").touch()
    assert program.permanent_program(program_path, [str(tmp_path)]) == program_path


def test_homebrew_program_path_uses_opt_link(tmp_path: Path) -> None:
    program_path = make_environment(tmp_path / "homebrew/Cellar/vlm-server/1.2.3/libexec")
    assert program.permanent_path(program_path) == program_path, (
        "without the link there is nothing better"
    )
    (tmp_path / "homebrew/opt").mkdir()
    link = tmp_path / "homebrew/opt/vlm-server"
    link.symlink_to("../Cellar/vlm-server/1.2.3")
    assert program.permanent_path(program_path) == link / "libexec/bin/vlm-server"


def test_program_is_found_in_first_matching_folder(tmp_path: Path) -> None:
    first, second = make_environment(tmp_path / "a"), make_environment(tmp_path / "b")
    assert program.find_program(["/nowhere", str(first.parent), str(second.parent)]) == first
    with pytest.raises(CommandFailed, match="no vlm-server in /nowhere: install"):
        program.find_program(["/nowhere"])
