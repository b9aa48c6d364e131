"""``pagemesh up`` refuses what no service could run with before it starts any of them."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from tests.support.model_files import write_model_files
from tests.unit.cli.test_command_line import error_of

from pagemesh.cli.mesh import gpu_check
from pagemesh.cli.mesh.run_folder import orphan_pool_bytes, run_folder
from pagemesh.cli.mesh.screen import Screen, fitted
from pagemesh.cli.mesh.start_checks import (
    PoolPlan,
    check_cache,
    check_room,
    check_settings,
    known_shape,
    plan_pool,
    pool_file_bytes,
)
from pagemesh.cli.up import for_eyes, plan
from pagemesh.kernels.layout import PageLayout
from pagemesh.kernels.native import library
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.runtime.service_config import load_service_config
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.pool_format import PoolFormat

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def pool_folder(clean_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGEMESH_POOL_DIR", str(tmp_path / "pools"))


@pytest.fixture(autouse=True)
def torch_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed."""
    monkeypatch.setattr(gpu_check, "version", lambda _name: "2.13.0+cpu")


def up_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return error_of(capsys, "up", "--http", ":0", *arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "cuda"], "is a build without CUDA"),
        (["--device", "cuda", "--dtype", "int8"], "--dtype"),
        (["--device", "interpreter", "--deterministic"], "--deterministic"),
        (["--host-bytes", "1MiB"], "pages are in the host's memory already"),
        (["--device", "interpreter", "--host-bytes", "16TiB"], "--pool-bytes"),
        (["--dtype", "float16"], "--dtype"),
        (["--otlp", "localhost:4318"], "--otlp"),
        (["--otlp", "http://"], "http://127.0.0.1:4318"),
        (["--otlp", "grpc://127.0.0.1:4317"], "--otlp"),
        (["--cors-origins", "example.com"], "scheme://host[:port]"),
        (["--nats", "http://127.0.0.1:4222"], "PAGEMESH_NATS"),
        (["--nats", "nats://127.0.0.1:1", "--nats-start-wait-ms", "0"], "connection refused"),
        (["--nats-tls-ca", "ca.pem"], "name one that has with --nats"),
        (["--nats", "tls://nats:4222", "--nats-tls-ca", "none.pem"], "PAGEMESH_NATS_TLS_CA"),
        (["--nats-user", "me"], "name yours with --nats"),
        (["--disk-bytes", "1GiB"], "(--disk-bytes) without PAGEMESH_DISK_DIR"),
        (["--disk-staging-bytes", "1GiB"], "(--disk-staging-bytes) without PAGEMESH_DISK_DIR"),
        (["--pool-bytes", "16TiB"], "--pool-bytes"),
        (["--pool-bytes", "64KiB", "--page-size", "256"], "holds no page"),
    ],
)
def test_a_setting_no_service_could_run_with_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], named: str
) -> None:
    folder = write_model_files(tmp_path / "tiny")
    assert named in up_error(capsys, "--model", str(folder), *arguments)
    assert not (tmp_path / "pools").exists(), "nothing was made"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is not supported"),
        ({"architectures": []}, "(none named)"),
        ({"architectures": 5}, "wrong kind"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"layer_types": ["linear_attention"] * 2}, "linear_attention"),
    ],
)
def test_a_model_the_engine_has_not_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    folder = write_model_files(tmp_path / "tiny", **fields)
    line = up_error(capsys, "--model", str(folder))
    assert named in line and str(folder) in line


def test_exact_answers_of_a_model_of_the_fallback_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_model_files(tmp_path / "tiny", architectures=["GPTNeoXForCausalLM"])
    line = up_error(capsys, "--model", str(folder), "--deterministic")
    assert "(--deterministic)" in line and str(folder) in line


def test_a_model_whose_heads_no_page_holds_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_model_files(tmp_path / "tiny", head_dim=1024)
    assert "no page holds K and V of this model" in up_error(capsys, "--model", str(folder))


