"""A finished run as an object for scripts and notebooks: tables, embeddings and the summary page.

`virnuc.predict` and `virnuc.open_run` return it. Everything is read from the files of the run
directory when it is asked for.
"""

import csv
import html
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import ValidationError

from virnuc_core import pipeline
from virnuc_core.checked_files import PAGE_DIGEST, open_checked
from virnuc_core.config import RunSpec, explain
from virnuc_core.engine import shards
from virnuc_core.errors import ConfigError, VirnucError, missing_package_error
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.translate import FRAMES
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunRecord, RunSummary, read_record
from virnuc_core.safe_files import MAX_JSON_BYTES
from virnuc_core.system_errors import path_exists

if TYPE_CHECKING:
    from anndata import AnnData

SUMMARY_PAGE: Final = "summary.html"
MATE_OPTIONS: Final = {"-1": "mates_1", "-2": "mates_2"}
OPTION: Final = re.compile(r"(?<!\S)(--[a-z][a-z-]*[a-z]|-[12])(?![\w./-])")  # in a message
PAGE_HEIGHT: Final = 640  # pixels of the summary page in a notebook
# Columns of the tables that are numbers. All others are text.
COUNT_COLUMNS: Final = ("length", "chunks", "open_frames")
SCORE_COLUMNS: Final = ("viral_score", "viral_score_1", "viral_score_2")  # may be empty


