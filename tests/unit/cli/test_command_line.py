"""Whatever is wrong with flags and variables is one line that names it, and exit code 2."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import click
import pytest
from tests.support.interrupts import hear_interrupts
from tests.support.model_files import write_model_files

from pagemesh.cli import up
from pagemesh.cli.main import cli, run
from pagemesh.cli.mesh.plan_mesh import plan_services
from pagemesh.cli.mesh.screen import Screen
from pagemesh.cli.mesh.up_config import http_url
from pagemesh.cli.options import given_flags
from pagemesh.cli.other_names import BY_COMMAND, name_here
from pagemesh.cli.serve import service_config
from pagemesh.cli.up import MeshPlan, plan
from pagemesh.runtime.ports import free_port
from pagemesh.wire.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_model_files(tmp_path / "tiny-model"))


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a wrong command line is answered with."""
    assert run([*map(str, arguments)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    [line] = shown.err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["up", "--bogus"], "--bogus"),
        (["up", "--prefill", "many"], "--prefill"),
        (["up", "--prefill", "65"], "--prefill"),
        (["up", "--device", "abacus"], "--device"),
        (["up", "--http", "nowhere"], "--http"),
        (["up", "--http", "127.0.0.1:70000"], "--http"),
        (["up", "--http", "127.0.0.1:" + "9" * 5_000], "--http"),
        (["up", "--http", "127.0.0.1:\u00b2"], "--http"),
        (["health", "localhost:8000"], "'localhost:8000' is not an http:// or https:// URL"),
        (["health", "http://a..b"], "'http://a..b/health/ready' is not an http:// or https:// URL"),
        (["chat", "--url", "http://a..b", "--once", "hello"], "PAGEMESH_URL='http://a..b' (--url)"),
        (["up", "--http", ":0", "--model", "/does/not/exist"], "/does/not/exist"),
        (["up", "--http", ":0", "--model", __file__], "is a file"),
        (["up", "--http", ":0", "--model", "~nobody-here/x"], "model ~nobody-here/x: no home"),
        (["up", "--http", ":0", "--model", "n" * 300 + "/x"], "file name too long"),
        (
            ["up", "--http", ":0", "--disk-dir", "~nobody-here/x"],
            "PAGEMESH_DISK_DIR=~nobody-here/x",
        ),
        (["serve", "decode", "--model", "n" * 300], "file name too long"),
        (
            ["serve", "pager", "--pool-dir", "~nobody-here/x"],
            "--pool-dir='~nobody-here/x': no home",
        ),
        (["up", "--pool-bytes", "512 acres"], "from 64KiB to 16TiB"),
        (["up", "--pool-bytes", "8G"], "such as 512MiB or 8GB"),
        (["up", "--body-bytes-max", "2TiB"], "from 1KiB to 1GiB"),
        (["up", "--host", "127.0.0.1"], "an address, where a name is wanted; one to serve at is"),
        (["up", "--host", "[::]"], "an address, where a name is wanted; one to serve at is --http"),
        (["up", "--port", "3"], "No such option '--port', which is here --http HOST:PORT; see"),
        (["up", "-t", "3"], "No such option '-t', which is here --threads; see pagemesh up --help"),
        (["serve", "gateway", "--port", "3"], "'--port', which is here --http-port; see pagemesh"),
        (["up", "--api-key", "x"], "No such option '--api-key', which is here PAGEMESH_API_KEYS;"),
        (["serve", "butler"], "butler"),
        (["serve", "pager", "--pool-bytes", "lots"], "--pool-bytes"),
        (["sing"], "sing"),
        (["plan", "--memory"], "requires an argument; see pagemesh plan --help"),
        (["cache", "stats", "--nats"], "requires an argument; see pagemesh cache stats --help"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert named in error_of(capsys, *arguments)


def test_what_other_servers_call_a_setting_is_told_as_the_readme_has_it() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    table = readme.partition("| there | here |\n|---|---|\n")[2].partition("\n\n")[0]
    for line in table.splitlines():
        there, here = (cell.strip() for cell in line.strip("|").split("|"))
        flags = [flag.strip("` ") for flag in there.split(",") if flag.strip() != "`--host`"]
        names = [here] if here.startswith("none") else here.replace("`", "").split(", ")
        told = [name_here("pagemesh up", flag) for flag in flags]
        assert told == (names if len(names) > 1 else names * len(flags)), line
    assert name_here("pagemesh chat", "--api-key") is None


@pytest.mark.parametrize("path", list(BY_COMMAND))
def test_a_flag_that_is_told_in_place_of_another_servers_is_one_of_the_command(path: str) -> None:
    command: click.Command | None = cli
    for name in path.split()[1:]:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), name)
    assert command is not None
    flags = {option for each in command.params for option in each.opts}
    told = {here.split()[0] for here in BY_COMMAND[path].values()}
    assert {here for here in told if here.startswith("--")} <= flags


