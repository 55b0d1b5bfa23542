"""Exit codes match docs/cli.md, docs/service.md, help and the service files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vlm_server import errors
from vlm_server.cli import exit_codes, main
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.service import manager, systemd
from vlm_server.cli.usage import all_commands, commands_of

DOCS = Path(__file__).parents[3] / "docs"
NAMED = {name: value for name, value in vars(exit_codes).items() if isinstance(value, int)}
CODES = {value for name, value in NAMED.items() if not name.startswith("SERVICE_")}


def test_exit_codes_all_have_meanings() -> None:
    assert set(exit_codes.MEANINGS) == CODES
    assert set(NAMED.values()) - CODES <= set(exit_codes.SERVICE_MEANINGS)


def test_exit_code_table_of_cli_docs_matches_code() -> None:
    text = (DOCS / "cli.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| (.+?) \|", text, re.MULTILINE))
    assert {int(code): text for code, text in rows.items()} == exit_codes.MEANINGS


def test_exit_codes_of_service_docs_exist() -> None:
    text = (DOCS / "service.md").read_text()
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} <= CODES
    assert set(exit_codes.FINAL) <= CODES


def test_full_help_of_every_command_lists_exit_codes() -> None:
    for parser in all_commands(main.build_parser()):
        if not commands_of(parser):
            shown = parser.format_full_help()
            is_status = parser.prog == "vlm-server service status"
            for code in exit_codes.SERVICE_MEANINGS if is_status else CODES:
                assert re.search(rf"^ +{code}\b", shown, re.MULTILINE), (parser.prog, code)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), exit_codes.WRONG_SETTINGS),
        (errors.NotAvailable("x"), exit_codes.NOT_AVAILABLE),
        (errors.ModelLoadError("x"), exit_codes.MODEL_UNUSABLE),
        (CommandFailed("x"), exit_codes.FAILURE),
        (errors.InvalidImage("x"), exit_codes.FAILURE),
        (OSError(2, "No such file"), exit_codes.FAILURE),
        (ValueError("x"), exit_codes.DEFECT),
    ],
)
def test_error_class_determines_exit_code(error: Exception, code: int) -> None:
    assert main.code_of(error) == code


def test_systemd_unit_does_not_restart_after_final_codes(tmp_path: Path) -> None:
    command = manager.ServiceCommand(tmp_path / "vlm-server", ["serve"], "127.0.0.1", 8000, 1.0)
    unit = systemd.systemd_unit(command)
    codes = " ".join(map(str, exit_codes.FINAL))
    assert f"RestartPreventExitStatus={codes}\n" in unit.decode()
