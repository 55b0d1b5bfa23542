"""The queries of dashboard and alerts, parsed as PromQL, find their metrics in a scrape."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import pytest
import yaml

from tests.docs.pages import Page
from tests.unit.api.admin.scrapes import full_scrape, labels_of
from tests.unit.api.conftest import Connect
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.settings import MetricsSettings, Settings

ROOT = Path(__file__).parents[4]
DASHBOARD = json.loads((ROOT / "configs/grafana.json").read_text(encoding="utf-8"))
ALERTS = ROOT / "configs/alerts.yaml"
RULES = [
    rule
    for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
SCRAPED = {"job", "instance"}
"""The labels that Prometheus adds."""
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
ANNOTATIONS = DASHBOARD["annotations"]["list"]
PREFIXES = ("vlm_server_", "vllm:")
VLLM_PANELS = """
histogram_quantile(0.99, sum by(le) (rate(e2e_request_latency_seconds_bucket[5m])))
rate(prompt_tokens_total[5m])
rate(generation_tokens_total[5m])
histogram_quantile(0.99, sum by(le) (rate(inter_token_latency_seconds_bucket[5m])))
num_requests_running
num_requests_waiting
histogram_quantile(0.99, sum by(le) (rate(time_to_first_token_seconds_bucket[5m])))
kv_cache_usage_perc
sum by(le) (increase(request_prompt_tokens_bucket[5m]))
sum by(le) (increase(request_generation_tokens_bucket[5m]))
sum by(finished_reason) (increase(request_success_total[5m]))
rate(request_queue_time_seconds_sum[5m])
histogram_quantile(0.95, sum by(le) (rate(request_inference_time_seconds_bucket[5m])))
rate(request_prefill_time_seconds_sum[5m])
rate(request_decode_time_seconds_sum[5m])
rate(prefix_cache_hits_total[5m]) / rate(prefix_cache_queries_total[5m])
rate(mm_cache_hits_total[5m]) / rate(mm_cache_queries_total[5m])
""".strip().splitlines()
"""What dashboards for vLLM ask, without its prefix."""


@pytest.fixture(params=PREFIXES)
async def scraped(
    request: pytest.FixtureRequest, connect: Connect, engine: ScriptedEngine
) -> tuple[str, dict[str, frozenset[str]]]:
    """The prefix, and the labels of each metric."""
    client: httpx.AsyncClient = connect(Settings(metrics=MetricsSettings(prefix=request.param)))
    labels = labels_of(await full_scrape(client, engine))
    return request.param, {name: found | SCRAPED for name, found in labels.items()}


def parsed(query: str, prefix: str) -> Any:
    values = {"$instance": "a:8000", "$model_name": "demo", "$__rate_interval": "5m"}
    for variable, value in {"${prefix}": prefix, **values}.items():
        query = query.replace(variable, value)
    assert "$" not in query
    return promql.parse(query)


def selectors(node: Any) -> Iterator[Any]:
    """All `name{label="value"}` in a query."""
    match type(node).__name__:
        case "VectorSelector":
            yield node
        case "MatrixSelector":
            yield node.vector_selector
        case "Call":
            for argument in node.args:
                yield from selectors(argument)
        case "BinaryExpr":
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case "AggregateExpr" | "ParenExpr":
            yield from selectors(node.expr)
        case "NumberLiteral":
            return
        case other:
            raise AssertionError(f"{other} is not known to this test")


def aggregated(node: Any) -> set[str]:
    """The labels of a query's result."""
    match type(node).__name__:
        case "AggregateExpr":
            return set(node.modifier.labels) if node.modifier else set()
        case "Call":
            return set().union(*map(aggregated, node.args))
        case "BinaryExpr":
            return aggregated(node.lhs)
        case _:
            return set()


def check(query: Any, labels: dict[str, frozenset[str]]) -> None:
    found = list(selectors(query))
    assert found
    for selector in found:
        assert selector.name in labels
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched | aggregated(query) <= labels[selector.name] | {"le"}
        assert "le" not in aggregated(query) or selector.name.endswith("_bucket")


def test_dashboard_queries_use_existing_metrics_and_labels(
    scraped: tuple[str, dict[str, frozenset[str]]],
) -> None:
    prefix, labels = scraped
    for annotation in ANNOTATIONS:
        check(parsed(annotation["expr"], prefix), labels)
    for target in TARGETS:
        query = parsed(target["expr"], prefix)
        check(query, labels)
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= aggregated(query), target
        for selector in selectors(query):
            assert "instance" in {matcher.name for matcher in selector.matchers.matchers}, target


