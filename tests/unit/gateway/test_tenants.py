"""Keys, tenants, salts, and answers kept by idempotency key."""

from __future__ import annotations

import pytest

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.doors.idempotency import IdempotencyStore
from pagemesh.gateway.doors.tenant_limits import TenantLimits
from pagemesh.gateway.doors.tenants import ANYBODY, Tenants, bearer
from pagemesh.wire.errors import ConfigError

ALICE, BOB = "a" * 16, "b" * 16
SECRET = b"the server's"


def test_without_keys_everybody_is_one_tenant() -> None:
    tenants = Tenants("", SECRET)
    assert tenants.open_to_all and tenants.tenant_of("") == ANYBODY


def test_a_key_names_its_tenant_and_no_other_key_does() -> None:
    tenants = Tenants(f"alice:{ALICE}, {BOB}", SECRET)
    assert tenants.tenant_of(ALICE) == "alice"
    bob = tenants.tenant_of(BOB)
    assert bob is not None and BOB not in bob
    for wrong in ("", "x" * 16, ALICE[:-1], ALICE + "a", f"alice:{ALICE}"):
        assert tenants.tenant_of(wrong) is None


@pytest.mark.parametrize("keys", ["short", "me:short", f"{ALICE},", f"{ALICE},x:{ALICE}", ","])
def test_a_weak_or_repeated_key_stops_start_up(keys: str) -> None:
    with pytest.raises(ConfigError, match="PAGEMESH_API_KEYS") as caught:
        Tenants(keys, SECRET)
    assert ALICE not in str(caught.value)


def test_salts_differ_by_tenant_by_client_salt_and_by_server() -> None:
    tenants = Tenants("", SECRET)
    salts = {
        tenants.salt("a", ""),
        tenants.salt("b", ""),
        tenants.salt("a", "x"),
        tenants.salt("ax", ""),
        Tenants("", b"another").salt("a", ""),
    }
    assert len(salts) == 5
    assert tenants.salt("a", "x") == tenants.salt("a", "x")


@pytest.mark.parametrize(
    ("header", "key"),
    [("Bearer k", "k"), ("bearer  k ", "k"), ("Basic k", ""), ("k", ""), ("", "")],
)
def test_only_a_bearer_header_carries_a_key(header: str, key: str) -> None:
    assert bearer(header) == key


def test_an_answer_is_kept_for_its_key_and_tenant() -> None:
    store = IdempotencyStore()
    assert store.begin("alice", "k", b"body", 0) is None
    with pytest.raises(ApiError) as running:
        store.begin("alice", "k", b"body", 1)
    assert running.value.status == 409
    store.finish("alice", "k", b"answer")
    assert store.begin("alice", "k", b"body", 2) == b"answer"
    assert store.begin("bob", "k", b"body", 2) is None
    with pytest.raises(ApiError):
        store.begin("alice", "k", b"another body", 3)
    store.check()


@pytest.mark.parametrize("key", ["k", "k" * 255, "\u00e9 \u4e2d"])
def test_a_key_is_any_text_of_a_line(key: str) -> None:
    assert IdempotencyStore().begin("alice", key, b"body", 0) is None


@pytest.mark.parametrize("key", ["", "k" * 256, "a\tb", "a\x00", "\x7f"])
def test_a_key_that_is_empty_long_or_no_text_is_refused(key: str) -> None:
    store = IdempotencyStore()
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            store.begin("alice", key, b"body", 0)
        assert (caught.value.status, caught.value.param) == (400, "idempotency-key")


def test_kept_answers_are_bounded_in_age_count_and_bytes() -> None:
    store = IdempotencyStore(entries_max=2, bytes_max=10, age_ms_max=100)
    for index in range(2):
        store.begin("t", str(index), b"", index)
    with pytest.raises(ApiError) as full:
        store.begin("t", "2", b"", 2)
    assert full.value.status == 429
    store.finish("t", "0", b"12345678")
    store.finish("t", "1", b"12345678")
    store.check()
    assert store.begin("t", "0", b"", 3) is None
    store.finish("t", "0", b"")
    assert store.begin("t", "1", b"", 200) is None
    store.check()


def test_an_answer_is_kept_for_all_of_its_time() -> None:
    store = IdempotencyStore(age_ms_max=100)
    store.begin("t", "k", b"", 0)
    store.finish("t", "k", b"answer")
    assert store.begin("t", "k", b"", 100) == b"answer"
    assert store.begin("t", "k", b"", 101) is None
    store.check()


def with_one_done(store: IdempotencyStore, running: str) -> IdempotencyStore:
    """``running`` came first, and ``done`` is answered."""
    for key in (running, "done"):
        store.begin("t", key, b"", 0)
    store.finish("t", "done", b"answer")
    return store


def test_a_request_that_runs_for_longer_than_answers_are_kept_is_not_run_twice() -> None:
    store = with_one_done(IdempotencyStore(age_ms_max=100), "slow")
    with pytest.raises(ApiError) as running:
        store.begin("t", "slow", b"", 1_000)
    assert running.value.status == 409
    assert store.begin("t", "done", b"", 1_000) is None, "though it is behind one that runs"
    store.check()


def test_what_runs_is_not_forgotten_for_room() -> None:
    store = with_one_done(IdempotencyStore(entries_max=2), "runs")
    assert store.begin("t", "new", b"", 1) is None
    store.check()
    with pytest.raises(ApiError) as running:
        store.begin("t", "runs", b"", 1)
    assert running.value.status == 409


def test_a_streamed_answer_is_not_generated_twice() -> None:
    store = IdempotencyStore()
    store.begin("t", "k", b"", 0)
    store.finish("t", "k", None)
    with pytest.raises(ApiError) as used:
        store.begin("t", "k", b"", 1)
    assert used.value.code == "idempotency_key_used"


