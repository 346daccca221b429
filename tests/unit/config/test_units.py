import pytest

from config.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1000", 1000),
        ("512B", 512),
        ("64KiB", 65536),
        ("512MiB", 512 * 2**20),
        ("1GiB", 2**30),
        ("1gib", 2**30),
        (" 2 TiB ", 2 * 2**40),
        ("1.5GiB", 3 * 2**29),
        ("1kB", 1000),
        ("3MB", 3_000_000),
        ("0.5GB", 500_000_000),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "1G", "-1", "1 GiB extra", "1GiBB", "1e9", "٣GiB", "1.GiB", "0x10"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_numbers_are_left_to_the_field() -> None:
    assert parse_size(7) == 7
    assert parse_size(None) is None


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0"), (1000, "1000"), (1024, "1KiB"), (66560, "65KiB"), (3 * 2**29, "1536MiB"), (2**40, "1TiB")],
)
def test_sizes_are_spelled_shortest_and_exact(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text
    assert parse_size(text) == num_bytes