def test_dashboard_variables_come_from_existing_labels(
    scraped: tuple[str, dict[str, frozenset[str]]],
) -> None:
    prefix, labels = scraped
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "prefix", "instance", "model_name"]
    for name in ("instance", "model_name"):
        asked = variables[name]["query"]["query"]
        call = re.fullmatch(r"label_values\((.+), (\w+)\)", asked)
        assert call is not None
        assert call[2] == name
        (selector,) = selectors(parsed(call[1], prefix))
        used = {matcher.name for matcher in selector.matchers.matchers}
        assert {name} | used <= labels[selector.name]
    assert variables["prefix"]["query"] == MetricsSettings().prefix


async def test_alert_queries_use_existing_metrics_and_labels(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    labels = labels_of(await full_scrape(client, engine))
    labels = {name: found | SCRAPED for name, found in labels.items()}
    labels["up"] = frozenset(SCRAPED)
    for rule in RULES:
        query = promql.parse(rule["expr"])
        check(query, labels)
        text = "".join(rule["annotations"].values())
        shown = set(re.findall(r"\$labels\.(\w+)", text))
        assert all(shown <= labels[selector.name] for selector in selectors(query)), rule["alert"]


def test_every_alert_leads_to_its_runbook() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    repository = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    runbooks = Page(ROOT / "docs/troubleshooting.md")
    alerts = [rule["alert"] for rule in RULES]
    for rule, alert in zip(RULES, alerts, strict=True):
        url, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert url == f"{repository}/blob/HEAD/{runbooks.name}"
        assert anchor == alert.lower()
        assert anchor in runbooks.anchors
    text = runbooks.path.read_text(encoding="utf-8")
    assert re.findall(r"^### (VlmServer\w+)$", text, re.MULTILINE) == alerts
    operations = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(VlmServer\w+)`", operations)) <= set(alerts)


def test_summary_of_each_alert_names_instance() -> None:
    summaries = [rule["annotations"]["summary"] for rule in RULES]
    assert summaries
    assert [text for text in summaries if "{{ $labels.instance }}" not in text] == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus' promtool")
def test_promtool_accepts_alerts(tmp_path: Path) -> None:
    subprocess.run(["promtool", "check", "rules", ALERTS], check=True)
    series = 'vlm_server_engine_restarts_total{instance="a:8000",model_name="demo"}'
    cases = {
        "rule_files": [str(ALERTS)],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": series, "values": "0x30 0 1 2 3 4 5"}],
                "alert_rule_test": [
                    {"eval_time": "29m", "alertname": "VlmServerEngineRestarts"},
                    {"eval_time": "36m", "alertname": "VlmServerDown"},
                ],
                "promql_expr_test": [
                    {
                        "expr": "ALERTS{alertname='VlmServerEngineRestarts'} == 1",
                        "eval_time": "36m",
                        "exp_samples": [
                            {
                                "labels": "ALERTS{alertname='VlmServerEngineRestarts',"
                                "alertstate='firing',severity='warning',"
                                "instance='a:8000',model_name='demo'}",
                                "value": 1,
                            }
                        ],
                    }
                ],
            }
        ],
    }
    (tmp_path / "cases.yaml").write_text(json.dumps(cases), encoding="utf-8")
    subprocess.run(["promtool", "test", "rules", tmp_path / "cases.yaml"], check=True)


def test_dashboard_panels_do_not_overlap() -> None:
    covered = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not covered & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        covered |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.parametrize("query", VLLM_PANELS)
async def test_vllm_dashboard_queries_work_with_vllms_prefix(
    query: str, connect: Connect, engine: ScriptedEngine
) -> None:
    client = connect(Settings(metrics=MetricsSettings(prefix="vllm:")))
    labels = labels_of(await full_scrape(client, engine))
    parsed_query = promql.parse(query)
    for selector in selectors(parsed_query):
        assert {"model_name"} | aggregated(parsed_query) <= labels[f"vllm:{selector.name}"]


@pytest.mark.parametrize(
    "query", ["rate(vlm_server_gone_total[5m])", "sum by (le) (vlm_server_engine_up)"]
)
def test_query_check_finds_wrong_queries(query: str) -> None:
    with pytest.raises(AssertionError):
        check(promql.parse(query), {"vlm_server_engine_up": frozenset({"model_name"})})
