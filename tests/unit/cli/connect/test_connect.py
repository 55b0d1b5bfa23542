"""`vlm-server connect` against the real front: what it writes, shows, refuses and takes back."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.unit.api.conftest import listening
from tests.unit.api.scripted_engine import ScriptedEngine
from tests.unit.cli.screen import Terminal
from vlm_server.cli.connect.change import edit
from vlm_server.cli.connect.clients import CLIENTS
from vlm_server.cli.connect.run import ENTERED_CLIENTS
from vlm_server.cli.connect.service import ServedModel, Service
from vlm_server.cli.main import main
from vlm_server.protocol import ModelFacts
from vlm_server.settings import Server, Settings

KEY = "key-of-this-daemon-0123456789"
FACTS = ModelFacts(
    family="qwen3_vl",
    context_tokens=40_000,
    capabilities=("completion", "vision", "tools"),
)
FILES = {
    "claude-code": (".claude/settings.json", '{\n  "permissions": {"allow": ["Bash(ls)"]}\n}\n'),
    "codex": (
        ".codex/config.toml",
        '# mine\nmodel = "gpt-5"  # best\n\n[mcp_servers.a]\nurl = "x"\n',
    ),
    "continue": (
        ".continue/config.yaml",
        "name: Me\nmodels:\n  # mine\n  - name: a\n    model: b\n",
    ),
    "opencode": (".config/opencode/opencode.json", '{"theme": "dark", "model": "a/b"}'),
    "zed": (
        ".config/zed/settings.json",
        '// Zed\n{\n  "theme": "One", // dark\n  "agent": {\n    "dock": "left",\n  },\n}\n',
    ),
}
"""The file of each client, and a text that its user may have in it."""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Awaitable[Ended]]


@pytest.fixture
def engine() -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.status = replace(engine.status, model_name="model", model_facts=FACTS)
    return engine


@pytest.fixture
async def daemon_url(engine: ScriptedEngine) -> AsyncIterator[str]:
    async with listening(engine, Settings(server=Server(api_keys=(KEY,)))) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith(
            ("XDG_", "CLAUDE_", "CODEX_", "OPENCODE_", "CONTINUE_", "ANTHROPIC_", "VLM_SERVER_")
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def run(
    daemon_url: str,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Run `vlm-server connect` with these words; `stdin` is what its user types."""

    async def run(*words: str, stdin: str = "", key: str = KEY) -> Ended:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        is_asking = words and "--undo" not in words
        options = ["--url", daemon_url, "--api-key", key] if is_asking else []
        code = await asyncio.to_thread(main, ["connect", *words, *options])
        return Ended(code, *capsys.readouterr())

    return run


def file_of(client: str, home: Path, text: str | None = None) -> Path:
    """The settings file of `client`, with `text` in it."""
    path = home / FILES[client][0]
    if text is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, newline="")
    return path


async def test_claude_code_gets_documented_variables(run: Run, home: Path, daemon_url: str) -> None:
    assert (await run("claude-code", "--yes")).code == 0
    assert json.loads(file_of("claude-code", home).read_text()) == {
        "env": {
            "ANTHROPIC_BASE_URL": daemon_url.removesuffix("/v1"),
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_MODEL": "model",
            "ANTHROPIC_DEFAULT_OPUS_MODEL": "model",
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "model",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "model",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "40000",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "10000",
        }
    }


async def test_codex_gets_documented_provider(run: Run, home: Path, daemon_url: str) -> None:
    assert (await run("codex", "--yes")).code == 0
    assert tomllib.loads(file_of("codex", home).read_text()) == {
        "model": "model",
        "model_provider": "vlm-server",
        "model_context_window": 40_000,
        "model_providers": {
            "vlm-server": {
                "name": "vlm-server",
                "base_url": daemon_url,
                "wire_api": "responses",
                "env_key": "VLM_SERVER_API_KEY",
            }
        },
    }


async def test_opencode_gets_documented_provider(run: Run, home: Path, daemon_url: str) -> None:
    assert (await run("opencode", "--yes")).code == 0
    assert json.loads(file_of("opencode", home).read_text()) == {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            "vlm-server": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "vlm-server",
                "options": {"baseURL": daemon_url, "apiKey": "{env:VLM_SERVER_API_KEY}"},
                "models": {
                    "model": {
                        "name": "model",
                        "attachment": True,
                        "tool_call": True,
                        "modalities": {"input": ["text", "image"], "output": ["text"]},
                        "limit": {"context": 40_000, "output": 10_000},
                    }
                },
            }
        },
        "model": "vlm-server/model",
    }


