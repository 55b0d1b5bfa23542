"""Completion scripts offer the right words in bash, fish and zsh themselves."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_server.cli.completions import SHELLS, script
from vlm_server.cli.main import COMMANDS

CASES = [
    ("vlm-server se", {"serve", "service"}),
    ("vlm-server models ", {"list", "pull", "check", "rm"}),
    ("vlm-server serve --mod", {"--model"}),
    ("vlm-server ask --save", {"--save-boxes"}),
    ("vlm-server completions ", set(SHELLS)),
    ("vlm-server bench --start ", {"ours", "mlx-vlm"}),
    ("vlm-server serve --model org/", {"org/one", "org/two"}),
    ("vlm-server serve --config sett", {"settings.toml"}),
]

BASH = """
source "$1"
COMP_LINE="$2"
COMP_POINT=${#COMP_LINE}
read -ra COMP_WORDS <<< "$COMP_LINE"
case "$COMP_LINE" in *" ") COMP_WORDS+=("");; esac
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
$(complete -p vlm-server | sed 's/.*-F \\([^ ]*\\) .*/\\1/') vlm-server \\
    "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}" 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""

ZSH = """
zmodload zsh/zpty
zpty z zsh -f -i
zpty -w z 'PROMPT= RPROMPT= ; fpath=('"${1:h}"' $fpath); autoload -U compinit; compinit -u -D'
zpty -w z 'zstyle ":completion:*" list-colors ""; zstyle ":completion:*" menu no'
zpty -w z 'bindkey "^I" complete-word; LISTMAX=0; setopt no_auto_menu; print READY-NOW'
zpty -r -m z line '*READY-NOW*' && zpty -r -m z line '*READY-NOW*'
zpty -n -w z "$2"$'\\t\\t'
sleep 1.5
while zpty -r -t z line; do print -rn -- $line; done
zpty -d z
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of each shell, and a `vlm-server` that has two models."""
    folder = tmp_path_factory.mktemp("completions")
    for shell in SHELLS:
        (folder / f"_vlm-server.{shell}").write_text(script(shell))
    (folder / "zsh").mkdir()
    (folder / "zsh/_vlm-server").write_text(script("zsh"))
    (folder / "settings.toml").touch()
    program = folder / "vlm-server"
    program.write_text("#!/bin/sh\necho org/one; echo org/two\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def needed(shell: str) -> str:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"there is no {shell} on this machine")
    return path


def output(folder: Path, *command: str) -> str:
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TERM": "xterm",
        "LANG": "C.UTF-8",
    }
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    return ended.stdout


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_bash_offers_expected_completions(scripts: Path, line: str, expected: set[str]) -> None:
    file = str(scripts / "_vlm-server.bash")
    offered = output(scripts, needed("bash"), "-c", BASH, "bash", file, line).split()
    assert expected <= set(offered)
    prefix = line.rpartition(" ")[2]
    assert all(completion.startswith(prefix) for completion in offered)


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_fish_offers_expected_completions(scripts: Path, line: str, expected: set[str]) -> None:
    file = str(scripts / "_vlm-server.fish")
    command = "source $argv[1]; complete -C $argv[2]"
    output_text = output(scripts, needed("fish"), "--no-config", "-c", command, file, line)
    offered = {completion.partition("\t")[0] for completion in output_text.splitlines()}
    assert expected <= offered


@pytest.mark.parametrize(("line", "expected"), CASES[::2])
def test_zsh_offers_expected_completions(scripts: Path, line: str, expected: set[str]) -> None:
    file = str(scripts / "zsh/_vlm-server")
    output_text = output(scripts, needed("zsh"), "-f", "-c", ZSH, "zsh", file, line)
    for completion in expected:
        assert completion in output_text


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_passes_shell_syntax_check(scripts: Path, shell: str) -> None:
    file = str(scripts / f"_vlm-server.{shell}")
    ended = subprocess.run([needed(shell), "-n", file], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_names_every_command(shell: str) -> None:
    text = script(shell)
    for name in COMMANDS:
        assert name in text


def test_models_list_names_prints_only_names(tmp_path: Path) -> None:
    snapshot = tmp_path / f"models--org--it/snapshots/{'a' * 40}"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    ended = subprocess.run(
        [sys.executable, "-m", "vlm_server.cli", "models", "list", "--names"],
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.stdout, ended.stderr) == ("demo\norg/it\n", "")
