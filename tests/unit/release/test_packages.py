"""Wheel and container image have the right data files, dependencies, version and user."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import vlm_server
from hatch_build import urls, with_absolute_links
from scripts.release.clone import ADDRESSED
from vlm_server.cli.main import build_parser, main

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTAINERFILE = (ROOT / "packaging/Containerfile").read_text(encoding="utf-8")


def container(instruction: str) -> list[str]:
    """The arguments of all instructions of a kind, with their lines joined."""
    joined = CONTAINERFILE.replace("\\\n", " ")
    return re.findall(rf"^{instruction} +(.+)$", joined, re.MULTILINE)


def test_package_has_no_extras_for_developers() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert not extras.keys() & PROJECT["dependency-groups"].keys()
    assert not any("pytest" in requirement for name in extras for requirement in extras[name])


@pytest.mark.parametrize(("version", "ref"), [("1.2.3", "v1.2.3"), ("1.2.4.dev1+gabc", "HEAD")])
def test_published_readme_has_no_relative_links(version: str, ref: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    at = "https://git.example/us/vlm_server"
    text = with_absolute_links(readme, at, version)
    targets = re.findall(r'\]\(([^)\s]+)\)|(?:src|href)="([^"]+)"', text)
    assert targets
    assert all(re.match(r"https?://|#", target) for both in targets for target in both if target)
    inside = {target for both in targets for target in both if target.startswith(at)}
    assert f"{at}/raw/{ref}/docs/images/works.png" in inside
    for target in inside:
        path = re.fullmatch(rf"{at}/(?:raw|blob)/{ref}/([^#]+)(?:#.*)?", target)
        assert path is not None
        assert (ROOT / path[1]).exists()


def test_all_files_name_repository_of_package() -> None:
    repository = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in ADDRESSED}
    assert [name for name, text in texts.items() if repository not in text] == []
    assert re.findall(r"git clone (\S+)", texts["README.md"]) == [repository]
    assert f"{repository}/issues" in urls(repository).values()
    releasing = (ROOT / "docs/releasing.md").read_text(encoding="utf-8")
    assert f"' {' '.join(ADDRESSED)}\n" in releasing, "its command changes all of them"


def test_published_readme_keeps_other_links() -> None:
    kept = "[a](#b) [c](https://d.example/e) [f](/g) `h` <img src='i'>"
    assert with_absolute_links(kept, "https://git.example/us/vlm_server", "1.0") == kept


def test_mlx_backends_come_only_from_extras() -> None:
    """Both backends install the same file, so one must not bring the other."""
    needed = PROJECT["project"]["dependencies"]
    extras = PROJECT["project"]["optional-dependencies"]
    assert not any("mlx[" in requirement or "openblas" in requirement for requirement in needed)
    assert any(requirement.startswith("mlx[cpu]") for requirement in extras["cpu"])
    assert any(requirement.startswith("mlx[cuda13]") for requirement in extras["cuda"])
    (version,) = {
        requirement.split("==")[1] for requirement in needed if requirement.startswith("mlx==")
    }
    for name in ("cpu", "cuda"):
        assert all("sys_platform == 'linux'" in requirement for requirement in extras[name])
        assert all(
            version in requirement for requirement in extras[name] if requirement.startswith("mlx[")
        )


def test_overrides_drop_requirements_of_mlx_vlm_alone() -> None:
    required = importlib.metadata.requires("mlx-vlm") or []
    theirs = {Requirement(line).name.lower() for line in required if "extra" not in line}
    ours = {Requirement(line).name for line in PROJECT["project"]["dependencies"]}
    overrides = (ROOT / "packaging/overrides.txt").read_text(encoding="utf-8")
    lines = [line.partition("#")[0].strip() for line in overrides.splitlines()]
    dropped = [Requirement(line) for line in lines if line]
    assert dropped
    assert {each.name for each in dropped} <= theirs - ours
    assert not any(each.marker is None or each.marker.evaluate() for each in dropped)


def test_version_equals_installed_package_version() -> None:
    assert vlm_server.__version__ == importlib.metadata.version("vlm-server")


def test_version_exists_without_installed_package() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import vlm_server as v"
    output = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{code}; print(v.__version__, hasattr(v, 'nothing'))"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    assert output.stdout.split()[1] == "False"
    assert re.match(r"\d", output.stdout)


def test_container_serves_all_addresses_only_with_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (words,) = container("CMD")
    command = json.loads(words)
    options = build_parser().parse_args(command)
    assert options.host == "0.0.0.0"
    assert main(command) == 2, "there is no such file here"
    assert "vlm-server-keys.toml" in capsys.readouterr().err


def test_container_runs_as_unprivileged_user() -> None:
    (user,) = container("USER")
    assert user.split(":")[0].isdecimal()
    assert user.split(":")[0] != "0"
    assert json.loads(container("VOLUME")[0]) == ["/models", "/state"]
    assert shlex.split(container("WORKDIR")[0]) == ["/state"]


def test_container_health_check_is_module_of_wheel() -> None:
    words = json.loads(container("HEALTHCHECK")[0].partition(" CMD ")[2])
    assert words[:-1] == ["python3", "-P", "-m"]
    assert importlib.util.find_spec(words[-1]) is not None
