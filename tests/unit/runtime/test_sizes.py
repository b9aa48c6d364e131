"""Sizes with units: what is read, what is refused, and how they are shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from pagemesh.runtime.sizes import exact_size, parse_size, shown_binary, shown_both, shown_decimal


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0), ("536870912", 512 << 20), ("512MiB", 512 << 20), ("512 mib", 512 << 20),
        ("8GB", 8 * 10**9), ("1.5GiB", 3 << 29), ("13.48 GB", 13_480_000_000), (" 24kB ", 24_000),
        ("2TiB", 2 << 40), ("7B", 7),
    ],
)  # fmt: skip
def test_a_size_is_read_in_decimal_and_binary_units(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "8G", "512M", "GB", "-1GB", "1e9", "1,5GB", "8GBs", "1_000", "٣GB", "nan", "."]
)
def test_what_is_no_size_or_an_ambiguous_one_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 512MiB or 8GB"):
        parse_size(text)


@given(some.integers(0, 1 << 50))
def test_an_exact_size_is_read_back_as_the_same(count: int) -> None:
    assert parse_size(exact_size(count)) == count


def test_an_exact_size_is_short() -> None:
    assert [exact_size(n) for n in (0, 1000, 1 << 16, 3 << 29, 1 << 44)] == [
        "0", "1000", "64KiB", "1536MiB", "16TiB",
    ]  # fmt: skip


def test_people_see_few_digits_and_both_kinds_of_units() -> None:
    assert shown_binary(320 << 10) == "320 KiB"
    assert shown_binary(5 << 19) == "2.5 MiB"
    assert shown_decimal(80 * 2**30) == "85.9 GB"
    assert shown_both(80 * 2**30) == "85.9 GB (80 GiB)"
    assert shown_binary(12) == "12 B"
    assert shown_decimal(5_000 * 10**12) == "5,000 TB"
