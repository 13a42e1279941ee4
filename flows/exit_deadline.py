"""A process that is told to end has ended within ten seconds, whatever holds its ending; its children die with it."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from traceback import walk_stack
from types import FrameType
from typing import Final

ENDING_S: Final = 6.0
AGAIN_S: Final = 0.05
TELLING: Final = (signal.SIGTERM, signal.SIGINT)
IMPORTING: Final = "<frozen importlib._bootstrap>"
_timed: ContextVar[bool] = ContextVar("whether an ending has its time", default=False)


@contextmanager
def ended_in_time(*, by_hand: bool = False, final: bool = False) -> Iterator[None]:
    """Once SIGTERM or SIGINT is heard in the body, this process is gone within `ENDING_S`, unless the body is sooner.
    Signals are heard beside their handlers, which may be Prefect's, and also while the main thread cannot run one.
    `by_hand`: SIGTERM does what Ctrl-C does, once no module is half imported, and pressing again does not disturb the
    ending. `final`: the process ends with the body, and what is done after that counts, too."""
    if _timed.get() or threading.current_thread() is not threading.main_thread():
        yield
        return
    (ours, pythons), ended, put_off = socket.socketpair(), threading.Event(), list[int]()
    main = threading.get_ident()

    def cut_off() -> None:
        with ours:
            while heard := ours.recv(1):
                until_s = time.monotonic() + ENDING_S
                if heard[0] not in TELLING:
                    continue
                while not ended.wait(AGAIN_S) and time.monotonic() < until_s:
                    if put_off:
                        signal.pthread_kill(main, put_off.pop())
                if not ended.is_set():
                    sys.stderr.write(
                        "virnuc: interrupted; what was committed stays, run again to go on\n"
                    )
                elif final:
                    time.sleep(max(0.0, until_s - time.monotonic()))
                else:
                    return
                os._exit(130)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if any(one.f_code.co_filename == IMPORTING for one, _ in walk_stack(frame)):
            put_off.append(
                number
            )  # libraries in C do not stand it: torch aborts, NumPy cannot be loaded again
            return
        for told in TELLING:
            signal.signal(told, signal.SIG_IGN)
        raise KeyboardInterrupt

    pythons.setblocking(False)
    threading.Thread(target=cut_off, daemon=True).start()
    before, within = (
        signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False),
        _timed.set(True),
    )
    handlers = {number: signal.signal(number, interrupt) for number in TELLING} if by_hand else {}
    try:
        yield
    finally:
        ended.set()
        for number, handler in handlers.items():
            if signal.getsignal(number) is interrupt:  # once told, it stays told
                signal.signal(number, handler)
        _timed.reset(within)
        signal.set_wakeup_fd(before)
        pythons.close()