@dataclass(frozen=True)
class Run:
    """A finished prediction.

    Attributes:
        folder: The run directory.
    """

    folder: Path

    @cached_property
    def reads(self) -> pd.DataFrame:
        """One line for each read, in input order, with the columns of `reads.tsv`.

        Reads without a verdict have an empty `label` and NaN as `viral_score`.
        """
        return _read_table(RunDir(self.folder).reads_table)

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """One line for each pair, with the columns of `pairs.tsv`.

        The table has no lines if the reads do not come in pairs.
        """
        table = RunDir(self.folder).pairs_table
        if not path_exists(table):
            return pd.DataFrame(columns=["id", "mate", "fate", "viral_score", "label"])
        return _read_table(table)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One line with the counts of the run.

        The columns are `reads`, one for each fate (such as `viral` or `no_open_frame`), `pairs`,
        `viral_pairs`, `threshold` and `total_s` (seconds). Lines of several samples can be joined
        with `pandas.concat`.
        """
        summary = self._summary
        n_pairs = sum(summary.pairs.values())
        counts = {
            "reads": summary.n_reads,
            **summary.fates,
            "pairs": n_pairs,
            "viral_pairs": summary.pairs.get("viral", 0),
            "threshold": summary.threshold,
            "total_s": summary.total_s,
        }
        return pd.DataFrame([counts], index=[self.folder.name])

    @cached_property
    def frames(self) -> pd.DataFrame:
        """One line for each open reading frame, in the order of `prediction_results.txt`.

        The index is the id of the frame, such as `r7_chunk_1F2`. The columns are `read` (its id in
        `reads.tsv`), `chunk` (from 1), `frame`, `sequence` (number of its distinct sequence) and
        `viral_score` (P(virus), float32, NaN if the frame could not be computed).
        """
        store = self._store
        scores, _ = shards.read_scores(RunDir(self.folder))  # [distinct sequences, 2]
        read_ids = np.array(store.read_ids(0, store.n_reads), dtype=object)
        frame_names = np.array(FRAMES, dtype=object)
        sequence_of_frame = np.asarray(store.row_unique)
        columns = {
            "read": read_ids[np.asarray(store.row_read)],
            "chunk": np.asarray(store.row_chunk) + 1,
            "frame": frame_names[np.asarray(store.row_frame)],
            "sequence": sequence_of_frame,
            "viral_score": scores[sequence_of_frame, 1],
        }
        return pd.DataFrame(columns, index=store.row_ids(0, store.n_rows))

    def embeddings(self, frames: pd.DataFrame | None = None) -> NDArray[np.float32]:
        """Read the embeddings of open reading frames.

        An embedding of the real models has 3,328 numbers, which are 13 kB. Select frames if the
        memory is not enough for all of them.

        Args:
            frames: Lines of `frames`, for example `run.frames.query("viral_score > 0.9")`. All
                frames if not given.

        Returns:
            The embeddings in the order of the lines, float32 [frames, DNA width + protein width].
            A frame that could not be computed has NaN.

        Raises:
            ShardError: A file of the embeddings is missing or damaged.
            ConfigError: The run was made without checkpoints, so that it has no embeddings.
        """
        if frames is None:
            frames = self.frames
        sequences, sequence_of_line = np.unique(
            frames["sequence"].to_numpy(np.int64), return_inverse=True
        )
        shards.require_kept_shards(RunDir(self.folder), self._record)
        embeddings = shards.read_embeddings(RunDir(self.folder), sequences)
        return embeddings[sequence_of_line]

    def to_anndata(self, frames: pd.DataFrame | None = None) -> "AnnData":
        """Return frames with their embeddings as an AnnData object, to cluster them with scanpy.

        Args:
            frames: Lines of `frames`. All frames if not given.

        Returns:
            `X` has the embeddings, and `obs` the lines of `frames` together with the length, fate
            and label of their reads.

        Raises:
            ConfigError: The package anndata is not installed.
        """
        try:
            from anndata import AnnData
        except ModuleNotFoundError as error:
            raise missing_package_error(error.name, "anndata", "to_anndata()") from error
        if frames is None:
            frames = self.frames
        facts_of_read = self.reads.set_index("id")[["length", "fate", "label"]]
        lines = frames.join(facts_of_read, on="read", validate="many_to_one")
        return AnnData(X=self.embeddings(frames), obs=lines)

    @property
    def _record(self) -> RunRecord:
        """The record of the run, `run.json`."""
        return read_record(RunDir(self.folder))

    @property
    def _store(self) -> OrfStore:
        """The staged reads, mapped into memory."""
        run = RunDir(self.folder)
        shards.require_kept_shards(run, self._record)
        return shards.store_of(run, self._record)

    @property
    def _summary(self) -> RunSummary:
        """The summary of the finished run.

        Raises:
            ConfigError: The run is not finished, or the directory holds no run.
        """
        summary = pipeline.read_summary(RunDir(self.folder), set_aside=False)
        if summary is None:
            raise ConfigError(
                f"{self.folder} holds no finished run; give its run directory, or run it to its end"
            )
        return summary

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the summary page, or a table of counts if there is none.

        Raises:
            DamagedFileError: The page is not as the run left it.
        """
        page = self.folder / SUMMARY_PAGE
        if not path_exists(page):
            return str(self.summary.T.to_html())
        # A frame of its own keeps the styles of the page and of the notebook apart. Scripts in the
        # page would not run.
        with open_checked(page, PAGE_DIGEST, self.folder) as file:
            text = html.escape(file.read(MAX_JSON_BYTES).decode())
        style = f"width:100%;height:{PAGE_HEIGHT}px;border:0"
        return f'<iframe sandbox srcdoc="{text}" style="{style}"></iframe>'


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Open the directory of a finished run.

    Raises:
        ConfigError: The directory holds no finished run.
    """
    run = Run(Path(folder))
    run._summary  # noqa: B018 - raises if the run is not finished
    return run


def predict(
    reads: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    models: str | os.PathLike[str],
    **settings: Any,
) -> Run:
    """Decide which reads are viral, without Prefect.

    A complete run is not computed again, and an interrupted one continues.

    Args:
        reads: A file or folder of reads, or several of them.
        out: The run directory.
        models: The models directory.
        **settings: Further fields of `RunSpec`, such as `devices="cuda:0"` or `threshold=0.9`.

    Returns:
        The finished run.

    Raises:
        ConfigError: A setting is unknown or has a wrong value.
        VirnucError: The reads, models or devices cannot be used, or the run failed.
    """
    one_path = isinstance(reads, str | os.PathLike)
    paths = (reads,) if one_path else tuple(reads)  # type: ignore[arg-type]
    try:
        spec = RunSpec(
            reads=tuple(os.fspath(path) for path in paths),  # type: ignore[arg-type]
            out=Path(out),
            models=Path(models),
            **settings,
        )
        pipeline.predict(spec)
    except ValidationError as error:
        raise ConfigError(explain(error, show_values=True, model=RunSpec)) from error
    except VirnucError as error:
        error.args = (_name_arguments(str(error)), *error.args[1:])
        raise
    return Run(spec.out)


def _name_arguments(message: str) -> str:
    """Return a message with the names of Python's arguments in place of options of the command.

    `--force` becomes `force=True`, `--no-pairs` `pairs=False`, `--fdr` `fdr`, and `-1` `mates_1`.

    Args:
        message: The message of an error, as the command line shows it.
    """

    def argument(match: re.Match[str]) -> str:
        option = match[0]
        if option in MATE_OPTIONS:
            return MATE_OPTIONS[option]
        name = option.removeprefix("--").replace("-", "_")
        denied_name = name.removeprefix("no_")
        field = RunSpec.model_fields.get(name)
        if field is not None:
            return f"{name}=True" if field.annotation is bool else name
        if denied_name in RunSpec.model_fields:
            return f"{denied_name}=False"
        return option

    return OPTION.sub(argument, message)


def _read_table(path: Path) -> pd.DataFrame:
    """Read a result table. Text stays as it is, and empty numbers become NaN."""
    table = pd.read_csv(path, sep="\t", quoting=csv.QUOTE_NONE, dtype=str, keep_default_na=False)
    for name in table.columns.intersection(list(COUNT_COLUMNS)):
        table[name] = table[name].astype("int64")
    for name in table.columns.intersection(list(SCORE_COLUMNS)):
        table[name] = pd.to_numeric(table[name]).astype("float32")
    return table