async def test_continue_gets_documented_model(run: Run, home: Path, daemon_url: str) -> None:
    assert (await run("continue", "--yes")).code == 0
    assert yaml.safe_load(file_of("continue", home).read_text()) == {
        "name": "Local Assistant",
        "version": "1.0.0",
        "schema": "v1",
        "models": [
            {
                "name": "model (vlm-server)",
                "provider": "openai",
                "model": "model",
                "apiBase": daemon_url,
                "apiKey": "${{ secrets.VLM_SERVER_API_KEY }}",
                "roles": ["chat", "edit", "apply"],
                "capabilities": ["tool_use", "image_input"],
                "defaultCompletionOptions": {"contextLength": 40_000, "maxTokens": 10_000},
            }
        ],
    }


async def test_zed_gets_documented_provider(run: Run, home: Path, daemon_url: str) -> None:
    assert (await run("zed", "--yes")).code == 0
    assert json.loads(file_of("zed", home).read_text()) == {
        "language_models": {
            "openai_compatible": {
                "vlm-server": {
                    "api_url": daemon_url,
                    "available_models": [
                        {
                            "name": "model",
                            "display_name": "model (vlm-server)",
                            "max_tokens": 40_000,
                            "max_output_tokens": 10_000,
                            "capabilities": {
                                "tools": True,
                                "images": True,
                                "parallel_tool_calls": True,
                                "prompt_cache_key": False,
                            },
                        }
                    ],
                }
            }
        },
        "agent": {"default_model": {"provider": "vlm-server", "model": "model"}},
    }


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
async def test_undo_gives_exact_file_back(run: Run, home: Path, client: str, end: str) -> None:
    """Also after a second connection, with another address."""
    text = FILES[client][1].replace("\n", end)
    file = file_of(client, home, text)
    for _ in range(2):
        assert (await run(client, "--yes")).code == 0
        assert file.read_bytes() != text.encode()
    assert "has this already" in (await run(client, "--yes")).out
    undone = await run(client, "--undo", "--yes")
    assert (undone.code, file.read_bytes()) == (0, text.encode())
    assert "not changed by" in (await run(client, "--undo")).err
    assert not list((home / ".local/state/vlm-server/connect").iterdir())


@pytest.mark.parametrize("client", CLIENTS)
async def test_undo_removes_file_that_was_new(run: Run, home: Path, client: str) -> None:
    file = file_of(client, home)
    assert (await run(client, "--yes")).code == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert (await run(client, "--undo", "--yes")).code == 0
    assert not file.exists()


async def test_undo_keeps_edits_since_and_names_changed_values(run: Run, home: Path) -> None:
    file = file_of("zed", home, FILES["zed"][1])
    await run("zed", "--yes")
    mine = '"model": "mine"'
    file.write_text(file.read_text().replace('"model": "model"', mine).replace("One", "Two"))
    undone = await run("zed", "--undo", "--yes")
    assert "agent.default_model was changed since" in undone.out
    text = file.read_text()
    assert mine in text
    assert '"theme": "Two", // dark' in text
    assert "language_models" not in text


async def test_reconnection_after_edits_is_undone_to_them(run: Run, home: Path) -> None:
    text = FILES["codex"][1]
    file = file_of("codex", home, text)
    await run("codex", "--yes")
    file.write_text(f'approval_policy = "never"\n{file.read_text()}')
    await run("codex", "--yes")
    assert (await run("codex", "--undo", "--yes")).code == 0
    assert tomllib.loads(file.read_text()) == {"approval_policy": "never", **tomllib.loads(text)}


@pytest.mark.parametrize(
    ("client", "text", "line"),
    [("claude-code", '{\n"a" 1}', 2), ("codex", "a = 1\nb =\n", 2), ("continue", "a: [\n", 2)],
)
async def test_broken_file_is_refused_with_line_and_untouched(
    run: Run, home: Path, client: str, text: str, line: int
) -> None:
    file = file_of(client, home, text)
    ended = await run(client, "--yes")
    assert ended.code == 1
    assert f"{file}, line {line}: " in ended.err
    assert file.read_text() == text
    assert not (home / ".local").exists()


