"""`pagemesh cache`: what it takes, whom it asks, and how it says what pagers answered."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.unit.cli.test_cache_tables import PIN, PINNED, RETIRED, ROOT, STATS
from tests.unit.cli.test_command_line import error_of

from pagemesh.cli import cache
from pagemesh.cli.caching import cache_prefix
from pagemesh.cli.chat_stream import ChatError, client
from pagemesh.cli.client_config import ClientConfig
from pagemesh.cli.gateway_url import client_config
from pagemesh.cli.main import run
from pagemesh.cli.mesh.run_folder import GATEWAY, run_folder, url_file_name
from pagemesh.cli.operator import Mesh, bus_config
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.ids import new_service_name
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire import subjects
from pagemesh.wire.cache_messages import (
    AskCacheStats,
    AskCacheTop,
    AskCacheTree,
    CacheStats,
    InvalidateCache,
    PinPrefix,
    PrefixUnpinned,
    UnpinPrefix,
)
from pagemesh.wire.errors import (
    Absent,
    Busy,
    ConfigError,
    DeadlineExceeded,
    Fault,
    Gone,
    Malformed,
)
from pagemesh.wire.messages import Message


class Door:
    """Pagers that answer whatever they are asked, by host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, Message | Fault] = {}
        self.asked: list[tuple[str, Message]] = []
        monkeypatch.setattr(cache, "connected", self._connected)

    @asynccontextmanager
    async def _connected(self, _config: BusConfig) -> AsyncIterator[Door]:
        yield self

    async def ask(
        self, verb: str, message: Message, _kind: type[Message]
    ) -> dict[str, Message | Fault]:
        self.asked.append((verb, message))
        return self.answers


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Door:
    monkeypatch.setenv("PAGEMESH_POOL_DIR", str(tmp_path / "pools"))
    return Door(monkeypatch)


def gateway(monkeypatch: pytest.MonkeyPatch, *answers: httpx.Response) -> list[dict[str, object]]:
    """The bodies that a gateway with these ``answers`` is sent."""
    bodies: list[dict[str, object]] = []
    left = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return left.pop(0)

    def made(config: ClientConfig) -> httpx.Client:
        return client(config, httpx.MockTransport(answer))

    monkeypatch.setattr(cache_prefix, "client", made)
    return bodies


