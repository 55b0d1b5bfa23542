"""Help is complete, and fast: it imports nothing heavy."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time

import pytest

from tests.docs import man_page
from vlm_server.cli.main import COMMANDS, build_parser, main
from vlm_server.cli.usage import Parser, all_commands, commands_of

PAGE = man_page.PATH
LEAVES = [parser.prog.split()[1:] for parser in all_commands(build_parser())]
HEAVY = (
    *("mlx", "mlx_vlm", "numpy", "transformers", "torch", "starlette", "uvicorn", "httpx", "PIL"),
    *(
        "huggingface_hub",
        "rich",
        "prompt_toolkit",
        "shtab",
        "prometheus_client",
        "vlm_server.api",
        "av",
    ),
)
"""Modules that no help may import."""
_MOST_SECONDS = 0.15
"""On a quiet machine that starts Python in 20 ms."""
_MOST_STARTS = 6.0
"""Starts of Python that help may take."""

PROBE = f"""
import contextlib, io, json, sys
from vlm_server.cli.main import main
for words in json.loads(sys.argv[1]):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            main([*words, "--help"])
        except SystemExit as end:
            code = end.code
    found = [name for name in {HEAVY} if name in sys.modules]
    print(json.dumps([words, code, found, shown.getvalue().splitlines()[0]]))
"""
"""One process for all: what the help of a command imports stays, and is told with the command."""


def test_help_imports_nothing_heavy() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(LEAVES)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stderr == ""
    reports = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [words for words, *_ in reports] == LEAVES
    for words, code, heavy, first_line in reports:
        assert (words, code, heavy) == (words, 0, [])
        assert first_line.startswith(" ".join(["usage: vlm-server", *words]))


@pytest.mark.alone
def test_help_takes_few_times_python_startup() -> None:
    """The best of several, since other programs run as well."""
    command = [sys.executable, "-m", "vlm_server.cli", "ask", "--help"]
    start = min(_seconds([sys.executable, "-c", "pass"]) for _ in range(5))
    assert min(_seconds(command) for _ in range(5)) < max(_MOST_SECONDS, _MOST_STARTS * start)


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - started


def test_commands_and_options_all_have_help() -> None:
    parser = build_parser()
    for command in all_commands(parser):
        assert isinstance(command, Parser)
        for action in command._actions:
            assert action.help or commands_of(command), (command.prog, action.dest)
    summaries = {command.prog.split()[-1]: text for text, command in commands_of(parser)}
    assert summaries == {name: text for name, (_, text) in COMMANDS.items()}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_overview_lists_commands_without_importing_them(name: str) -> None:
    """The overview and a command's own parser have the same summary."""
    alone = {parser.prog.split()[-1] for parser in all_commands(build_parser([name]))}
    assert name in alone
    assert {text for text, _ in commands_of(build_parser([]))} == {
        text for _, text in COMMANDS.values()
    }


def test_help_examples_parse() -> None:
    """Every `vlm-server` line of an example has only existing options."""
    parser = build_parser()
    examples = [line for command in all_commands(parser) for _, line in command.manual.examples]
    assert len(examples) > 10
    for line in examples:
        words = shlex.split(line[line.index("vlm-server") :].removesuffix(')"'))
        end = next((i for i, word in enumerate(words) if word in ("|", ">", "<")), len(words))
        if "--help" not in words:
            parser.parse_args(words[1:end])


def test_commands_in_cli_docs_parse() -> None:
    text = (PAGE.parent / "cli.md").read_text()
    lines = [
        line for line in text.splitlines() if re.match(r"(cat .*\| |eval .*)?vlm-server", line)
    ]
    assert len(lines) > 8
    for line in lines:
        words = shlex.split(line[line.index("vlm-server") :].removesuffix(')"'))
        end = next((i for i, word in enumerate(words) if word in ("|", ">", "<")), len(words))
        build_parser().parse_args(words[1:end])


def test_help_has_sections_of_manual_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    shown = capsys.readouterr().out
    for section in ("usage:", "model:", "settings:", "examples:", "environment:", "files:"):
        assert section in shown
    assert shown.index("usage:") < shown.index("examples:") < shown.index("exit codes:")


@pytest.mark.parametrize("columns", [60, 80, 300])
def test_help_fits_terminal_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for parser in all_commands(build_parser()):
        for shown in (parser.format_help(), parser.format_full_help()):
            lines = re.sub(r"examples:\n(?:  .*\n)+", "", shown).splitlines()
            assert max(map(len, lines)) <= columns


def test_short_help_fits_one_screen_and_points_to_full_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for parser in all_commands(build_parser()):
        shown = parser.format_help()
        assert len(shown.splitlines()) <= 24, parser.prog
        assert ("--help-all" in shown) is not bool(commands_of(parser))


def test_full_help_names_every_option_once() -> None:
    for parser in all_commands(build_parser()):
        shown = parser.format_full_help().partition("\nexamples:")[0]
        for action in parser._actions:
            for name in action.option_strings[-1:]:
                assert len(re.findall(rf"^  .*{name}\b(?!-)", shown, re.MULTILINE)) >= 1, name


def test_overview_begins_with_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    steps = [shown.index(f"vlm-server {name}") for name in ("serve", "ask", "connect")]
    assert steps == sorted(steps)
    assert steps[-1] < shown.index("commands:")


def test_manual_page_is_up_to_date() -> None:
    """`python -m tests.docs.man_page` writes it."""
    assert man_page.render() == PAGE.read_text()


def test_manual_page_names_every_option() -> None:
    text = man_page.render().replace("\\-", "-")
    for parser in all_commands(build_parser()):
        if not commands_of(parser):
            assert parser.prog in text
            for action in parser._actions:
                if action.dest not in ("help", "help_all", "debug"):
                    assert (action.option_strings or [str(action.metavar)])[-1] in text
