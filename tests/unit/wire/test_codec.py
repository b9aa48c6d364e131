"""The codec: what goes in comes out, and nothing hostile does anything but be refused."""

from __future__ import annotations

import base64
import pickle
import time
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.support.wire_values import MESSAGE_TYPES, any_message, builtins, messages

from pagemesh.wire import codec
from pagemesh.wire.errors import Busy, Malformed
from pagemesh.wire.messages import (
    SCHEMA_VERSION,
    Message,
    Ok,
    Refused,
    name_of,
    registered,
    registered_types,
)
from pagemesh.wire.presence import Announce, AskPresence
from pagemesh.wire.work_messages import Submit

LENIENT = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
each_type = pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=name_of)


def pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def as_text(value: Any) -> Any:
    """With base64 in place of all bytes, as JSON would have it."""
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case dict():
            return {key: as_text(one) for key, one in value.items()}
        case list() | tuple():
            return [as_text(one) for one in value]
        case _:
            return value


@each_type
def test_every_message_survives_the_way(kind: type[Message]) -> None:
    @given(messages(kind))
    @LENIENT
    def check(message: Message) -> None:
        assert codec.decode(codec.encode(message)) == message
        assert codec.decode_as(codec.encode(message), kind) == message

    check()


@each_type
def test_text_is_not_taken_for_bytes(kind: type[Message]) -> None:
    @given(messages(kind))
    @LENIENT
    def check(message: Message) -> None:
        body = builtins(message)
        packed, text = pack(body), pack(as_text(body))
        if text != packed:
            with pytest.raises(Malformed, match="Expected `bytes`"):
                codec.decode(pack([SCHEMA_VERSION, name_of(kind), as_text(body)]))

    check()


@each_type
def test_a_field_too_many_is_malformed(kind: type[Message]) -> None:
    @given(messages(kind))
    @LENIENT
    def check(message: Message) -> None:
        body = builtins(message) | {"extra": 1}
        with pytest.raises(Malformed, match="extra"):
            codec.decode(pack([SCHEMA_VERSION, name_of(kind), body]))

    check()


@each_type
def test_a_missing_or_wrongly_typed_field_is_malformed(kind: type[Message]) -> None:
    @given(messages(kind), st.sampled_from([None, "x", b"x", 1.5, -7, [1], {"a": 1}, True]))
    @LENIENT
    def check(message: Message, wrong: object) -> None:
        for field in builtins(message):
            body: dict[str, Any] = builtins(message) | {field: wrong}
            try:
                decoded = codec.decode(pack([SCHEMA_VERSION, name_of(kind), body]))
            except Malformed:
                continue
            # Some fields do take such a value; then it must be there unchanged.
            assert builtins(decoded)[field] == wrong

    check()


@each_type
def test_values_that_no_type_takes_are_malformed(kind: type[Message]) -> None:
    for body in (None, 7, "x", b"x", [], [1, 2], {1: 2}, {b"a": 1}, msgpack.ExtType(4, b"")):
        if body == {} or (body == [] and not kind.__struct_fields__):
            continue
        with pytest.raises(Malformed):
            codec.decode(pack([SCHEMA_VERSION, name_of(kind), body]))


@each_type
def test_an_unknown_version_is_malformed(kind: type[Message]) -> None:
    for version in (0, 2, True, "1", None, [1], 2**63):
        with pytest.raises(Malformed, match="version"):
            codec.decode(pack([version, name_of(kind), {}]))


@given(st.binary(max_size=300))
@settings(max_examples=500)
@example(b"")
@example(b"\xc1")
@example(b"\x93\x01")
def test_random_bytes_are_malformed_or_a_message(data: bytes) -> None:
    try:
        assert isinstance(codec.decode(data), Message)
    except Malformed as fault:
        assert len(fault.message) < 600


@given(any_message(), st.data())
@LENIENT
def test_a_damaged_message_is_malformed_or_a_message(message: Message, data: st.DataObject) -> None:
    packed = bytearray(codec.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(packed)))
    for damaged in (bytes(packed), bytes(packed[:cut]), bytes(packed) + b"\x00"):
        try:
            assert isinstance(codec.decode(damaged), Message)
        except Malformed:
            continue


executed: list[str] = []