def test_a_model_without_a_tokenizer_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_model_files(tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in up_error(capsys, "--model", str(folder))


@pytest.mark.parametrize("text", ["{not json", "[1]", "\xff"])
def test_a_broken_configuration_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    folder = write_model_files(tmp_path / "tiny")
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in up_error(capsys, "--model", str(folder))


def test_a_model_that_leaves_numbers_to_its_family_is_left_to_the_workers(tmp_path: Path) -> None:
    folder = write_model_files(tmp_path / "tiny", num_hidden_layers=None)
    flags = {"PAGEMESH_MODEL": str(folder), "PAGEMESH_HTTP": ":0"}
    assert plan(dict(os.environ), flags, Screen()).config.worker.model == str(folder)


def test_a_model_is_not_fetched_for_settings_that_cannot_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "--device" in up_error(capsys, "--model", "nobody/nothing", "--device", "cuda")


def test_a_pool_below_the_models_context_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_model_files(tmp_path / "tiny", max_position_embeddings=1 << 20)
    flags = {"PAGEMESH_MODEL": str(folder), "PAGEMESH_HTTP": ":0"}
    plan(dict(os.environ), flags | {"PAGEMESH_POOL_BYTES": "64MiB"}, Screen())
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("pool: holds 131,072 tokens, fewer than the 1,048,576 of the model's")
    assert "--pool-bytes 512MiB takes them" in line
    plan(dict(os.environ), flags | {"PAGEMESH_POOL_BYTES": "512MiB"}, Screen())
    assert capsys.readouterr().err == ""


def test_how_tokens_are_drawn_is_told_in_one_line_where_the_model_recommends_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_model_files(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    flags = {"PAGEMESH_MODEL": str(folder), "PAGEMESH_HTTP": ":0"}
    plan(dict(os.environ), flags, Screen())
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("sampling: temperature 0.6, top_k 20 unless a request says otherwise")
    plan(dict(os.environ), flags | {"PAGEMESH_GENERATION_CONFIG": "none"}, Screen())
    assert capsys.readouterr().err == ""


def test_a_mesh_that_is_open_to_all_pages_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_model_files(tmp_path / "tiny")
    flags = {"PAGEMESH_MODEL": str(folder), "PAGEMESH_HTTP": ":0"}
    for origins, keys in (("https://example.com", ""), ("*", "k" * 20)):
        given = {"PAGEMESH_CORS_ORIGINS": origins}
        plan({**os.environ, "PAGEMESH_API_KEYS": keys}, flags | given, Screen())
        assert capsys.readouterr().err == ""
    plan(dict(os.environ), flags | {"PAGEMESH_CORS_ORIGINS": "*"}, Screen())
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("open: ") and "--cors-origins" in line


def test_a_recommendation_nobody_could_follow_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_model_files(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"top_p": 1.5}')
    error = up_error(capsys, "--model", str(folder))
    assert "generation_config.json" in error and "$.top_p" in error
    assert "--generation-config none" in error


def test_the_pool_is_judged_by_the_pages_that_the_engine_allocates(tmp_path: Path) -> None:
    layout = PageLayout(layers=2, kv_heads=2, head_dim=16, page_size=16)
    assert layout.token_bytes == TOKEN_BYTES
    form = PoolFormat(4, 16, layout.page_bytes)
    assert PoolPlan(form, 64).shortfall == ""
    assert "holds 64 tokens, fewer than the 65" in PoolPlan(form, 65).shortfall


def test_room_is_what_is_free_and_what_killed_meshes_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(9, 9, 100 << 20))
    folder = tmp_path / "not" / "there" / "yet"
    assert "100 MiB free" in check_room(folder, 100 << 20)
    with pytest.raises(ConfigError, match=r"100 MiB free, the pool takes 101 MiB; .*--pool-bytes"):
        check_room(folder, 101 << 20)
    assert "101 MiB free" in check_room(folder, 101 << 20, orphan_bytes=1 << 20)


def test_a_folder_that_may_not_even_be_looked_into_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forbidden(_: Path) -> Usage:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "disk_usage", forbidden)
    with pytest.raises(
        ConfigError, match=r"PAGEMESH_POOL_DIR=.*\(permission denied\); name another"
    ):
        check_room(tmp_path, 1)


def test_a_folder_for_pools_where_nobody_can_write_is_not_called_too_small() -> None:
    # Root may write there as well as anybody, and it says that it has no byte free.
    with pytest.raises(ConfigError, match=r"=/proc \(--pool-dir\): cannot be written"):
        check_room(Path("/proc"), 1)


def test_a_full_file_system_is_called_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(9, 9, 0))
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(ConfigError, match="0 B free, the pool takes 1 MiB; lower"):
        check_room(tmp_path, 1 << 20)
    assert "1 MiB free" in check_room(tmp_path, 1 << 20, orphan_bytes=1 << 20)


