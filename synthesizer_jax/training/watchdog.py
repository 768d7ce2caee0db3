"""Which step hangs, since when, and what it waits for.

A thread looks at the clock and at a record that the run keeps; it never touches a device, so that it also speaks when all of
them are stuck in a collective. Every process has its own: those that wait for the devices wait for the one that says
something else.
"""

import dataclasses
import socket
import sys
import threading
import time
from typing import TextIO

import jax

DATA, DEVICES, CHECKPOINT, EVALUATION = "data", "the devices", "a checkpoint", "evaluation"
COMPILATION = "compilation"  # of the first step, which takes minutes for a large model


def check_seconds(watchdog_seconds: float | None) -> None:
    """ValueError unless it is None or a positive number."""
    seconds = watchdog_seconds
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0):
        raise ValueError(f"watchdog_seconds: expected a number > 0, or None for no watchdog, got {seconds!r}")


@dataclasses.dataclass(frozen=True)
class _Record:
    step: int
    waits_for: str
    since: float  # time.monotonic()


class Watchdog:
    """Told at each wait what for; says so when one takes `seconds`, and again each time that has doubled.

    Use as a context manager. seconds: None: says nothing.
    """

    def __init__(self, seconds: float | None, stream: TextIO | None = None):
        check_seconds(seconds)
        self._seconds, self._stream = seconds, stream
        self._record: _Record | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def waits(self, step: int, what: str) -> None:
        """From now on the run waits for `what` at `step`. Also says that there is progress: the clock begins anew."""
        self._record = _Record(step, what, time.monotonic())

    def rests(self) -> None:
        """The run waits for nothing."""
        self._record = None

    def _watch(self):
        told, limit = None, self._seconds
        while not self._end.wait(min(1.0, self._seconds / 4)):
            record = self._record
            if told is not None and record is not told:
                self._say(f"step {told.step} goes on, after {time.monotonic() - told.since:.0f} s")
                told = None
            if record is None:
                continue
            waited = time.monotonic() - record.since
            limit = limit if told is not None else self._seconds
            if waited >= limit:
                since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
                self._say(
                    f"step {record.step} has been waiting for {record.waits_for} for {waited:.0f} s, since {since}"
                )
                told, limit = record, 2 * limit

    def _say(self, words):
        stream = sys.stderr if self._stream is None else self._stream
        print(f"watchdog: {words} (process {self._process}, on {socket.gethostname()})", file=stream, flush=True)

    def __enter__(self):
        self._process = f"{jax.process_index()} of {jax.process_count()}"
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
