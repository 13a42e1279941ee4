"""Comparing what a file says with what its raw files give: every leaf counts, and each difference is named."""

from __future__ import annotations

import pytest

from virnuc_core.report.verification import Verification
from virnuc_core.validation import BaselineSubset


def test_a_tree_of_equal_values_has_as_many_figures_as_leaves() -> None:
    verification = Verification()
    tree = {"a": 1, "b": [2.5, None], "c": {"d": "text"}}
    verification.compare("file", tree, tree)
    assert verification.ok
    assert verification.figures == 4


def test_nothing_compared_is_not_ok() -> None:
    assert not Verification().ok


@pytest.mark.parametrize(
    ("claimed", "computed", "difference"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "file.a.b: says 1, the raw files give 2"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "file.a[1]: says 2, the raw files give 3"),
        ({"a": [1]}, {"a": [1, 3]}, "file.a: says [1], the raw files give [1, 3]"),
        ({"a": 1}, {}, 'file.a: says 1, the raw files give "nothing"'),
        ({}, {"a": 1}, 'file.a: says "nothing", the raw files give 1'),
        ({"a": True}, {"a": 0}, "file.a: says true, the raw files give 0"),
        ({"a": None}, {"a": 0}, "file.a: says null, the raw files give 0"),
    ],
)
def test_a_leaf_that_differs_is_named(claimed: object, computed: object, difference: str) -> None:
    verification = Verification()
    verification.compare("file", claimed, computed)
    assert verification.differences == [difference]


@pytest.mark.parametrize(
    ("claimed", "computed", "are_equal"),
    [
        (1.0, 1.0 + 1e-12, True),  # the last digits of a sum
        (1.0, 1.0 + 1e-6, False),
        (3, 3.0, True),
        (True, 1 + 1e-12, False),  # a yes is no number
    ],
)
def test_numbers_may_differ_in_their_last_digits_only(
    claimed: object, computed: object, are_equal: bool
) -> None:
    verification = Verification()
    verification.compare("total_s", claimed, computed)
    assert (verification.differences == []) == are_equal


def test_fields_that_a_file_does_not_have_are_passed_over() -> None:
    subset = BaselineSubset(reads=3, tokens=10, total_tokens=20)
    verification = Verification()
    verification.compare_fields("subset", subset, {"reads": 3, "tokens": None, "unknown": 5})
    assert (verification.figures, verification.differences) == (1, [])
    verification.compare_fields("subset", subset, {"tokens": 11})
    assert verification.differences == ["subset: tokens: says 10, the raw files give 11"]


def test_of_two_texts_the_first_line_that_differs_is_named() -> None:
    verification = Verification()
    lines = [b"id\tfate\n", b"a\tviral\n", b"b\tviral\n"]
    verification.compare_lines("reads.tsv", lines, lines, "its shards")
    assert verification.ok
    other_lines = [lines[0], b"a\tempty\n", b"b\tempty\n"]
    verification.compare_lines("reads.tsv", lines, other_lines, "its shards")
    assert verification.differences == [
        'reads.tsv: line 2 says "a\\tviral", its shards give "a\\tempty"'
    ]


def test_a_missing_last_line_is_a_difference() -> None:
    verification = Verification()
    verification.compare_lines("reads.tsv", [b"a\n"], [b"a\n", b"b\n"], "its shards")
    assert verification.differences == ['reads.tsv: line 2 says "", its shards give "b"']


def test_a_long_line_is_shown_where_it_differs() -> None:
    verification = Verification()
    start = b"x" * 500
    verification.compare_lines("reads.tsv", [start + b"1"], [start + b"2"], "its shards")
    assert verification.differences == [
        f'reads.tsv: line 1 says "{"x" * 30}1", its shards give "{"x" * 30}2"'
    ]