async def test_file_that_is_not_text_is_refused(run: Run, home: Path) -> None:
    file = file_of("zed", home, "")
    file.write_bytes(b"{\n\xff}")
    assert "line 2: it is not UTF-8" in (await run("zed", "--yes")).err
    assert file.read_bytes() == b"{\n\xff}"


@pytest.mark.parametrize("answer", ["", "\n", "n\n", "yes please\n"])
async def test_change_is_shown_and_needs_consent(run: Run, home: Path, answer: str) -> None:
    text = FILES["codex"][1]
    file = file_of("codex", home, text)
    ended = await run("codex", stdin=answer)
    assert ended.code == 1
    assert '-model = "gpt-5"  # best' in ended.out
    assert '+model = "model"  # best' in ended.out
    assert file.read_text() == text
    assert (await run("codex", stdin="y\n")).code == 0
    assert file.read_text() != text
    assert (await run("codex", "--undo", stdin=answer)).code == 1
    assert file.read_text() != text


async def test_file_that_changes_before_consent_is_not_overwritten(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of("zed", home, "{}")

    def consent_late(_: str) -> str:
        file.write_text('{"new": 1}')
        return "y"

    monkeypatch.setattr("builtins.input", consent_late)
    assert "was changed meanwhile" in (await run("zed")).err
    assert file.read_text() == '{"new": 1}'


@pytest.mark.parametrize("client", [*CLIENTS, *ENTERED_CLIENTS])
async def test_keys_are_never_shown(run: Run, home: Path, client: str) -> None:
    """Nor those of other servers, which the settings hold already."""
    other = "sk-of-another-server"
    if client in FILES:
        file_of(client, home)
    if client == "claude-code":
        file_of(client, home, json.dumps({"env": {"ANTHROPIC_AUTH_TOKEN": other}}, indent=2))
    shown = [await run(client, "--print"), await run(client, "--yes")]
    if client in CLIENTS:
        is_written = KEY in file_of(client, home).read_text()
        assert is_written == (client == "claude-code")  # others refer to a variable
        shown.append(await run(client, "--undo", "--yes"))
    for ended in shown:
        assert ended.code == 0
        assert KEY not in ended.out + ended.err
        assert other not in ended.out + ended.err


async def test_links_are_followed_and_modes_kept(run: Run, home: Path) -> None:
    dotfiles = home / "dotfiles"
    dotfiles.mkdir()
    (dotfiles / "zed.json").write_text("{}")
    (dotfiles / "zed.json").chmod(0o640)
    link = file_of("zed", home)
    link.parent.mkdir(parents=True)
    link.symlink_to(dotfiles / "zed.json")
    assert (await run("zed", "--yes")).code == 0
    assert link.is_symlink()
    assert "vlm-server" in (dotfiles / "zed.json").read_text()
    assert (dotfiles / "zed.json").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in dotfiles.iterdir()] == ["zed.json"]
    assert (await run("zed", "--undo", "--yes")).code == 0
    assert (dotfiles / "zed.json").read_text() == "{}"


async def test_open_file_with_key_is_told(run: Run, home: Path) -> None:
    file = file_of("claude-code", home, "{}")
    file.chmod(0o644)
    assert f"chmod 600 {file}" in (await run("claude-code", "--yes")).out
    file_of("codex", home, "").chmod(0o644)  # refers to a variable
    assert "chmod" not in (await run("codex", "--yes")).out


def test_every_model_is_listed_and_chosen_one_is_used() -> None:
    big = ServedModel("org/Big", 100_000, reads_images=False, calls_tools=True)
    small = ServedModel("small", 8192, reads_images=True, calls_tools=False)
    service = Service("http://127.0.0.1:8000/v1", None, small, (big, small))
    written = {}
    for name in ("continue", "opencode", "zed"):
        client = CLIENTS[name]
        text = edit(client.form, client.form.EMPTY, client.edits(service, False))
        written[name] = client.form.parse(text)
    items = written["continue"]["models"]
    assert [item["model"] for item in items] == ["small", "org/Big"]
    assert [item["capabilities"] for item in items] == [["image_input"], ["tool_use"]]
    assert [item["apiKey"] for item in items] == ["none", "none"]
    provider = written["opencode"]["provider"]["vlm-server"]
    assert "apiKey" not in provider["options"]
    assert provider["models"]["org/Big"]["limit"] == {"context": 100_000, "output": 25_000}
    assert provider["models"]["org/Big"]["modalities"]["input"] == ["text"]
    assert written["opencode"]["model"] == "vlm-server/small"
    available = written["zed"]["language_models"]["openai_compatible"]["vlm-server"]
    images = {
        each["name"]: each["capabilities"]["images"] for each in available["available_models"]
    }
    assert images == {"org/Big": False, "small": True}


