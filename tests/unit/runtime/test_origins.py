"""Origins of pages: as browsers send them, or refused."""

from __future__ import annotations

import pytest

from pagemesh.runtime.config import load, to_environ
from pagemesh.runtime.origins import ORIGINS_MAX, parse_origins
from pagemesh.runtime.settings import GatewayConfig
from pagemesh.wire.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("http://localhost:3000", "http://localhost:3000"),
        ("HTTPS://Chat.Example.COM", "https://chat.example.com"),
        ("https://example.com:443", "https://example.com"),
        ("http://example.com:80", "http://example.com"),
        ("http://example.com:443", "http://example.com:443"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("https://xn--bcher-kva.example", "https://xn--bcher-kva.example"),
        ("chrome-extension://abcdefghij", "chrome-extension://abcdefghij"),
        ("*", "*"),
    ],
)
def test_an_origin_is_taken_as_browsers_send_it(written: str, sent: str) -> None:
    assert parse_origins([written]) == (sent,)


@pytest.mark.parametrize(
    "text",
    [
        "example.com",
        "https://",
        "https://example.com/",
        "https://example.com/chat",
        "https://example.com?x",
        "https://user@example.com",
        "https://*.example.com",
        "https://bücher.example",
        "https://example.com:0",
        "https://example.com:65536",
        "https://example.com:٤",
        "https://example.com:",
        "https://a b",
        "https://example.com\n",
        "//example.com",
        "null",
        "x" * 1_000,
    ],
)
def test_what_is_no_origin_is_one_line_that_shows_it(text: str) -> None:
    with pytest.raises(ConfigError, match="PAGEMESH_CORS_ORIGINS") as caught:
        parse_origins(["https://example.com", text])
    line = str(caught.value)
    assert repr(text[:80]) in line and "scheme://host[:port]" in line
    assert "\n" not in line and len(line) < 300


def test_everybody_is_not_listed_beside_others() -> None:
    with pytest.raises(ConfigError, match=r"give it alone"):
        parse_origins(["https://example.com", "*"])


def test_the_list_has_an_end() -> None:
    assert len(parse_origins([f"http://h{i}" for i in range(ORIGINS_MAX)])) == ORIGINS_MAX
    with pytest.raises(ConfigError, match=f"more than {ORIGINS_MAX}"):
        parse_origins([f"http://h{i}" for i in range(ORIGINS_MAX + 1)])


def test_a_setting_lists_them_with_commas_and_reaches_a_child_process() -> None:
    config = load(GatewayConfig, {"PAGEMESH_CORS_ORIGINS": "http://a:1, https://B ,"})
    assert config.page_origins == ("http://a:1", "https://b")
    assert load(GatewayConfig, to_environ(config)) == config
    assert load(GatewayConfig, {"PAGEMESH_CORS_ORIGINS": ""}).page_origins == ()
