"""Alert rules ask for metrics that exist, and say what to do."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import yaml

from pagemesh.pager.tiers.tier_counts import TierCounts
from pagemesh.runtime.metrics import REGISTRY

OPS = Path(__file__).parents[3] / "ops"
MEASURES = ("pagemesh.gateway", "pagemesh.pager", "pagemesh.engine.worker")


def rules() -> list[dict[str, Any]]:
    text = (OPS / "prometheus" / "alerts.yml").read_text()
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def test_every_metric_of_an_alert_exists() -> None:
    for package in MEASURES:
        importlib.import_module(f"{package}.measures")
    importlib.import_module("pagemesh.pager.tier_measures")
    known = {f"{metric.name}{end}" for metric in REGISTRY.collect() for end in ("", "_total")}
    for rule in rules():
        for name in re.findall(r"pagemesh_\w+", rule["expr"]):
            assert re.sub(r"_(bucket|count|sum)$", "", name) in known, f"{rule['alert']}: {name}"


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