async def test_advised_command_quotes_file(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home / "my home"))
    file_of("claude-code", home / "my home", "{}").chmod(0o644)
    assert "chmod 600 '/" in (await run("claude-code", "--yes")).out


async def test_secrets_in_comments_and_urls_are_not_shown(run: Run, home: Path) -> None:
    secrets = ("commented-secret-1", "escaped-\\u0073ecret-2", "password-3")
    lines = (
        '{\n  "env": {\n    // export TOKEN=%s\n    "A_KEY": "%s",\n'
        '    "PROXY": "http://me:%s@host"\n  }\n}\n'
    )
    file_of("claude-code", home, lines % secrets)
    shown = (await run("claude-code", "--yes")).out + (await run("claude-code", "--undo")).out
    assert '"http://me:…@host"' in shown
    assert not any(secret in shown for secret in (*secrets, "escaped-secret"))


async def test_undo_restores_file_that_is_gone(run: Run, home: Path) -> None:
    text = FILES["codex"][1]
    file = file_of("codex", home, text)
    await run("codex", "--yes")
    file.unlink()
    assert (await run("codex", "--undo", stdin="n\n")).code == 1
    assert not file.exists()
    assert (await run("codex", "--undo", "--yes")).code == 0
    assert file.read_text() == text


async def test_file_of_special_kind_is_refused(run: Run, home: Path) -> None:
    path = file_of("zed", home)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert "is not a regular file" in (await run("zed", "--yes")).err
    path.unlink()
    path.mkdir()
    assert "is not a regular file" in (await run("zed", "--yes")).err


async def test_link_in_circle_is_refused(run: Run, home: Path) -> None:
    link = file_of("zed", home)
    link.parent.mkdir(parents=True)
    link.symlink_to(link)
    assert "leads nowhere" in (await run("zed", "--yes")).err


@pytest.mark.parametrize("client", CLIENTS)
async def test_print_writes_nothing(run: Run, home: Path, client: str) -> None:
    ended = await run(client, "--print")
    assert ended.code == 0
    assert str(file_of(client, home)) in ended.out
    assert os.listdir(home) == []


@pytest.mark.parametrize("client", ENTERED_CLIENTS)
async def test_steps_name_address_and_model(run: Run, home: Path, client: str) -> None:
    ended = await run(client)
    assert "http://127.0.0.1:" in ended.out
    assert ": model" in ended.out or "choose model" in ended.out
    assert os.listdir(home) == []
    assert "writes nothing" in (await run(client, "--undo")).err


