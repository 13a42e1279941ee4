"""A program for the preloaded process that shows and does what its words say."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

from virnuc_core.command_time import command_start_s

PROGRAM_FOLDERS = ()


def load() -> None:
    """Load nothing."""


def facts() -> dict[str, str]:
    """Return what a command must have in common with the process, besides `process_facts`."""
    return {"TOY_FACT": "same"}


def run() -> int:
    """Do what the first word says."""
    match sys.argv[1]:
        case "show":
            print(json.dumps(own_state()))
        case "echo":
            sys.stdout.write(sys.stdin.read())
        case "exit":
            sys.exit(sys.argv[2])
        case "code":
            print("out")
            print("err", file=sys.stderr)
            return int(sys.argv[2])
        case "late":  # a thread that is no daemon, and output that nobody has flushed
            threading.Thread(target=lambda: (time.sleep(0.2), print("from a thread"))).start()
        case "die":
            os.kill(os.getpid(), int(sys.argv[2]))
        case "wait":
            begin_and_wait()
        case "patient":
            signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            begin_and_wait()
    return 0


def begin_and_wait() -> None:
    """Write the number of this process, and wait for a long time."""
    print(os.getpid(), flush=True)
    time.sleep(600)


def own_state() -> dict[str, object]:
    """Return what a command sees of its process."""
    return {
        "words": sys.argv,
        "environment": {**os.environ},
        "directory": str(Path.cwd()),
        "umask": os.umask(0o22),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score": Path("/proc/self/oom_score_adj").read_text(),
        "cores": sorted(os.sched_getaffinity(0)),
        "timezone": time.tzname,
        "streams": [
            {
                "encoding": stream.encoding,
                "errors": stream.errors,
                "is_terminal": stream.isatty(),
                "line_buffering": stream.line_buffering,
                "write_through": stream.write_through,
            }
            for stream in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "started": command_start_s(),
        "threads": threading.active_count(),
        "handles": sorted(int(link.name) for link in Path("/proc/self/fd").iterdir())[:3],
    }
