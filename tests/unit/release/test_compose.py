"""The services of packaging/compose fit the image, the settings and each other."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.unit.release.test_packages import container
from vlm_server.cli import options
from vlm_server.cli.main import build_parser
from vlm_server.settings import load_with_sources
from vlm_server.settings.environment import settings_in

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "packaging/compose"
VARIABLES = {
    "VLM_API_KEY": "a-long-key",
    "VLM_HOST": "host.docker.internal",
    "VLM_PORT": "9000",
}
"""What a user has in `.env`; the others have their defaults."""


def loaded(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def filled(value: Any) -> Any:
    """`value` with the variables that compose puts into it."""
    if isinstance(value, dict):
        return {key: filled(each) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each) for each in value]
    if not isinstance(value, str):
        return value

    def text_of(match: re.Match[str]) -> str:
        given = VARIABLES.get(match["name"], match["default"])
        assert given is not None, f"{match['name']} has no value"
        return given

    pattern = r"(?<!\$)\$\{(?P<name>\w+)(?::-(?P<default>[^}]*)|:\?[^}]*)?\}"
    return re.sub(pattern, text_of, value)


SERVICES = filled(loaded("compose.yaml"))["services"]
VOLUMES = loaded("compose.yaml")["volumes"]


def mounts(service: str) -> dict[str, str]:
    """What each path of a service's container is here: a file, or the name of a volume."""
    pairs = (mount.split(":")[:2] for mount in SERVICES[service]["volumes"])
    return {inside: outside for outside, inside in pairs}


def test_composed_daemon_listens_at_published_port_with_key() -> None:
    daemon = SERVICES["vlm-server"]
    arguments = build_parser().parse_args(daemon["command"])
    environment = {name: str(value) for name, value in daemon["environment"].items()}
    assert len(settings_in(environment)) == len(environment)
    given = tuple(options.overrides(arguments))
    server = load_with_sources(None, given, environment)[0].server
    assert server.host == "0.0.0.0"
    assert list(server.api_keys) == [VARIABLES["VLM_API_KEY"]]
    assert daemon["ports"] == [f"127.0.0.1:{server.port}:{server.port}"]
    assert server.port == int(VARIABLES["VLM_PORT"])


def test_composed_daemon_keeps_volumes_and_health_check_of_image() -> None:
    daemon = SERVICES["vlm-server"]
    assert set(mounts("vlm-server")) == set(json.loads(container("VOLUME")[0]))
    words = json.loads(container("HEALTHCHECK")[0].partition(" CMD ")[2])
    assert daemon["healthcheck"]["test"] == ["CMD", *words]


def test_composed_daemon_is_built_from_clone() -> None:
    build = SERVICES["vlm-server"]["build"]
    context = (FOLDER / build["context"]).resolve()
    assert context == ROOT
    dockerfile = context / build["dockerfile"]
    declared = re.findall(r"^ARG (\w+)", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
    assert build["args"] == {"EXTRA": "cpu"}
    assert set(build["args"]) <= set(declared)
    ignored = dockerfile.with_name(f"{dockerfile.name}.dockerignore").read_text(encoding="utf-8")
    assert "**/.env" in ignored.splitlines(), "the key is not sent to the builder"


def test_composed_services_restart_and_have_all_their_mounts() -> None:
    for name, service in SERVICES.items():
        assert service["restart"] == "unless-stopped"
        for outside in mounts(name).values():
            exists = (FOLDER / outside).is_file() if outside[0] == "." else outside in VOLUMES
            assert exists, outside


def test_composed_prometheus_scrapes_daemon_and_reads_alerts() -> None:
    script = SERVICES["prometheus"]["command"][0].replace("$$", "$")
    (config,) = re.findall(r"(/\S+/prometheus\.yaml) >", script)
    text = (FOLDER / mounts("prometheus")[config]).read_text(encoding="utf-8")
    settings = yaml.safe_load(text)
    (job,) = settings["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["vlm-server:8000"]}]
    folder = SERVICES["prometheus"]["working_dir"]
    assert job["authorization"] == {"credentials_file": f"{folder}/key"}
    assert set(settings["rule_files"]) <= mounts("prometheus").keys()


def test_composed_prometheus_is_started_with_key_and_address(tmp_path: Path) -> None:
    """Its script, with files of this machine; what it would start prints its arguments."""
    service = SERVICES["prometheus"]
    script = service["command"][0].replace("$$", "$")
    (config,) = re.findall(r"(/\S+/prometheus\.yaml) >", script)
    script = script.replace(config, str(FOLDER / mounts("prometheus")[config]))
    (tmp_path / "prometheus").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "prometheus").chmod(0o755)
    environment = {**service["environment"], "PATH": f"{tmp_path}:/usr/bin:/bin"}
    (shell, *flags) = service["entrypoint"]
    run = subprocess.run(
        [f"/bin/{shell}", *flags, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--config.file=prometheus.yaml" in run.stdout.split()
    assert (tmp_path / "key").read_text() == VARIABLES["VLM_API_KEY"]
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    (job,) = yaml.safe_load((tmp_path / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["host.docker.internal:9000"]}]
    assert "host.docker.internal:host-gateway" in service["extra_hosts"]


def test_composed_grafana_has_dashboard_and_its_source() -> None:
    inside = mounts("grafana")
    (source,) = loaded("grafana-datasource.yaml")["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    (provider,) = loaded("grafana-dashboards.yaml")["providers"]
    shown = [path for path in inside if path.startswith(provider["options"]["path"])]
    (dashboard,) = (FOLDER / inside[path] for path in shown)
    assert json.loads(dashboard.read_text(encoding="utf-8"))["uid"] == "vlm-server"