@pytest.mark.parametrize("client", ENTERED_CLIENTS)
async def test_steps_wrap_at_terminal(
    run: Run, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    whole = (await run(client)).out
    monkeypatch.setattr("sys.stdout", screen := Terminal())
    await run(client)
    assert max(map(len, screen.getvalue().splitlines())) <= 80
    assert screen.getvalue().split() == whole.split()


@pytest.mark.parametrize(
    ("client", "variable", "file"),
    [
        ("claude-code", "CLAUDE_CONFIG_DIR", "settings.json"),
        ("codex", "CODEX_HOME", "config.toml"),
        ("continue", "CONTINUE_GLOBAL_DIR", "config.yaml"),
        ("opencode", "XDG_CONFIG_HOME", "opencode/opencode.json"),
        ("opencode", "OPENCODE_CONFIG", ""),
        ("zed", "XDG_CONFIG_HOME", "zed/settings.json"),
    ],
)
async def test_folders_in_environment_are_respected(
    run: Run, home: Path, client: str, variable: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(home / "elsewhere"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    assert (await run(client, "--yes")).code == 0
    assert (home / "elsewhere" / file).is_file()
    assert sorted(os.listdir(home)) == ["elsewhere", "state"]


async def test_opencode_with_comments_is_edited_where_it_is(run: Run, home: Path) -> None:
    file = file_of("opencode", home, "{}").with_suffix(".jsonc")
    file.write_text("{\n  // mine\n}\n")
    assert (await run("opencode", "--yes")).code == 0
    assert "// mine" in file.read_text()
    assert "vlm-server" in file.read_text()
    assert file_of("opencode", home).read_text() == "{}"


async def test_continue_with_old_settings_is_left_alone(run: Run, home: Path) -> None:
    old = file_of("continue", home).with_name("config.json")
    old.parent.mkdir()
    old.write_text("{}")
    assert "move them to config.yaml" in (await run("continue", "--yes")).err
    assert [path.name for path in old.parent.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("zed", "--model", "modl"), "serves no model modl: did you mean model?"),
        (("zed", "--yes", "--api-key", "wrong"), "key"),
    ],
)
async def test_wrong_model_and_key_are_errors(
    run: Run, home: Path, words: tuple[str, ...], message: str
) -> None:
    key = words[-1] if "--api-key" in words else KEY
    ended = await run(*words, key=key)
    assert ended.code == 1
    assert message in ended.err
    assert os.listdir(home) == []


async def test_model_that_is_not_loaded_is_error(
    run: Run, home: Path, engine: ScriptedEngine
) -> None:
    engine.status = replace(engine.status, model_facts=ModelFacts(), state="loading")
    assert "not loaded (loading)" in (await run("zed", "--yes")).err
    assert os.listdir(home) == []


async def test_list_shows_installed_and_connected_clients(
    run: Run, home: Path, daemon_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(home / "bin"))

    async def rows() -> dict[str, str]:
        ended = await run()
        assert ended.code == 0
        table, hints = ended.out.split("\n\n")
        assert "vlm-server connect CLIENT" in hints
        assert all(name in hints for name in ENTERED_CLIENTS)
        return {line.split()[0]: " ".join(line.split()[1:]) for line in table.splitlines()[1:]}

    assert await rows() == dict.fromkeys(CLIENTS, "no no")
    (home / "bin").mkdir()
    (home / "bin/zed").touch(mode=0o700)
    file = file_of("codex", home, FILES["codex"][1])
    assert await rows() == dict.fromkeys(CLIENTS, "no no") | {"zed": "yes no", "codex": "yes no"}
    await run("codex", "--yes")
    file.write_text(file.read_text() + "\n[mine]\n")
    assert (await rows())["codex"] == f"yes {daemon_url}"
    ours = file.read_text()
    for text in (ours.replace(daemon_url, "http://a.test/v1"), ours.replace(f'"{KEY}"', '"x"')):
        file.write_text(text.replace('model = "model"', 'model = "other"'))
        assert (await rows())["codex"] == "yes changed since"
    file.write_text(FILES["codex"][1])
    assert (await rows())["codex"] == "yes no"
    file.write_text("[broken")
    assert (await rows())["codex"].startswith("yes its settings can't be changed")
    monkeypatch.setenv("OPENCODE_CONFIG", "/etc/x.json")
    assert (await rows())["opencode"] == "no no"


@pytest.mark.parametrize(
    "words", ["--undo", "--yes", "--print", "--url http://127.0.0.1:1", "--model x", "--set a.b=1"]
)
def test_list_refuses_options_of_client(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["connect", *words.split()]) == 2
    error = capsys.readouterr().err
    assert f"connect {words.split()[0]} needs a CLIENT" in error


def test_list_without_home_knows_no_client(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for a user whom the system does not know, in a container."""

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert main(["connect"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:6]] == ["unknown"] * 5


def test_misspelt_client_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["connect", "claudecode"])
    assert end.value.code == 2
    assert "did you mean claude-code?" in capsys.readouterr().err


def test_help_fits_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlm_server.cli.main import build_parser
    from vlm_server.cli.usage import all_commands

    monkeypatch.setenv("COLUMNS", "100")
    (parser,) = [each for each in all_commands(build_parser()) if each.prog.endswith(" connect")]
    usage: Any = parser.format_help().partition("\nexamples:")[0]
    assert len(usage.splitlines()) <= 40