def test_a_level_that_the_processor_has_not_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library.library(), "pm_best_level", lambda: CpuLevel.AVX2)
    for device in ("cpu", "interpreter"):
        line = up_error(capsys, "--cpu-level", "avx512", "--device", device)
        assert "PAGEMESH_CPU_LEVEL=avx512 but this CPU goes up to avx2; leave it out" in line


def test_a_folder_for_prepared_weights_that_cannot_be_one_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    new = tmp_path / "not" / "there" / "yet"
    assert check_cache(str(new)) == new
    assert list(tmp_path.iterdir()) == [], "nothing was made"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert check_cache("") == tmp_path / "pagemesh"
    file = tmp_path / "file"
    file.touch()
    line = up_error(capsys, "--cache-dir", str(file / "below"))
    named = f"PAGEMESH_CACHE_DIR={file / 'below'} (--cache-dir)"
    assert f"{named}: {file} is not a folder; name another" in line
    assert "/proc cannot be written" in up_error(capsys, "--cache-dir", "/proc/weights")


def test_ports_for_metrics_are_tried_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = up_error(capsys, "--metrics-port", str(port))
    assert f"PAGEMESH_METRICS_PORT={port} (--metrics-port): address already in use" in line
    assert "4 services take one each" in line


def test_services_log_for_people_where_up_is_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def log_format(**given: str) -> str:
        return for_eyes(load_service_config(given)).telemetry.log_format

    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert log_format() == "auto"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert log_format() == "console"
    assert log_format(PAGEMESH_LOG_FORMAT="json") == "json"


def test_only_pools_of_killed_meshes_count_as_room(tmp_path: Path) -> None:
    assert orphan_pool_bytes(tmp_path / "none") == 0
    with run_folder(tmp_path, "host") as living:
        (living.path / "host.pool").write_bytes(bytes(1 << 20))
        assert orphan_pool_bytes(tmp_path) == 0
        left = shutil.copytree(living.path, tmp_path / "up-left")
        assert 1 << 20 <= orphan_pool_bytes(tmp_path) < 2 << 20
        shutil.rmtree(left)


def test_the_ready_line_is_one_line_unless_a_terminal_would_break_it() -> None:
    facts = ("demo on 1 prefill + 1 decode, 2.0 s", "nats door: /dev/shm/up/client.url")
    line = fitted("ready http://127.0.0.1:8000", facts, width=None)
    assert line == (
        "ready http://127.0.0.1:8000 (demo on 1 prefill + 1 decode, 2.0 s; "
        "nats door: /dev/shm/up/client.url)"
    )
    assert fitted("ready http://127.0.0.1:8000", facts, width=len(line)) == line
    assert fitted("ready http://127.0.0.1:8000", facts, width=len(line) - 1).splitlines() == [
        "ready http://127.0.0.1:8000",
        "  demo on 1 prefill + 1 decode, 2.0 s",
        "  nats door: /dev/shm/up/client.url",
    ]


def test_more_memory_beside_a_disk_than_the_machine_has_is_refused(tmp_path: Path) -> None:
    disk = {"PAGEMESH_DEVICE": "interpreter", "PAGEMESH_DISK_DIR": str(tmp_path)}
    check_settings(
        load_service_config({**disk, "PAGEMESH_HOST_BYTES": str(1 << 20)}), own_nats=True
    )
    config = load_service_config({**disk, "PAGEMESH_HOST_BYTES": str(1 << 44)})
    with pytest.raises(ConfigError, match=r"^PAGEMESH_HOST_BYTES=.* of memory; give less$"):
        check_settings(config, own_nats=True)


def test_the_pool_of_a_device_takes_room_for_headers_alone(tmp_path: Path) -> None:
    folder = write_model_files(tmp_path / "tiny")
    shape = known_shape(folder)
    assert shape is not None
    config = load_service_config({"PAGEMESH_POOL_BYTES": str(64 << 20)})
    on_device = load_service_config(
        {"PAGEMESH_POOL_BYTES": str(64 << 20), "PAGEMESH_DEVICE": "interpreter"}
    )
    whole, headers = (pool_file_bytes(one, plan_pool(one, shape)) for one in (config, on_device))
    assert headers < whole // 2
    assert (pool_file_bytes(config, None), pool_file_bytes(on_device, None)) == (64 << 20, 0)
