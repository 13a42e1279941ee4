"""Digests: the published values of MurmurHash3, none alike where strings hardly differ; and repeats."""

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


def test_strings_that_hardly_differ_all_differ_in_either_half() -> None:
    """Any two places of a read changed to any letters: 100,000 strings, and no half of a digest twice."""
    read = bytearray(b"ACGTTGCA" * 19)
    strings = []
    for i, j in itertools.islice(itertools.combinations(range(len(read)), 2), 11_111):
        for one, other in itertools.product(b"ACG", repeat=2):
            changed = read.copy()
            changed[i], changed[j] = one, other
            strings.append(bytes(changed))
    strings = list(dict.fromkeys(strings))
    strings += [b"A" * n for n in range(500)] + [b"A" * n + b"C" for n in range(500)]
    made = digest(strings)
    assert len({low for low, _ in made}) == len({high for _, high in made}) == len(set(strings))


few_pairs = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=60)


@example(
    pairs=[(0, 0), (2, 0)], bucket=1, stretch=1
)  # more digests than a bucket takes, and no two alike
@given(few_pairs, st.integers(1, 80), st.sampled_from([1, 3, 16, 100]))
def test_repeats_are_found_whatever_the_stretches_and_buckets(
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
        found = sorted(
            row
            for repeats in map(find_repeats, Bucket.all_of(path))
            for row in zip(
                repeats.index.tolist(),
                repeats.first_index.tolist(),
                repeats.number.tolist(),
                strict=True,
            )
        )
    assert found == [
        (i, pairs.index(pair), pairs[:i].count(pair) + 1)
        for i, pair in enumerate(pairs)
        if pair in pairs[:i]
    ]
