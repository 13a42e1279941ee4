"""The `virnuc` command: `main` runs a command line."""

from virnuc.flows.cli.app import main

__all__ = ["main"]
