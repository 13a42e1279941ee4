"""Fixtures every test may use."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings

from tests.forked_workers import Forker, forks_of_new_process, require_descriptor, workers_of
from virnuc_core.encoders import convert


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import all test modules without the garbage collector, and let it skip what they imported.

    Each worker imports two million objects that stay, and the collector would look at them again
    and again. What the imports themselves have left is collected once, and reported as ever.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real genomes, reads and broken files: `../shared/data` beside the checkout, or `VIRNUC_TEST_DATA`."""
    data_dir = os.environ.get("VIRNUC_TEST_DATA")
    folder = Path(data_dir) if data_dir else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "manifest.tsv").is_file():
        pytest.skip(
            "real sequences (manifest.tsv) are not in ../shared/data; put them there or set VIRNUC_TEST_DATA"
        )
    return folder


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Put back what an interrupted command leaves: a process that ignores further signals.

    Child processes of later tests would inherit that and could not be interrupted.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Write files without waiting until the disk has them, which only a power failure would show."""
    with patch.object(os, "fsync", require_descriptor):
        yield


@pytest.fixture(scope="session", autouse=True)
def _tokenizers_trained_once() -> Iterator[None]:
    """Train the tokenizer of each seed once; that takes most of the time of a tiny random model."""
    with patch.object(convert, "train_tokenizer", functools.cache(convert.train_tokenizer)):
        yield


@pytest.fixture
def tokenizers_trained_anew() -> Iterator[None]:
    """Train each tokenizer again, for tests that compare what equal seeds give."""
    remembering = convert.train_tokenizer
    with patch.object(convert, "train_tokenizer", inspect.unwrap(remembering)):
        yield


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """A process that has imported torch, and forks for workers."""
    with forks_of_new_process() as forking_process:
        yield forking_process


@pytest.fixture(scope="module")
def forked_workers(forker: Forker) -> Iterator[None]:
    """Let the tests' own process have workers that need not import torch."""
    with workers_of(forker):
        yield


# A shell starts background jobs that ignore Ctrl-C, and their children, which tests interrupt,
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# No deadline: shared machines stall. What hangs is caught by pytest-timeout.
settings.register_profile("virnuc", deadline=None)
settings.load_profile("virnuc")