def test_every_pager_is_shown_and_one_that_refuses_is_an_error_beside_the_others(
    door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    door.answers = {"h": STATS, "other": Busy("not now")}
    assert run(["cache", "stats"]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("h: 64 pages") and shown.err == "other: not now\n"
    assert run(["cache", "stats", "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert (first["host"], first["total_pages"]) == ("h", 64)
    assert second == {"host": "other", "error": {"code": "Busy", "message": "not now"}}
    del door.answers["other"]
    assert run(["cache", "stats"]) == 0
    assert door.asked == [("stats", AskCacheStats())] * 3


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("invalidate --tenant alice", RETIRED),
        (f"pin --root {ROOT} --tokens 1", PINNED),
        (f"unpin {PIN}", PrefixUnpinned(host="h", pins=[PIN])),
    ],
)
def test_it_is_done_when_every_host_that_has_it_did_it(
    door: Door, command: str, answer: Message
) -> None:
    def code(**answers: Message | Fault) -> int:
        door.answers = answers
        return run(["cache", *command.split()])

    nothing = Gone("nothing of it is here")
    assert code(h=answer, other=answer) == 0
    assert code(h=answer, other=nothing) == 0, "one that has it is enough"
    assert code(h=nothing, other=nothing) == 1
    for error in (Busy("not now"), DeadlineExceeded("no answer"), Absent("nobody listens")):
        assert code(h=answer, other=error) == 1, error.code


@pytest.mark.parametrize(
    ("reply", "seen"),
    [
        (msgspec.json.encode(STATS), STATS),
        (b'{"error": {"code": "Gone", "message": "not now"}}', Gone("not now")),
        (b'{"host": "h", "of_another": "version"}', Malformed("")),
        (b"[]", Malformed("")),
        (b"{", Malformed("")),
    ],
)
async def test_an_answer_is_what_it_should_be_or_a_fault(
    bus: Bus, reply: bytes, seen: Message | Fault
) -> None:
    host = new_service_name("host")

    def tell(delivery: Delivery) -> None:
        delivery.respond(reply)

    await bus.subscribe(subjects.cache_door("stats", host), tell)
    found = await Mesh(bus, (), ())._ask("stats", host, AskCacheStats(), CacheStats)
    assert type(found) is type(seen)
    if not isinstance(seen, Malformed):
        assert str(found) == str(seen)


def test_what_is_asked_for_is_what_was_written(
    door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[tuple[str, Message]] = [
        ("tree --root AB --first 5 --limit 7", AskCacheTree(root="ab", first=5, limit=7)),
        ("top --by size", AskCacheTop(by="size")),
        (f"unpin {PIN}", UnpinPrefix(pin=PIN)),
        ("unpin --all", UnpinPrefix(pin=None)),
        ("invalidate --root AB", InvalidateCache(what="root", name="ab")),
        ("invalidate --tenant Alice", InvalidateCache(what="tenant", name="Alice")),
        ("invalidate --model caf\udce9", InvalidateCache(what="model", name="caf\ufffd")),
        ("invalidate --idle", InvalidateCache(what="idle")),
        (f"pin --root {ROOT.upper()} --tokens 1,2 --ttl-s 60",
         PinPrefix(root=ROOT, tokens=[1, 2], ttl_s=60)),
    ]  # fmt: skip
    for line, message in commands:
        assert run(["cache", *line.split()]) == 1, "nobody answers"
        assert door.asked.pop() == (line.split()[0], message)
    assert capsys.readouterr() == ("", "")


def test_each_answer_is_told_in_words(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    done = [("unpin --all", PrefixUnpinned(host="h", pins=[PIN])),
            (f"pin --root {ROOT} --tokens 1", PINNED),
            ("invalidate --model m", RETIRED)]  # fmt: skip
    for line, answer in done:
        door.answers = {"h": answer}
        assert run(["cache", *line.split()]) == 0
    unpinned, pinned, retired = capsys.readouterr().out.splitlines()
    assert unpinned == f"h: unpinned {PIN}" and pinned.startswith(f"h: {PIN} keeps")
    assert retired.startswith("h: 600 roots retired")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("unpin", "give either a pin or --all"),
        (f"unpin {PIN} --all", "give either a pin or --all"),
        ("unpin nonsense", "'nonsense' is no pin"),
        ("invalidate", "give one of --root, --model, --tenant and --idle"),
        ("invalidate --model m --idle", "give one of --root, --model, --tenant and --idle"),
        ("pin", "give one of --text, --messages, and --root with --tokens"),
        ("pin --text a --tokens 1", "give one of --text"),
        (f"pin --text a --root {ROOT}", "give one of --text"),
        ("pin --tokens 1", "give one of --text"),
        ("pin --root abc --tokens 1", "'abc' is not 64 hexadecimal digits"),
        (f"pin --root {ROOT} --tokens 1,x", "is not token ids such as 1,15,220"),
        (f"pin --root {ROOT} --tokens {'9' * 5_000}", "is not token ids such as 1,15,220"),
        ("pin --text=", "--text has nothing to pin"),
        ("pin --messages nowhere.json", "nowhere.json: No such file or directory"),
        ("tree --limit 501", "--limit"),
        ("tree --limit 2.5", "'2.5' is not a valid whole number"),
        ("tree --root xy", "'xy' is not hexadecimal digits, 64 at most"),
        (f"top --root {ROOT}0", "0' is not hexadecimal digits, 64 at most"),
        ("invalidate --root xy", "'xy' is not hexadecimal digits, 64 at most"),
    ],
)
def test_a_wrong_command_is_one_line_and_nobody_is_asked(
    door: Door, capsys: pytest.CaptureFixture[str], arguments: str, named: str
) -> None:
    assert named in error_of(capsys, "cache", *arguments.split())
    assert door.asked == []


@pytest.mark.parametrize(
    "text", ["{", "[" * 200_000, "[]", '{"role": "user"}', "\xff", r'["\ud800"]']
)
def test_a_file_that_holds_no_messages_is_named(
    door: Door, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    file = tmp_path / "talk.json"
    file.write_text(text, encoding="latin-1")
    line = error_of(capsys, "cache", "pin", "--messages", file)
    assert "talk.json is not" in line and door.asked == []


def test_a_prefix_in_words_is_pinned_under_each_root_that_the_gateway_names(
    door: Door, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = "cd" * 32
    told = {"tokens": [7, 8], "cache_roots": [ROOT, other]}
    bodies = gateway(monkeypatch, *[httpx.Response(200, json=told)] * 2)
    door.answers = {"h": PINNED}
    assert run(["cache", "pin", "--text", "word"]) == 0
    talk = [{"role": "system", "content": "word"}]
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    file = str(tmp_path / "talk.json")
    assert run(["cache", "pin", "--messages", file, "--salt", "s"]) == 0
    assert bodies == [
        {"cache_salt": None, "prompt": "word"},
        {"cache_salt": "s", "messages": talk, "add_generation_prompt": False},
    ]
    asks = [PinPrefix(root=root, tokens=[7, 8]) for root in (ROOT, other)]
    assert door.asked == [("pin", ask) for ask in asks * 2]


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (
            httpx.Response(401, json={"error": {"message": "no key"}}),
            "no key; set PAGEMESH_API_KEY",
        ),
        (httpx.Response(502, text="<html>"), "status 502"),
        (httpx.Response(200, text="<html>"), "/tokenize answers no JSON object"),
        (httpx.Response(200, json=[]), "/tokenize answers no JSON object"),
    ],
)
def test_what_a_gateway_refuses_is_told_in_its_words(
    monkeypatch: pytest.MonkeyPatch, answer: httpx.Response, named: str
) -> None:
    gateway(monkeypatch, answer)
    prefix = cache_prefix.Prefix("word", None, "", None, None)
    with pytest.raises(ChatError, match=named):
        cache_prefix.prefixes(prefix, ClientConfig())


def test_a_gateway_without_workers_or_without_itself_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefix = cache_prefix.Prefix("word", None, "", None, None)
    start = "start one with `pagemesh up`"
    with pytest.raises(ConfigError, match=rf"no gateway at http://127\.0\.0\.1:1 .*; {start}"):
        cache_prefix.prefixes(prefix, ClientConfig(url="http://127.0.0.1:1"))
    gateway(monkeypatch, httpx.Response(200, json={"tokens": [7], "cache_roots": []}))
    with pytest.raises(ConfigError, match="no worker serves a model at"):
        cache_prefix.prefixes(prefix, ClientConfig())


def test_the_gateway_that_runs_here_is_meant_unless_there_are_more(
    door: Door, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = Path(os.environ["PAGEMESH_POOL_DIR"])
    assert client_config({}) == ClientConfig(), "none runs: that of the documentation"
    with run_folder(base, "host") as one, run_folder(base, "host") as two:
        (one.path / url_file_name(GATEWAY)).write_text("http://127.0.0.1:8101\n")
        assert client_config({}).url == "http://127.0.0.1:8101"
        (two.path / url_file_name(GATEWAY)).write_text("http://127.0.0.1:8102\n")
        line = error_of(capsys, "chat", "--once", "hello")
        assert "http://127.0.0.1:8101, http://127.0.0.1:8102; name one with --url" in line
        assert client_config({"pagemesh_url": "http://x:1"}).url == "http://x:1"
        door.answers = {"h": PINNED}
        assert run(["cache", "pin", "--nats", "nats://x:7", "--root", ROOT, "--tokens", "1"]) == 0
        monkeypatch.setenv("PAGEMESH_URL", "http://y:2")
        assert client_config({}).url == "http://y:2"


def test_the_mesh_that_runs_here_is_meant_unless_there_are_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEMESH_POOL_DIR", str(tmp_path))
    default = bus_config({}).url
    with run_folder(tmp_path, "host") as one, run_folder(tmp_path, "host") as two:
        (one.path / url_file_name("operator")).write_text("nats://operator:pw@127.0.0.1:5\n")
        assert bus_config({}).url == "nats://operator:pw@127.0.0.1:5"
        (two.path / url_file_name("operator")).write_text("nats://operator:pw@127.0.0.1:6\n")
        (two.path / url_file_name(GATEWAY)).write_text("http://127.0.0.1:8102\n")
        with pytest.raises(ConfigError, match="2 meshes run here") as raised:
            bus_config({})
        line = str(raised.value)
        assert f"{one.path}/operator.url (not serving yet)" in line
        assert f"{two.path}/operator.url (http://127.0.0.1:8102)" in line
        assert "PAGEMESH_NATS=$(cat FILE)" in line and ":pw@" not in line
        assert bus_config({"pagemesh_nats": "nats://x:7"}).url == "nats://x:7"
    assert bus_config({}).url == default
    with run_folder(tmp_path, "host") as one, run_folder(tmp_path, "host") as two:
        for folder in (one, two):
            (folder.path / url_file_name("operator")).write_text("nats://x:8\n")
        assert bus_config({}).url == "nats://x:8", "both are on one bus"
    for command in (["audit"], ["cache", "stats"]):
        run([*command, "--help"])
        help_text = " ".join(capsys.readouterr().out.split())
        assert "--nats-output-bytes-max" not in help_text, "of tuning nothing is shown"
        assert "[default: that of `pagemesh up` on this machine]" in help_text


def test_a_mesh_whose_pool_folder_is_named_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEMESH_POOL_DIR", str(tmp_path / "elsewhere"))
    arguments = {"pagemesh_pool_dir": str(tmp_path)}
    with run_folder(tmp_path, "host") as one:
        (one.path / url_file_name(GATEWAY)).write_text("http://127.0.0.1:8101\n")
        (one.path / url_file_name("operator")).write_text("nats://operator:pw@127.0.0.1:5\n")
        assert client_config(arguments).url == "http://127.0.0.1:8101"
        assert bus_config(arguments).url == "nats://operator:pw@127.0.0.1:5"
    for command in (["audit"], ["chat"], ["cache", "stats"], ["cache", "pin"]):
        run([*command, "--help"])
        assert capsys.readouterr().out.count("--pool-dir ") == 1


def test_who_named_no_server_where_no_mesh_runs_is_told_so_soon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEMESH_POOL_DIR", str(tmp_path))
    asked: list[BusConfig] = []

    def connect(config: BusConfig, **_who: str) -> None:
        asked.append(config)
        raise ConfigError("no NATS server at A in 1 s: connection refused; start one there")

    monkeypatch.setattr(Bus, "connect", connect)
    line = error_of(capsys, "cache", "stats")
    assert "no `pagemesh up` of yours runs on this machine, and no NATS server at A" in line
    assert line.rstrip().endswith("name the NATS server of your mesh with --nats URL")
    assert f"{tmp_path} was looked into: name another pool folder with --pool-dir" in line
    assert "start one there" in error_of(capsys, "audit", "--nats", "nats://x:7")
    assert [config.start_wait_ms for config in asked] == [1_000, BusConfig().start_wait_ms]


def test_help_lists_each_command_with_a_whole_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    run(["cache", "--help"])
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]
    run(["cache", "unpin", "--help"])
    assert "[OPTIONS] [PIN]" in capsys.readouterr().out


def test_what_else_is_wrong_with_a_connection_is_said_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEMESH_POOL_DIR", str(tmp_path))
    problem = "no NATS server at A in 5 s: connection refused; start one there"

    def connect(_config: BusConfig, **_who: str) -> None:
        raise ConfigError(problem)

    monkeypatch.setattr(Bus, "connect", connect)
    named = ["--nats", BusConfig().url]  # be it where one is looked for anyway
    assert error_of(capsys, "audit", *named) == f"error: {problem}"
    for problem in ("the NATS server refused user and password", "a key without a certificate"):
        for flags in ([], named):
            assert error_of(capsys, "cache", "stats", *flags) == f"error: {problem}"
