"""Configuration: parsed once, refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pagemesh.engine.worker.settings import WorkerLimits
from pagemesh.runtime.config import Secret, load, options, to_environ, unknown_variables
from pagemesh.runtime.service_config import BEAT_LATE_MS_MAX, load_service_config
from pagemesh.runtime.settings import (
    CONFIGS,
    BusConfig,
    GatewayConfig,
    HostConfig,
    PagerConfig,
    TelemetryConfig,
    WorkerConfig,
)
from pagemesh.wire.errors import ConfigError

GOOD_SECRET = "b7f0c2d19a5e4f3388d1"


@pytest.mark.parametrize("kind", CONFIGS)
def test_defaults_work_without_configuration(kind: type[object]) -> None:
    assert load(kind, {}) == kind()


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_survives_the_way_to_a_child_process(kind: type[object]) -> None:
    config = load(kind, {})
    assert load(kind, to_environ(config)) == config


def test_no_variable_is_read_by_two_settings_and_all_have_help() -> None:
    found = [option for kind in CONFIGS for option in options(kind)]
    assert len({option.variable for option in found}) == len(found)
    assert all(option.help and option.variable.startswith("PAGEMESH_") for option in found)


def test_flags_have_the_names_of_variables() -> None:
    by_field = {option.field: option for option in options(GatewayConfig)}
    assert by_field["http_port"].variable == "PAGEMESH_HTTP_PORT"
    assert by_field["http_port"].flag == "--http-port"


def test_a_flag_wins_over_a_variable() -> None:
    environ = {"PAGEMESH_HTTP_PORT": "1"}
    assert load(GatewayConfig, environ, {"PAGEMESH_HTTP_PORT": "2"}).http_port == 2
    assert load(GatewayConfig, environ).http_port == 1


def test_every_kind_of_value_is_parsed() -> None:
    worker = load(WorkerConfig, {"PAGEMESH_DETERMINISTIC": "Yes", "PAGEMESH_DEVICE": "cuda"})
    assert (worker.deterministic, worker.device) == (True, "cuda")
    assert load(HostConfig, {"PAGEMESH_POOL_DIR": "/x/y"}).pool_dir == Path("/x/y")
    given = {"PAGEMESH_TRACE_RATIO": "0.25"}
    assert load(TelemetryConfig, given).trace_ratio == 0.25
    assert load(TelemetryConfig, given).sampled_ratio == 0.0, "there is nowhere to send traces"
    collected = load(TelemetryConfig, {**given, "PAGEMESH_OTLP": "http://127.0.0.1:4318"})
    assert collected.sampled_ratio == 0.25


@pytest.mark.parametrize(
    ("kind", "variable", "value", "allowed"),
    [
        (GatewayConfig, "PAGEMESH_HTTP_PORT", "http", "a whole number from 0 to 65535"),
        (GatewayConfig, "PAGEMESH_HTTP_PORT", "65536", "a whole number from 0 to 65535"),
        (GatewayConfig, "PAGEMESH_HTTP_PORT", "", "a whole number"),
        (GatewayConfig, "PAGEMESH_HTTP_PORT", "1.5", "a whole number"),
        (WorkerConfig, "PAGEMESH_DEVICE", "tpu", "one of cpu, cuda"),
        (WorkerConfig, "PAGEMESH_CPU_LEVEL", "sse9", "one of amx, avx512_bf16, avx512"),
        (WorkerConfig, "PAGEMESH_DETERMINISTIC", "maybe", "true or false"),
        (TelemetryConfig, "PAGEMESH_TRACE_RATIO", "nan", "a number from 0 to 1"),
        (PagerConfig, "PAGEMESH_POOL_BYTES", "-1", "a size from 64KiB to 16TiB"),
        (PagerConfig, "PAGEMESH_POOL_BYTES", "1KiB", "a size from 64KiB to 16TiB"),
        (HostConfig, "PAGEMESH_POOL_DIR", " ", "a path"),
        (HostConfig, "PAGEMESH_POOL_DIR", "~nobody-here/x", "write the path in full"),
    ],
)
def test_a_bad_value_names_itself_and_what_is_allowed(
    kind: type[object], variable: str, value: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(kind, {variable: value})
    assert variable in str(caught.value)
    assert repr(value) in str(caught.value)
    assert allowed in str(caught.value)


def test_a_bad_flag_is_named_as_a_flag() -> None:
    with pytest.raises(ConfigError, match="--http-port"):
        load(GatewayConfig, {}, {"PAGEMESH_HTTP_PORT": "x"})


@pytest.mark.parametrize(
    "secret", ["", "changeme", "ChangeMe", "pagemesh", "tooshort", "x" * 40, "password"]
)
def test_an_empty_short_or_known_secret_is_refused_without_showing_it(secret: str) -> None:
    with pytest.raises(ConfigError, match="PAGEMESH_SECRET") as caught:
        load(HostConfig, {"PAGEMESH_SECRET": secret})
    if secret not in ("", "pagemesh"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "variable"), [(HostConfig, "SECRET"), (GatewayConfig, "API_KEYS")]
)
def test_a_secret_that_is_no_text_is_refused_by_name(kind: type[object], variable: str) -> None:
    with pytest.raises(ConfigError, match=f"PAGEMESH_{variable} holds bytes that are no UTF-8"):
        load(kind, {f"PAGEMESH_{variable}": "\udcff" + GOOD_SECRET})


def test_a_secret_that_is_needed_and_missing_says_how_to_make_one() -> None:
    with pytest.raises(ConfigError, match="openssl rand"):
        load(HostConfig, {}).required_secret()
    config = load(HostConfig, {"PAGEMESH_SECRET": GOOD_SECRET})
    assert config.required_secret() == GOOD_SECRET.encode()


def test_secrets_do_not_show() -> None:
    config = load(HostConfig, {"PAGEMESH_SECRET": GOOD_SECRET})
    assert GOOD_SECRET not in repr(config)
    assert GOOD_SECRET not in str(dataclasses.asdict(config))
    assert Secret(GOOD_SECRET) == config.secret
    assert "hush" not in BusConfig(url="nats://u:hush@h:1").shown_url
    with pytest.raises(ConfigError, match=r"'nats://h:1'.*PAGEMESH_NATS_PASSWORD"):
        _ = BusConfig(url="nats://u:h,ush@h:1").servers
    with pytest.raises(ConfigError, match="'http://h:1'"):
        _ = TelemetryConfig(otlp="http://u:h/ush@h:1").traces_url


def test_a_scheme_may_be_written_in_capitals() -> None:
    config = BusConfig(url="TLS://Host:1,Nats://h:2")
    assert config.servers == ["tls://Host:1", "nats://h:2"] and config.demands_tls


@pytest.mark.parametrize(
    ("otlp", "url"),
    [
        ("", ""),
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector/prefix/", "https://collector/prefix/v1/traces"),
        ("http://127.0.0.1:4318/v1/traces", "http://127.0.0.1:4318/v1/traces"),
    ],
)
def test_traces_go_to_the_collectors_path(otlp: str, url: str) -> None:
    assert TelemetryConfig(otlp=otlp).traces_url == url


@pytest.mark.parametrize("otlp", ["localhost:4318", "http://", "grpc://a:4317", "http://a:99999"])
def test_a_collector_that_is_no_url_is_refused_by_name(otlp: str) -> None:
    with pytest.raises(ConfigError, match="PAGEMESH_OTLP"):
        _ = TelemetryConfig(otlp=otlp).traces_url


def test_every_setting_that_is_named_in_bytes_takes_a_size_with_a_unit() -> None:
    found = [option for kind in CONFIGS for option in options(kind)]
    assert {option.field for option in found if option.size} == {
        option.field for option in found if "_bytes" in option.field
    }
    assert load(PagerConfig, {"PAGEMESH_POOL_BYTES": "512MiB"}).pool_bytes == 512 << 20
    assert load(GatewayConfig, {}, {"PAGEMESH_BODY_BYTES_MAX": "8MB"}).body_bytes_max == 8_000_000
    assert [option.default for option in found if option.field == "pool_bytes"] == ["512MiB"]


def test_unknown_variables_are_found() -> None:
    environ = {"PAGEMESH_HTTP_PROT": "1", "PAGEMESH_HTTP_PORT": "1", "PATH": "x"}
    assert unknown_variables(environ, CONFIGS) == ["PAGEMESH_HTTP_PROT"]


def test_the_collector_of_the_opentelemetry_variable_is_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert load(TelemetryConfig, {}).otlp == "http://collector:4318"
    assert load(TelemetryConfig, {"PAGEMESH_OTLP": ""}).otlp == ""


@pytest.mark.parametrize("name", ["", "a.b", "*", "a b", "x/y", "\u00e9", "a" * 65])
def test_a_hosts_name_can_stand_in_subjects_and_names_of_files(name: str) -> None:
    with pytest.raises(ConfigError, match=r"PAGEMESH_HOST.*--host"):
        load(HostConfig, {"PAGEMESH_HOST": name})
    for fine in ("node-1_a", "gpu-", "-a", "a" * 64):
        assert load(HostConfig, {"PAGEMESH_HOST": fine}).host == fine


@pytest.mark.parametrize(
    ("kind", "variable", "flag"),
    [(WorkerConfig, "PAGEMESH_MODEL_NAME", "--model-name"),
     (HostConfig, "PAGEMESH_POOL_DIR", "--pool-dir")],
)  # fmt: skip
@pytest.mark.parametrize("text", ["/a\udcff", "/" + "x" * 1_024], ids=["no UTF-8", "too long"])
def test_what_messages_cannot_carry_is_refused_by_name(
    kind: type[object], variable: str, flag: str, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(kind, {variable: text})
    line = str(caught.value)
    assert line.startswith(f"{variable}={text[:80]!r} ({flag}) cannot be told")
    assert line.isprintable() and len(line) < 300


def test_sessions_live_longer_than_it_takes_to_tell_that_a_worker_lives() -> None:
    assert WorkerLimits().beat_late_ms_max == BEAT_LATE_MS_MAX
    ttl, beat = "PAGEMESH_SESSION_TTL_MS", "PAGEMESH_PAGER_HEARTBEAT_MS"
    for short in ({ttl: "1199"}, {beat: "1401"}, {ttl: "100", beat: "10"}):
        with pytest.raises(ConfigError, match=r"SESSION_TTL_MS=\d+ .*--session-ttl-ms.* give \d+"):
            load_service_config(short)
    for fine in ({}, {ttl: "1200"}, {beat: "1400"}, {ttl: "220", beat: "10"}):
        load_service_config(fine)
