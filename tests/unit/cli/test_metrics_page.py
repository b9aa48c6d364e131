"""The page about metrics has every one of them, in the words that scrapes have."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge, Histogram

PAGE = Path(__file__).parents[3] / "ops" / "docs" / "metrics.md"
SERVICES = {
    "the gateway": ("pagemesh.gateway.measures",),
    "the pager": ("pagemesh.pager.measures", "pagemesh.pager.tier_measures"),
    "a worker": ("pagemesh.engine.worker.measures",),
    "every service": ("pagemesh.runtime.service_bus", "pagemesh.runtime.spans"),
}


def rows(modules: tuple[str, ...]) -> set[str]:
    """Of the page's table: name, kind, labels, meaning."""
    made = set()
    for module in map(importlib.import_module, modules):
        for metric in vars(module).values():
            if not isinstance(metric, Counter | Gauge | Histogram):
                continue
            (told,) = metric.describe()
            name = told.name + ("_total" if told.type == "counter" else "")
            labels = ", ".join(f"`{label}`" for label in metric._labelnames)
            made.add(f"| `{name}` | {told.type} | {labels} | {told.documentation} |")
    return made


@pytest.mark.parametrize("service", SERVICES)
def test_the_page_has_each_metric_of_a_service_and_no_other(service: str) -> None:
    _, section = PAGE.read_text().split(f"## Of {service}\n")
    table = section.partition("\n## ")[0].splitlines()
    assert {line for line in table if line.startswith("| `")} == rows(SERVICES[service])
