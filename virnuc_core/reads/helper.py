"""The helper process of `frames`: `python -m virnuc_core.reads.helper`, jobs on stdin, frames on stdout."""

from __future__ import annotations

import signal
import sys

from virnuc_core.reads.frames import serve

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides; when it stops, our input ends
    serve(sys.stdin.buffer, sys.stdout.buffer)
