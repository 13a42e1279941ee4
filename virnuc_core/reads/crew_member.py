"""A worker process of `crew`, started as `python -m … FOLDER WORKER`: jobs on stdin, answers on stdout."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from virnuc_core.reads.crew import serve
from virnuc_core.reads.draft import Draft

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides; when it stops, our input ends
    with Draft(Path(sys.argv[1]), int(sys.argv[2])) as draft:
        serve(sys.stdin.buffer, sys.stdout.buffer, draft)
