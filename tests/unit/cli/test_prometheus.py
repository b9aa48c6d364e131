"""Alert rules and panels ask for metrics that exist, and say what they are about."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagemesh.pager.tiers.tier_counts import TierCounts
from pagemesh.runtime.metrics import REGISTRY

OPS = Path(__file__).parents[3] / "ops"
MEASURES = ("pagemesh.gateway", "pagemesh.pager", "pagemesh.engine.worker")
DASHBOARD: dict[str, Any] = json.loads((OPS / "grafana/dashboards/pagemesh.json").read_text())
PANELS: list[dict[str, Any]] = [one for one in DASHBOARD["panels"] if one["type"] != "row"]
COLUMNS = 24


def rules() -> list[dict[str, Any]]:
    text = (OPS / "prometheus" / "alerts.yml").read_text()
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def questions() -> Iterator[tuple[str, str]]:
    """Of rules and panels, with whose they are."""
    yield from ((rule["alert"], rule["expr"]) for rule in rules())
    for panel in PANELS:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])


def test_every_metric_that_is_asked_for_exists() -> None:
    for package in MEASURES:
        importlib.import_module(f"{package}.measures")
    importlib.import_module("pagemesh.pager.tier_measures")
    importlib.import_module("pagemesh.runtime.service_bus")
    known = {f"{metric.name}{end}" for metric in REGISTRY.collect() for end in ("", "_total")}
    for whose, expression in questions():
        for name in re.findall(r"pagemesh_\w+", expression):
            assert re.sub(r"_(bucket|count|sum)$", "", name) in known, f"{whose}: {name}"


def test_a_service_whose_name_is_gone_is_down_too() -> None:
    config = yaml.safe_load((OPS / "prometheus" / "prometheus.yml").read_text())
    (down,) = [rule["expr"] for rule in rules() if rule["alert"] == "ServiceDown"]
    for job in config["scrape_configs"]:
        if "dns_sd_configs" in job:
            assert f'absent(up{{job="{job["job_name"]}"}})' in down


def test_workers_that_were_stopped_in_order_raise_no_alert() -> None:
    (lost,) = [rule["expr"] for rule in rules() if rule["alert"] == "WorkersAreLost"]
    assert 'reason!="left"' in lost


def test_damaged_pages_on_disk_raise_an_alert_that_names_the_line_of_the_log() -> None:
    (rule,) = [rule for rule in rules() if rule["alert"] == "DiskPagesAreDamaged"]
    assert 'pagemesh_pager_disk_pages_total{fate="corrupt"}' in rule["expr"]
    assert "corrupt" in TierCounts.__dataclass_fields__
    assert "pager.disk_page_damaged" in rule["annotations"]["description"]


def test_every_alert_says_what_is_wrong_and_where_to_look() -> None:
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("page", "ticket", "info")


def test_prometheus_loads_the_rules() -> None:
    config = yaml.safe_load((OPS / "prometheus" / "prometheus.yml").read_text())
    for name in config["rule_files"]:
        assert (OPS / "prometheus" / name).is_file()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_rules_fire_when_nothing_is_served_though_every_process_is_up() -> None:
    command = ["promtool", "test", "rules", str(OPS / "prometheus" / "alerts_test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# Dashboard ---------------------------------------------------------------------------------------


def test_every_panel_says_what_it_shows_and_in_what_unit() -> None:
    assert len({one["id"] for one in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({one["title"] for one in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["title"] and panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["legendFormat"] for target in panel["targets"])


def test_legends_name_labels_that_are_there() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            kept = re.findall(r"by \(([\w, ]+)\)", target["expr"])
            assert all(any(label in each.split(", ") for each in kept) for label in labels)


def test_panels_fill_their_rows_and_lie_on_nobody_else() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken and all(x < COLUMNS for x, _ in cells)
        taken |= cells
    assert len(taken) == COLUMNS * (1 + max(y for _, y in taken))


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    compose = yaml.safe_load((OPS.parent / "compose.yaml").read_text())["services"]
    mounted = dict(one.split(":")[:2] for one in compose["dashboards"]["volumes"])
    provided = OPS / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provided / "dashboards/pagemesh.yaml").read_text())["providers"]
    assert mounted["./ops/grafana/dashboards"] == provider["options"]["path"]
    home = compose["dashboards"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/pagemesh.json"
    (source,) = yaml.safe_load((provided / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert any(each.endswith(f":{port}") for each in compose[host]["ports"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_prometheus_understands_every_question(tmp_path: Path) -> None:
    found = [
        {"record": f"asked:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, (_, expression) in enumerate(questions())
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "a", "rules": found}]}))
    command = ["promtool", "check", "rules", str(tmp_path / "rules.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
