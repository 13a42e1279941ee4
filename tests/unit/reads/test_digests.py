"""Digests equal the published values of MurmurHash3, and repeats among them are found."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from virnuc_core.reads import fingerprint
from virnuc_core.reads.fingerprint import Bucket, digests, find_repeats


def digest(strings: list[bytes]) -> list[tuple[int, int]]:
    return [(int(low), int(high)) for low, high in digests(strings)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "00000000000000000000000000000000"),
        ("hello", "cbd8a7b341bd9b025b1e906a48ae1d19"),
        ("hello, world", "342fac623a5ebc8e4cdcbc079642414d"),
        ("The quick brown fox jumps over the lazy dog.", "cd99481f9ee902c9695da1a38987b6e7"),
    ],
)
def test_published_values(text: str, expected: str) -> None:
    ((low, high),) = digest([text.encode()])
    assert f"{low:016x}{high:016x}" == expected


def test_similar_strings_differ_in_both_halves_of_their_digests() -> None:
    """Change any two letters of a read: no half of the 100,000 digests occurs twice."""
    template = bytearray(b"ACGTTGCA" * 19)
    strings = []
    for i, j in itertools.islice(itertools.combinations(range(len(template)), 2), 11_111):
        for letter, other_letter in itertools.product(b"ACG", repeat=2):
            variant = template.copy()
            variant[i], variant[j] = letter, other_letter
            strings.append(bytes(variant))
    strings = list(dict.fromkeys(strings))
    strings += [b"A" * n for n in range(500)] + [b"A" * n + b"C" for n in range(500)]
    digests_of_strings = digest(strings)
    assert (
        len({low for low, _ in digests_of_strings})
        == len({high for _, high in digests_of_strings})
        == len(set(strings))
    )


few_pairs = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=60)


@example(
    pairs=[(0, 0), (2, 0)], bucket=1, stretch=1
)  # more digests than a bucket takes, and no two alike
@given(few_pairs, st.integers(1, 80), st.sampled_from([1, 3, 16, 100]))
def test_repeats_are_found_with_any_stretches_and_buckets(
    tmp_path_factory: pytest.TempPathFactory,
    pairs: list[tuple[int, int]],
    bucket: int,
    stretch: int,
) -> None:
    path = tmp_path_factory.mktemp("repeats") / "digests"
    np.array(pairs, np.uint64).tofile(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "BUCKET", bucket)
        patch.setattr(fingerprint, "_READ_AT_ONCE", stretch)
        repeats_found = sorted(
            row
            for repeats in map(find_repeats, Bucket.all_of(path))
            for row in zip(
                repeats.index.tolist(),
                repeats.first_index.tolist(),
                repeats.number.tolist(),
                strict=True,
            )
        )
    assert repeats_found == [
        (i, pairs.index(pair), pairs[:i].count(pair) + 1)
        for i, pair in enumerate(pairs)
        if pair in pairs[:i]
    ]
