import pytest

from server.kvcache.prefix import PrefixHasher
from server.messages import MediaItem, MediaKind, SlabRef, TokenRange

PAGE = 4
A, B = b"\x01" * 32, b"\x02" * 32


def item(content_hash: bytes, *ranges: tuple[int, int]) -> MediaItem:
    return MediaItem(MediaKind.IMAGE, content_hash, (1, 2, 2), tuple(TokenRange(*r) for r in ranges), SlabRef(0, 1, 1))


def hashes(token_ids: list[int], media: tuple[MediaItem, ...] = (), salt: bytes = b"") -> list[bytes]:
    hasher = PrefixHasher(PAGE, media, salt)
    hasher.extend(token_ids)
    return hasher.hashes


def num_equal(first: list[bytes], second: list[bytes]) -> int:
    """Pages before the first difference; after it nothing is equal."""
    equal = [a == b for a, b in zip(first, second, strict=False)]
    assert equal == sorted(equal, reverse=True)
    return sum(equal)


@pytest.mark.parametrize("num_tokens", range(13))
def test_only_full_pages_have_a_hash(num_tokens: int) -> None:
    assert len(hashes([7] * num_tokens)) == num_tokens // PAGE
    assert all(len(digest) == 32 for digest in hashes([7] * num_tokens))


@pytest.mark.parametrize("position", range(16))
def test_a_changed_token_changes_its_page_and_all_later_ones(position: int) -> None:
    token_ids = list(range(16))
    changed = list(token_ids)
    changed[position] = 200_000
    assert num_equal(hashes(token_ids), hashes(changed)) == position // PAGE


def test_equal_pages_at_different_depths_differ() -> None:
    assert len(set(hashes([5] * 32))) == 8


def test_salt_separates_every_page() -> None:
    assert num_equal(hashes([1] * 8), hashes([1] * 8, salt=b"tenant")) == 0


def test_pages_hashed_piece_by_piece_are_the_same() -> None:
    media = (item(A, (3, 6)), item(B, (9, 1)), item(A, (15, 4)))
    token_ids = list(range(23))
    hasher = PrefixHasher(PAGE, media, b"salt")
    for end in range(len(token_ids) + 1):
        hasher.extend(token_ids[:end])
    assert hasher.hashes == hashes(token_ids, media, b"salt")


@pytest.mark.parametrize("offset", range(12))
@pytest.mark.parametrize("length", [1, 4, 7])
def test_another_picture_changes_the_pages_from_its_first_placeholder_on(offset: int, length: int) -> None:
    token_ids = [9] * 20
    first, second = hashes(token_ids, (item(A, (offset, length)),)), hashes(token_ids, (item(B, (offset, length)),))
    assert num_equal(first, second) == offset // PAGE


def test_the_same_picture_elsewhere_is_another_prefix() -> None:
    token_ids = [9] * 12
    assert num_equal(hashes(token_ids, (item(A, (1, 2)),)), hashes(token_ids, (item(A, (2, 2)),))) == 0


def test_swapped_pictures_are_another_prefix() -> None:
    token_ids = [9] * 12
    one = (item(A, (0, 2)), item(B, (2, 2)))
    other = (item(B, (0, 2)), item(A, (2, 2)))
    assert num_equal(hashes(token_ids, one), hashes(token_ids, other)) == 0


def test_a_full_width_content_hash_counts() -> None:
    token_ids = [9] * 8
    close = A[:-1] + b"\x00"
    assert num_equal(hashes(token_ids, (item(A, (0, 8)),)), hashes(token_ids, (item(close, (0, 8)),))) == 0


def test_a_page_knows_which_part_of_a_clip_it_shows() -> None:
    """Two clips' runs may start alike and continue with different features at the same place."""
    token_ids = [9] * 12
    whole = (item(A, (0, 4), (4, 4)),)
    second_part_first = (item(A, (4, 4), (0, 4)),)
    assert num_equal(hashes(token_ids, whole), hashes(token_ids, second_part_first)) == 0


def test_a_picture_behind_a_page_does_not_change_it() -> None:
    token_ids = [9] * 12
    assert num_equal(hashes(token_ids), hashes(token_ids, (item(A, (8, 2)),))) == 2
