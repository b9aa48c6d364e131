"""Identity: different things never share an encoding; ids reveal nothing without the secret."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemesh.wire.identity import Field, canonical, model_root, prefix_keys, tenant_root

FIELDS: st.SearchStrategy[dict[str, Field]] = st.dictionaries(
    st.text(max_size=4),
    st.one_of(st.text(max_size=4), st.binary(max_size=4), st.booleans(), st.integers(-300, 300)),
    max_size=3,
)
MODEL: dict[str, Any] = {
    "weights": b"w" * 32,
    "adapter": b"",
    "tokenizer": b"t" * 32,
    "positions": "{}",
    "kv_dtype": "float32",
    "kv_scales": b"",
    "layout": b"l" * 32,
    "page_size": 16,
    "arithmetic": "",
}


def typed(fields: dict[str, Field]) -> list[tuple[str, str, Field]]:
    return [(name, type(value).__name__, value) for name, value in sorted(fields.items())]


@given(FIELDS, FIELDS)
@settings(max_examples=1_000)
def test_two_tuples_share_an_encoding_only_if_they_are_equal(
    left: dict[str, Field], right: dict[str, Field]
) -> None:
    assert (canonical(left) == canonical(right)) == (typed(left) == typed(right))


def test_the_order_of_fields_does_not_matter_and_types_do() -> None:
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})
    same_looking: list[Field] = [1, True, "1", b"1", "True"]
    assert len({canonical({"x": value}) for value in same_looking}) == len(same_looking)
    assert canonical({"a": "bc"}) != canonical({"ab": "c"})
    assert canonical({"a": "", "b": ""}) != canonical({"a": "b"})


def test_every_part_of_a_model_changes_its_root() -> None:
    base = model_root(**MODEL)
    roots = {base}
    for name, value in MODEL.items():
        changed: Any = value + 1 if isinstance(value, int) else value + type(value)(value[:0])
        if isinstance(value, bytes):
            changed = value + b"x"
        elif isinstance(value, str):
            changed = value + "x"
        roots.add(model_root(**(MODEL | {name: changed})))
    assert len(roots) == len(MODEL) + 1
    assert all(len(root) == 32 for root in roots)
    assert model_root(**MODEL) == base


parts = st.sampled_from([b"", b"a", b"b", b"ab", b"\0", b"a\0"])
words = st.sampled_from(["", "{}", "float32", "int8"])
models = st.fixed_dictionaries(
    {name: parts for name in ("weights", "adapter", "tokenizer", "kv_scales", "layout")}
    | {name: words for name in ("positions", "kv_dtype", "arithmetic")}
    | {"page_size": st.sampled_from([1, 16])}
)


@given(models, models, parts, parts)
@settings(max_examples=1_000)
def test_two_models_or_tenants_share_a_root_only_if_they_are_the_same(
    left: dict[str, Any], right: dict[str, Any], salt: bytes, other: bytes
) -> None:
    assert (model_root(**left) == model_root(**right)) == (left == right)
    roots = tenant_root(model_root(**left), salt), tenant_root(model_root(**right), other)
    assert (roots[0] == roots[1]) == ((left, salt) == (right, other))


def test_adapter_and_scales_cannot_trade_places() -> None:
    assert model_root(**(MODEL | {"adapter": b"x"})) != model_root(**(MODEL | {"kv_scales": b"x"}))


def test_tenants_have_trees_of_their_own() -> None:
    model = model_root(**MODEL)
    roots = {tenant_root(model, salt) for salt in (b"", b"a", b"b", b"ab")}
    assert len(roots) == 4
    assert model not in roots


def tokens(*values: int) -> Any:
    return np.array(values, np.uint32)


def test_only_full_pages_get_an_id_and_ids_chain() -> None:
    root = b"r" * 32
    whole = prefix_keys(b"s" * 16, root, tokens(*range(35)), 16)
    assert whole.dtype == np.uint64
    assert len(whole) == 2
    first = prefix_keys(b"s" * 16, root, tokens(*range(16)), 16)
    second = prefix_keys(b"s" * 16, root, tokens(*range(16, 32)), 16, parent=int(first[0]))
    assert whole.tolist() == [*first.tolist(), *second.tolist()]
    assert len(prefix_keys(b"s" * 16, root, tokens(*range(15)), 16)) == 0


def test_ids_depend_on_secret_root_and_every_token_before() -> None:
    root = b"r" * 32
    base = prefix_keys(b"s" * 16, root, tokens(*range(32)), 16)
    for other in (
        prefix_keys(b"t" * 16, root, tokens(*range(32)), 16),
        prefix_keys(b"s" * 16, b"q" * 32, tokens(*range(32)), 16),
        prefix_keys(b"s" * 16, root, tokens(9, *range(1, 32)), 16),
    ):
        assert not set(base.tolist()) & set(other.tolist())
    late = prefix_keys(b"s" * 16, root, tokens(*range(31), 99), 16)
    assert late[0] == base[0]
    assert late[1] != base[1]


def test_a_secret_of_any_length_counts_whole() -> None:
    root, ids = b"r" * 32, set()
    for secret in (b"s" * 64, b"s" * 65, b"s" * 64 + b"t", b"s" * 4_096):
        ids.add(int(prefix_keys(secret, root, tokens(*range(16)), 16)[0]))
    assert len(ids) == 4
