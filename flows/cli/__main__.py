"""Runs the command line as `python -m virnuc.flows.cli`."""

import sys

from virnuc.flows.cli import main

sys.exit(main())