def test_a_large_answer_is_not_kept_and_not_generated_twice() -> None:
    store = IdempotencyStore(answer_bytes_max=5)
    for key, answer in (("small", b"12345"), ("large", b"123456")):
        store.begin("t", key, b"", 0)
        store.finish("t", key, answer)
    assert store.begin("t", "small", b"", 1) == b"12345"
    with pytest.raises(ApiError, match="above 5 bytes; use another key") as used:
        store.begin("t", "large", b"", 1)
    assert used.value.code == "idempotency_key_used"
    store.check()


@pytest.mark.parametrize("limits", [{"entries_max": 8}, {"bytes_max": 8}])
def test_a_tenant_with_many_answers_loses_its_own_not_those_of_others(
    limits: dict[str, int],
) -> None:
    store = IdempotencyStore(**limits)
    answer = b"1"
    for tenant, count in (("alice", 2), ("bob", 100)):
        for index in range(count):
            store.begin(tenant, str(index), b"", 0)
            store.finish(tenant, str(index), answer)
            store.check()
    for tenant, index in (("alice", 0), ("alice", 1), ("bob", 99), ("bob", 94)):
        assert store.begin(tenant, str(index), b"", 1) == answer
    assert store.begin("bob", "93", b"", 1) is None
    store.check()


def test_limits_are_a_tenants_own_or_those_of_everybody_else() -> None:
    tenants = Tenants(
        f"alice:{ALICE},bob:{BOB}", SECRET,
        "alice:pages=25% disk_pages=10% cache_ttl_s=600, *:pages=40 disk_pages=90 requests=8",
    )  # fmt: skip
    assert tenants.limits_of("alice") == TenantLimits(
        pool_share=0.25, disk_share=0.1, cache_ttl_s=600
    )
    assert tenants.limits_of("bob") == TenantLimits(pages_max=40, disk_pages_max=90, requests_max=8)
    assert Tenants("", SECRET).limits_of(ANYBODY) == TenantLimits()


@pytest.mark.parametrize(
    ("limits", "wrong"),
    [
        ("alice", "alice"), (":pages=4", ":pages=4"), ("a:pages=0%", "pages=0%"),
        ("a:pages=101%", "pages=101%"), ("a:pages=x%", "pages=x%"), ("a:pages=0", "pages=0"),
        ("a:ttl=5", "ttl=5"), ("a:cache_ttl_s=9999999", "cache_ttl_s=9999999"),
        ("a:pages=4,a:pages=5", "a is listed twice"), ("a:requests=1.5", "requests=1.5"),
        ("a:pages=" + "9" * 5_000, "pages=9999"), ("a:pages=4294967296", "pages=4294967296"),
    ],
)  # fmt: skip
def test_a_wrong_limit_stops_start_up_and_is_named(limits: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match="PAGEMESH_TENANT_LIMITS") as caught:
        Tenants("", SECRET, limits)
    assert wrong in str(caught.value)


@pytest.mark.parametrize(
    ("cap_s", "wanted_s", "kept_s"),
    [(0, 0, 0), (0, 60, 60), (600, 0, 600), (600, 60, 60), (60, 600, 60)],
)  # fmt: skip
def test_a_cache_lives_as_long_as_wanted_and_not_longer_than_its_tenant_may(
    cap_s: int, wanted_s: int, kept_s: int
) -> None:
    assert TenantLimits(cache_ttl_s=cap_s).terms("alice", wanted_s).ttl_s == kept_s


@pytest.mark.parametrize(
    ("limits", "pages"),
    [
        (TenantLimits(), 200), (TenantLimits(pool_share=0.25), 50),
        (TenantLimits(pages_max=10), 10), (TenantLimits(pool_share=0.25, pages_max=100), 50),
        (TenantLimits(pool_share=0.001), 1),
    ],
)  # fmt: skip
def test_a_quota_is_the_smaller_of_share_and_pages_and_at_least_one_page(
    limits: TenantLimits, pages: int
) -> None:
    assert limits.quota_tokens(pool_pages=200, page_size=16) == 16 * pages


@pytest.mark.parametrize(
    ("keys", "limits", "unlucky"),
    [
        (f"alice:{ALICE},bob:{BOB}", "alice:pages=60%, carol:pages=40%", ["bob"]),
        (f"alice:{ALICE},bob:{BOB}", "alice:pages=60%, carol:pages=39%", []),
        (f"alice:{ALICE},bob:{BOB}", "alice:pages=60%, bob:pages=40%", []),
        (f"alice:{ALICE},bob:{BOB}", "alice:pages=100%, *:pages=10%", []),
        (f"alice:{ALICE},bob:{BOB}", "alice:pages=100%, bob:requests=2", ["bob"]),
        ("", "alice:pages=100%", [ANYBODY]),
        ("", "", []),
    ],
)
def test_tenants_for_whom_the_shares_of_others_leave_nothing_are_known(
    keys: str, limits: str, unlucky: list[str]
) -> None:
    assert Tenants(keys, SECRET, limits).without_a_share == unlucky


@pytest.mark.parametrize(
    ("keys", "limits", "nobody"),
    [
        (f"alice:{ALICE}", "alcie:requests=3, *:requests=2", ["alcie"]),
        (f"alice:{ALICE}", "alice:requests=3", []),
        ("", "bob:requests=3", ["bob"]),
        ("", f"{ANYBODY}:requests=3", []),
    ],
)
def test_limits_of_a_tenant_that_there_is_not_are_known(
    keys: str, limits: str, nobody: list[str]
) -> None:
    assert Tenants(keys, SECRET, limits).limited_nobody == nobody
