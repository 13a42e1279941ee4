"""virnuc's library: files of reads to verdicts, without any orchestration. Importing it does nothing."""

__version__ = "0.1.0"