class Evil:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (executed.append, ("unpickled",))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_malformed_and_does_nothing(protocol: int) -> None:
    data = pickle.dumps(Evil(), protocol)
    for hostile in (data, pack([SCHEMA_VERSION, "ok", data]), pack([SCHEMA_VERSION, data, {}])):
        with pytest.raises(Malformed):
            codec.decode(hostile)
    assert executed == []


@pytest.mark.parametrize(
    "hostile",
    [
        pack(msgpack.ExtType(1, b"x" * 10)),
        pack([SCHEMA_VERSION, "ok", msgpack.ExtType(1, b"")]),
        pack([SCHEMA_VERSION, "ok", {"a": msgpack.Timestamp(1, 1)}]),
        pack([SCHEMA_VERSION, msgpack.ExtType(1, b"x"), {}]),
        b"\xc7\x00\x05",
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\x93\x01\xa2ok" + b"\x91" * 5_000 + b"\x90",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffabc",
        b"\x93\x01\xa2ok\x81\x90\x01",
        b"\x93\x01\xa2\xff\xfe\x80",
        pack([SCHEMA_VERSION, "x" * 1_000_000, {}]),
        pack([["x" * 1_000] * 100, "ok", {}]),
        pack([SCHEMA_VERSION, "os.system", {"command": "true"}]),
        pack({"version": 1, "name": "ok", "body": {}}),
    ],
    ids=range(18),
)
def test_what_is_made_to_hurt_is_malformed_quickly_and_briefly(hostile: bytes) -> None:
    started = time.monotonic()
    with pytest.raises(Malformed) as caught:
        codec.decode(hostile)
    assert time.monotonic() - started < 0.5
    assert len(caught.value.message) < 600


def test_what_exceeds_the_limit_is_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MESSAGE_BYTES_MAX", 100)
    with pytest.raises(Malformed, match="exceed the limit of 100"):
        codec.decode(b"\x00" * 101)


@given(messages(Submit))
@LENIENT
def test_a_number_that_is_none_is_malformed(message: Message) -> None:
    for field in ("temperature", "top_p", "min_p", "repetition_penalty"):
        for bad in (float("nan"), float("inf"), float("-inf")):
            body = builtins(message)
            body["sampling"][field] = bad
            with pytest.raises(Malformed):
                codec.decode(pack([SCHEMA_VERSION, "work.submit", body]))
    body = builtins(message)
    body["sampling"]["logit_bias"] = {1: float("nan")}
    with pytest.raises(Malformed):
        codec.decode(pack([SCHEMA_VERSION, "work.submit", body]))


def test_a_refusal_is_raised_as_the_fault_it_names() -> None:
    refused = Refused.of(Busy("full", retry_after_ms=9))
    with pytest.raises(Busy, match="full") as caught:
        codec.decode_as(codec.encode(refused), Ok)
    assert caught.value.retry_after_ms == 9


def test_another_type_than_wanted_is_malformed() -> None:
    with pytest.raises(Malformed, match=r"expected ok or presence\.announce, got presence\.ask"):
        codec.decode_as(codec.encode(AskPresence()), Ok, Announce)


def test_a_name_can_be_taken_only_once() -> None:
    with pytest.raises(ValueError, match="'ok' is taken"):
        registered("ok")(AskPresence)
    assert registered_types()["ok"] is Ok


def test_names_in_messages_are_single_subject_tokens() -> None:
    for name in ("", "a.b", "a b", "*", ">", "x" * 65, "a\n", "\u00e4"):
        body = {
            "role": "decode", "name": name, "incarnation": 1, "host": "h", "state": "ready",
        }  # fmt: skip
        with pytest.raises(Malformed):
            codec.decode(pack([SCHEMA_VERSION, "presence.announce", body]))


@example(data=pack([9, "later", {"name": "n" * 99, "host": 5, "role": b"x"}]))
@given(data=st.binary(max_size=200))
@LENIENT
def test_an_outline_is_short_texts_or_nothing(data: bytes) -> None:
    found = codec.outline(data, "role", "name", "host")
    assert set(found) <= {"role", "name", "host"}
    assert all(isinstance(text, str) and len(text) <= 64 for text in found.values())


def test_an_outline_tells_whose_message_of_another_version_it_is() -> None:
    data = pack([9, "later", {"name": "p1", "role": "pager", "heat": 3}])
    assert codec.outline(data, "role", "name", "host") == {"role": "pager", "name": "p1"}
