"""Being asked to stop: SIGTERM from a scheduler that takes the machine back, or Ctrl-C.

The step that runs is finished, a checkpoint of it is written, and the run ends; the same command goes on from there, as if
it had never stopped. Several processes agree on the step by JAX's own protocol (multihost_utils), whichever of them is told.

The exit code is 143 (128 + SIGTERM) or 130 (SIGINT), as of a process that a signal ended: 0 says that training is complete,
and nothing else does. So `until python -m synthesizer_jax train ...; do sleep 1; done`, a Kubernetes Job with
`restartPolicy: OnFailure` and `srun ... || scontrol requeue $SLURM_JOB_ID` go on until it is. SLURM requeues what it
preempts (`sbatch --requeue`) whatever the code; for its time limit, `--signal=TERM@120` gives two minutes' notice.

Until the first step has been compiled there is nothing to save, and a signal ends the process at once, as ever; but JAX keeps
SIGTERM to itself where processes are several, and then the end comes after that step.
"""

import itertools
import signal
import threading

import jax
from jax.experimental import multihost_utils

_points = itertools.count(1)  # of all runs in this process: JAX's protocol wants numbers that only grow


class Stopped(SystemExit):
    """`train` was asked to stop, and its checkpoint is on disk. Ends the process, unless caught, with the exit code."""

    def __init__(self, step: int, checkpoint: str, number: int):
        super().__init__(128 + number)
        self.step, self.checkpoint, self.signal = step, checkpoint, signal.Signals(number).name

    def __str__(self) -> str:
        return f"stopped at step {self.step} by {self.signal}, saved as {self.checkpoint}; the same command goes on"


class Notice:
    """Whether the run is asked to stop. Use as a context manager: leaving gives the signals back."""

    def __init__(self):
        self._before = {}
        self._reached = False
        self.number = signal.SIGTERM  # the signal that came; on several processes it may have come to another
        self._several = jax.distributed.is_initialized()
        self._agree = self._several and jax.config.jax_enable_preemption_service

    def listen(self) -> None:
        """From now on a first signal is a notice; a second SIGINT interrupts at once."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        if self._agree:
            self._before = {signal.SIGINT: signal.signal(signal.SIGINT, self._pass_on)}
        elif not self._several:
            numbers = (signal.SIGTERM, signal.SIGINT)
            self._before = {number: signal.signal(number, self._take) for number in numbers}

    def reached(self) -> bool:
        """Whether to stop here. Every process must ask at the same points of the run, and gets the same answer."""
        if self._agree and not self._reached:
            self._reached = multihost_utils.reached_preemption_sync_point(next(_points))
        return self._reached

    def _take(self, number, frame):
        self._reached, self.number = True, number
        self._once(number)

    def _pass_on(self, number, frame):
        self._once(number)
        signal.raise_signal(signal.SIGTERM)  # which JAX tells the other processes

    def _once(self, number):
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
