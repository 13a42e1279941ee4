"""The library of virnuc: files of reads to verdicts, without Prefect. Importing does nothing."""

__version__ = "0.1.0"
