"""A worker process of `crew`, started as `python -m … FOLDER WORKER`: jobs on stdin, answers on stdout."""

from __future__ import annotations

import sys
from pathlib import Path

from virnuc_core.reads.crew import serve
from virnuc_core.reads.draft import Draft

if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer, lambda: Draft(Path(sys.argv[1]), int(sys.argv[2])))