def test_a_variable_that_nothing_reads_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMESH_HTTPPORT", "8000")
    for command in ("up", "plan", "chat", "doctor"):
        assert "PAGEMESH_HTTPPORT" in error_of(capsys, command)


def test_a_command_may_be_told_to_run_the_sources_of_the_core(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMESH_COMPILED", "0")
    assert "/does/not/exist" in error_of(capsys, "up", "--model", "/does/not/exist")


def test_the_services_of_up_are_told_so_too_and_no_variable_that_is_no_setting_of_theirs(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan({"PAGEMESH_MODEL": model, "PAGEMESH_HTTP": ":0"}, {}, Screen())
    assert not any("PAGEMESH_COMPILED" in each for each in environments(made))
    monkeypatch.setenv("PAGEMESH_COMPILED", "0")
    monkeypatch.setenv("PAGEMESH_PREFILL", "3")
    assert {each["PAGEMESH_COMPILED"] for each in environments(made)} == {"0"}
    assert not any("PAGEMESH_PREFILL" in each for each in environments(made))


def environments(made: MeshPlan) -> list[Mapping[str, str]]:
    """Those of the services that ``up`` starts."""
    return [spec.environ for spec in plan_services(made.up, made.config, None)]


def test_a_gateway_of_its_own_does_not_pass_over_the_address_of_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMESH_HTTP", "0.0.0.0:9000")
    line = error_of(capsys, "serve", "gateway", "--model", "/does/not/exist")
    assert "PAGEMESH_HTTP_HOST (--http-host) and PAGEMESH_HTTP_PORT (--http-port)" in line
    assert "/does/not/exist" in error_of(capsys, "serve", "decode", "--model", "/does/not/exist")


def test_a_wrong_variable_is_named_as_a_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMESH_PAGE_SIZE", "0")
    assert "PAGEMESH_PAGE_SIZE='0'" in error_of(capsys, "up")


def test_an_occupied_port_is_named_with_what_to_do(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = error_of(capsys, "up", "--model", model, "--http", f"127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in line and "--http" in line


def test_a_host_that_is_not_found_is_told_in_words(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    for host in ("999.1.1.1", "a..b"):
        line = error_of(capsys, "up", "--model", model, "--http", f"{host}:8000")
        assert f"cannot serve at {host}:8000: name or service not known" in line


def test_a_key_that_is_too_short_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMESH_API_KEYS", "me:short")
    line = error_of(capsys, "up", "--model", model, "--http", "127.0.0.1:0")
    assert "PAGEMESH_API_KEYS" in line and "16 characters" in line


def test_a_mesh_without_workers_is_refused(capsys: pytest.CaptureFixture[str], model: str) -> None:
    line = error_of(capsys, "up", "--model", model, "--prefill", "0", "--decode", "0")
    assert "at least one worker" in line


def test_flags_win_over_variables(model: str) -> None:
    flags = given_flags({"pagemesh_model": model, "pagemesh_http_port": 0, "pagemesh_host": None})
    made = plan({"PAGEMESH_MODEL": "elsewhere", "PAGEMESH_PAGE_SIZE": "32"}, flags, Screen())
    assert (made.config.worker.model, made.config.worker.page_size) == (model, 32)
    assert made.config.worker.model_name == "tiny-model"


def test_flags_win_over_an_address_in_a_variable(model: str) -> None:
    port = free_port()

    def served(http: str, **flags: object) -> tuple[str, int]:
        given = given_flags({"pagemesh_model": model, **flags})
        gateway = plan({"PAGEMESH_HTTP": http}, given, Screen()).config.gateway
        return gateway.http_host, gateway.http_port

    assert served("127.0.0.1:1", pagemesh_http_port=port) == ("127.0.0.1", port)
    assert served(f"0.0.0.0:{port}", pagemesh_http_host="127.0.0.1") == ("127.0.0.1", port)
    assert served("127.0.0.1:1", pagemesh_http=f"127.0.0.2:{port}") == ("127.0.0.2", port)
    both = {"pagemesh_http": f":{port}", "pagemesh_http_host": "127.0.0.2"}
    assert served("127.0.0.1:1", **both) == ("127.0.0.2", port)
    for name, value in (("host", "127.0.0.3"), ("port", "1")):
        with pytest.raises(ConfigError, match="--http and --http-host or --http-port name diff"):
            served("", pagemesh_http=f"127.0.0.2:{port}", **{f"pagemesh_http_{name}": value})


def test_port_zero_becomes_a_free_port_that_restarts_can_keep(model: str) -> None:
    made = plan({}, {"PAGEMESH_MODEL": model, "PAGEMESH_HTTP": "127.0.0.1:0"}, Screen())
    assert made.config.gateway.http_port > 0


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("0.0.0.0:0", "http://127.0.0.1:"), (":0", "http://127.0.0.1:"),
        ("[::1]:0", "http://[::1]:"), ("[::]:0", "http://[::1]:"),
    ],
)  # fmt: skip
def test_the_url_is_one_that_a_client_here_can_use(model: str, address: str, url: str) -> None:
    made = plan({}, {"PAGEMESH_MODEL": model, "PAGEMESH_HTTP": address}, Screen())
    assert http_url(made.config).startswith(url)


@pytest.mark.parametrize(
    ("address", "keys", "told"),
    [("0.0.0.0:0", "", True), ("0.0.0.0:0", "k" * 40, False), ("127.0.0.1:0", "", False),
     ("[::1]:0", "", False)],
)  # fmt: skip
def test_a_mesh_that_others_can_reach_without_a_key_says_so(
    capsys: pytest.CaptureFixture[str], model: str, address: str, keys: str, told: bool
) -> None:
    environ = {"PAGEMESH_MODEL": model, "PAGEMESH_HTTP": address}
    plan(environ | ({"PAGEMESH_API_KEYS": keys} if keys else {}), {}, Screen())
    assert ("PAGEMESH_API_KEYS" in capsys.readouterr().err) == told


def test_a_named_nats_server_is_used_instead_of_an_own_one(model: str) -> None:
    flags = {"PAGEMESH_MODEL": model, "PAGEMESH_HTTP": ":0"}
    assert plan({}, flags, Screen()).own_nats
    assert not plan({}, flags | {"PAGEMESH_NATS": "nats://10.0.0.1:4222"}, Screen()).own_nats
    assert not plan({"PAGEMESH_NATS": "nats://10.0.0.1:4222"}, flags, Screen()).own_nats


def test_a_nats_url_that_cannot_be_used_is_refused_before_anything_starts(model: str) -> None:
    flags = {"PAGEMESH_MODEL": model, "PAGEMESH_HTTP": ":0", "PAGEMESH_NATS": "foo"}
    with pytest.raises(ConfigError, match="PAGEMESH_NATS='foo'"):
        plan({}, flags, Screen())


def metrics_ports(model: str, first: int) -> list[str]:
    flags = {"PAGEMESH_MODEL": model, "PAGEMESH_HTTP": ":0", "PAGEMESH_METRICS_PORT": str(first)}
    made = plan({}, flags, Screen())
    return [each["PAGEMESH_METRICS_PORT"] for each in environments(made)]


def test_each_service_of_a_mesh_has_a_metrics_port_of_its_own(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "check_metrics_ports", lambda *_: None)  # whatever is taken here
    assert metrics_ports(model, 9100) == ["9100", "9101", "9102", "9103"]
    assert metrics_ports(model, 0) == ["0"] * 4


def test_metrics_ports_past_the_last_one_are_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"PAGEMESH_METRICS_PORT=65533 .* for 4 services"):
        metrics_ports(model, 65_533)


def test_metrics_ports_with_the_one_that_is_served_among_them_are_refused(model: str) -> None:
    port = free_port()
    flags = {"PAGEMESH_MODEL": model, "PAGEMESH_HTTP": f"127.0.0.1:{port}"}
    with pytest.raises(ConfigError, match=f"--metrics-port.: the mesh serves at {port}; name anot"):
        plan({}, flags | {"PAGEMESH_METRICS_PORT": str(port - 1)}, Screen())


def test_help_shows_the_defaults_that_up_has_and_leaves_out_what_it_settles(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["up", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "[PAGEMESH_NATS] [default: a server of its own]" in shown
    assert "[PAGEMESH_LOG_LEVEL] [default: warning]" in shown
    assert "--name " not in shown and "--pager-kill-holders" not in shown
    assert "The shape of the mesh:" in shown and "The connection to NATS:" in shown


def test_doctor_names_a_variable_that_nothing_reads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMESH_PORT", "1")
    assert "PAGEMESH_PORT" in error_of(capsys, "doctor")


@pytest.mark.parametrize("role", ["pager", "prefill", "decode"])
def test_whoever_has_to_know_how_long_a_step_may_take_has_a_flag_for_it(
    capsys: pytest.CaptureFixture[str], role: str
) -> None:
    assert run(["serve", role, "--help"]) == 0
    assert capsys.readouterr().out.count("--step-ms-max") == 1


def test_a_service_without_a_name_gets_one_of_its_role() -> None:
    assert service_config("pager", {}, {}).host.name.startswith("pager-")


def test_a_worker_gets_a_folder_and_the_name_clients_use(model: str) -> None:
    worker = service_config("decode", {"PAGEMESH_MODEL": model}, {}).worker
    assert (worker.model, worker.model_name) == (model, "tiny-model")


def test_a_model_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        service_config("decode", {"PAGEMESH_MODEL": str(tmp_path)}, {})


def test_secrets_have_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--http-port" in shown
    assert "--secret" not in shown and "--api-keys" not in shown


def test_a_command_that_is_stopped_while_it_is_imported_says_nothing() -> None:
    import subprocess
    import sys

    code = """if True:
    import sys
    class Stop:
        def find_spec(self, name, *_):
            if name == "numpy":
                raise KeyboardInterrupt
    sys.meta_path.insert(0, Stop())
    from pagemesh.cli.main import main
    main(["--version"])"""
    stopped = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, b"", b"")


@pytest.mark.parametrize("imported", ["signal", "click", "pagemesh.cli.plan", "numpy"])
def test_ctrl_c_ends_a_command_quietly_whatever_is_being_imported(imported: str) -> None:
    import subprocess
    import sys

    code = f"""if True:
    import os, sys
    class Stop:
        def find_spec(self, name, *_):
            if name == {imported!r}:
                os.kill(os.getpid(), 2)
    sys.modules.pop({imported!r}, None)
    sys.meta_path.insert(0, Stop())
    from pagemesh.cli.__main__ import main
    sys.argv = ["pagemesh", "plan"]
    main()"""
    stopped = subprocess.run(
        [sys.executable, "-c", code],
        check=False, capture_output=True, preexec_fn=hear_interrupts,
    )  # fmt: skip
    assert stopped.returncode in (130, -2)  # a shell shows 130 for both
    assert (stopped.stdout, stopped.stderr) == (b"", b"")


def test_version_and_help_need_no_heavy_imports() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pagemesh.cli.main import run; run(['--help']); run(['--version']);"
        "assert not {'torch', 'transformers', 'nats', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
