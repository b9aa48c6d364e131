"""compose.yaml keeps its promises: loopback, no root, no default secret, pinned images, and
settings that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagemesh.cli.serve import ROLES
from pagemesh.runtime.config import Secret, options
from pagemesh.runtime.settings import CONFIGS
from pagemesh.wire.subjects import BUS_ROLES

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
SETTINGS = {option.variable: option for kind in CONFIGS for option in options(kind)}
REQUIRED = re.compile(r"^\$\{(PAGEMESH_[A-Z_]+):\?[^}]+\}$")


def environment(name: str) -> dict[str, str]:
    found: dict[str, str] = SERVICES[name].get("environment", {})
    return found


def test_every_role_has_a_service_that_runs_it() -> None:
    for role in ROLES:
        assert SERVICES[role]["command"] == ["serve", role]
        assert environment(role)["PAGEMESH_NATS_USER"] == role


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_is_root_or_unbounded_or_reachable_from_outside(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"] and service["read_only"]
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned_to_a_full_version(name: str) -> None:
    image = SERVICES[name]["image"]
    assert image == "pagemesh:local" or re.search(r":v?\d+\.\d+\.\d+", image)


@pytest.mark.parametrize("name", SERVICES)
def test_every_secret_must_be_given_and_has_no_default(name: str) -> None:
    for variable, value in environment(name).items():
        secret = variable in SETTINGS and SETTINGS[variable].kind is Secret
        if secret or "PASSWORD" in variable:
            assert REQUIRED.match(value), f"{name}: {variable}={value}"


@pytest.mark.parametrize("role", ROLES)
def test_services_are_given_settings_that_exist(role: str) -> None:
    assert set(environment(role)) <= set(SETTINGS)


def test_with_tls_every_service_asks_for_it_and_only_the_server_gets_the_key() -> None:
    services = yaml.safe_load((ROOT / "ops/docker/compose.tls.yaml").read_text())["services"]
    assert set(services) == {"nats", *ROLES}
    for role in ROLES:
        assert set(services[role]["environment"]) <= set(SETTINGS)
        assert services[role]["environment"]["PAGEMESH_NATS"].startswith("tls://nats:")
        (mounted,) = services[role]["volumes"]
        assert mounted.endswith(
            f"/ca.pem:{services[role]['environment']['PAGEMESH_NATS_TLS_CA']}:ro"
        )


def test_the_server_is_given_the_password_of_every_role() -> None:
    wanted = {f"PAGEMESH_NATS_PASSWORD_{role.upper()}" for role in BUS_ROLES}
    assert set(environment("nats")) == wanted


def test_the_example_of_env_names_every_secret_and_gives_none() -> None:
    lines = (ROOT / "ops/docker/env.example").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    values = [str(value) for name in SERVICES for value in environment(name).values()]
    required = {found.group(1) for value in values if (found := REQUIRED.match(value))}
    assert set(given) == required
    assert set(given.values()) == {""}


def test_pager_and_workers_share_one_pool() -> None:
    for role in ("pager", "prefill", "decode"):
        assert "pool:/var/lib/pagemesh/pool" in SERVICES[role]["volumes"]
    assert COMPOSE["volumes"]["pool"]["driver_opts"]["type"] == "tmpfs"


def test_the_example_of_env_tells_how_the_room_in_memory_is_made_larger() -> None:
    example = (ROOT / "ops/docker/env.example").read_text()
    for name in ("pool", "cache"):
        mounted = COMPOSE["volumes"][name]["driver_opts"]["o"]
        found = re.match(r"size=\$\{(PAGEMESH_[A-Z_]+):-\d+\},", mounted)
        assert found and f"\n#{found[1]}=" in example


def test_the_gateway_stops_first_and_the_pager_after_the_workers() -> None:
    """Compose stops what others depend on after those."""
    assert {"prefill", "decode", "pager"} <= set(SERVICES["gateway"]["depends_on"])
    for role in ("prefill", "decode"):
        assert "pager" in SERVICES[role]["depends_on"]
    for role in ROLES:
        assert SERVICES[role]["depends_on"]["nats"] == {"condition": "service_healthy"}


def test_a_model_of_this_host_is_mounted_where_every_service_looks_for_it() -> None:
    mounted = "${PAGEMESH_MODEL_FOLDER:-./ops/demo_model/weights}:/model:ro"
    for role in ("gateway", "prefill", "decode"):
        assert mounted in SERVICES[role]["volumes"]
        assert (
            environment(role)["PAGEMESH_MODEL"]
            == "${PAGEMESH_MODEL:-${PAGEMESH_MODEL_FOLDER:+/model}}"
        )


def test_what_prometheus_keeps_in_memory_fits_its_own_limit() -> None:
    kept = re.search(r"size=(\d+)m", COMPOSE["volumes"]["metrics"]["driver_opts"]["o"])
    limit = SERVICES["prometheus"]["deploy"]["resources"]["limits"]["memory"]
    assert kept and int(kept[1]) <= int(limit.removesuffix("m")) / 2


def test_the_collector_sends_to_the_tracing_ui_that_is_there() -> None:
    config = yaml.safe_load((ROOT / "ops/otel/collector.yaml").read_text())
    host = config["exporters"]["otlp"]["endpoint"].partition(":")[0]
    assert host in SERVICES
    assert environment("gateway")["PAGEMESH_OTLP"] == "http://collector:4318"


def test_prometheus_asks_every_role() -> None:
    config = yaml.safe_load((ROOT / "ops/prometheus/prometheus.yml").read_text())
    assert {job["job_name"] for job in config["scrape_configs"]} == set(ROLES)
