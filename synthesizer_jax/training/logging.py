"""What a run tells: TensorBoard scalars, the same numbers as JSON lines, progress on a terminal, the parameters.

After a resume no step is told twice: what a killed run wrote after its last checkpoint is removed from metrics.jsonl,
and hidden in TensorBoard by the mark of a restart. Only the first process writes.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from clu import metric_writers
from etils import epath
from jax.sharding import Mesh
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tqdm import tqdm

from synthesizer_jax import sharding

JSON_LINES = "metrics.jsonl"

# How the values of several steps become one: a weighted mean for sums over targets, the last value for the rate.
SUMS, LAST = ("loss", "z_loss", "accuracy"), ("learning_rate",)
NATS, PERPLEXITY = "nats", "perplexity"  # a sum of - log p over targets; exp of its mean
SHOWN = ("loss", "accuracy", PERPLEXITY)


class ScalarWriter:
    """Scalars by step in a folder: TensorBoard events and metrics.jsonl. Each write is on disk when it returns."""

    def __init__(self, folder: str, after_step: int = 0):
        """after_step: the step to go on from; later ones in the folder are dropped."""
        self._first = jax.process_index() == 0
        if not self._first:
            return
        path = epath.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._lines = path / JSON_LINES
        _drop_lines_after(self._lines, after_step)
        _mark_restart(str(path), after_step)
        self._events = metric_writers.SummaryWriter(str(path))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """The values of a step; steps must not decrease."""
        if not self._first:
            return
        with self._lines.open("a") as file:
            file.write(json.dumps({"step": step} | dict(scalars)) + "\n")
        self._events.write_scalars(step, scalars)
        self._events.flush()

    def close(self) -> None:
        if self._first:
            self._events.close()


def read_lines(path: epath.PathLike) -> list[dict[str, float]]:
    """The entries of a metrics.jsonl, without a last line that a killed run left unfinished."""
    path = epath.Path(path)
    entries = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries


def _drop_lines_after(path, step):
    entries = read_lines(path)
    kept = [entry for entry in entries if entry["step"] <= step]
    if path.exists():
        part = path.with_name(path.name + ".part")
        part.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        part.replace(path)


def _mark_restart(folder, step):
    """Marks a beginning. TensorBoard hides what the files before the mark hold after `step`, but for the first mark."""
    again = any(epath.Path(folder).glob("events.out.tfevents.*"))
    # TensorBoard reads files in the order of the second in their names; within one second the order is arbitrary.
    if again:
        _wait_for_next_second()
    writer = EventFileWriter(folder)
    writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START)))
    writer.close()
    if again:
        _wait_for_next_second()


def _wait_for_next_second():
    time.sleep(1 - time.time() % 1)


class NotFinite(FloatingPointError):
    """A loss or gradient that is infinite or not a number."""


class TrainingLog:
    """Collects the metrics of training steps on the device and tells them once per interval."""

    def __init__(
        self,
        folder: str,
        after_step: int,
        last_step: int,
        stream: TextIO | None = None,
        targets: str = "target_tokens",
        pending: Sequence[Mapping[str, float]] = (),
        full_use: float | None = None,
        on_wait: Callable[[int], None] = lambda step: None,
    ):
        """targets: what the weights of the loss count, for the name of their speed. pending: what `pending()` gave at
        after_step. full_use: seconds of a step whose model FLOPs run at the devices' peak; None: not known. on_wait: told
        before the devices are waited for, with the step."""
        self._writer, self._targets = ScalarWriter(folder, after_step), targets
        self._full_use, self._on_wait = full_use, on_wait
        self._progress = Progress(after_step, last_step, stream)
        self._pending: list[Mapping[str, Any]] = [
            {name: np.float32(value) for name, value in metrics.items()} for metrics in pending
        ]
        self._step = after_step
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves what happens until the next step, such as an evaluation or a checkpoint, out of the speed."""
        self._start = None

    def add(self, metrics: dict[str, jax.Array]) -> None:
        """The metrics of one step, which may still be running. Waits for the step before it: the host stays close."""
        if self._pending:
            self._on_wait(self._step)
            jax.block_until_ready(self._pending[-1])
        self._pending.append(metrics)
        self._step += 1
        self._progress.advance()
        if self._start is None:  # the first step may have been compiled: begin when it is done
            self._on_wait(self._step)
            jax.block_until_ready(metrics)
            self._start, self._start_step = time.monotonic(), self._step

    def flush(self) -> dict[str, float]:
        """Writes and shows means over the steps since the last flush, and returns them.

        Raises: NotFinite with the step and the value when a loss or gradient of the interval was not finite.
        """
        steps, self._pending = self._finite(), []
        scalars = summarize(steps)
        self._writer.write(self._step, scalars | self._timing(steps))
        self._progress.show(self._step, scalars)
        return scalars

    def pending(self) -> list[dict[str, float]]:
        """The metrics of the steps since the last flush, for a run that goes on from here. Raises NotFinite as it does."""
        return [{name: float(value) for name, value in metrics.items()} for metrics in self._finite()]

    def _finite(self):
        self._on_wait(self._step)
        steps = jax.device_get(self._pending)
        for step, metrics in enumerate(steps, self._step - len(steps) + 1):
            _check_finite(step, metrics)
        return steps

    def _timing(self, steps):
        number, seconds = self._step - self._start_step, time.monotonic() - self._start
        if not number:
            return {}
        timed = steps[-number:]
        self._start, self._start_step = time.monotonic(), self._step
        targets = float(np.sum([m["weight"] for m in timed], dtype=np.float64))
        self._progress.steps_per_second = number / seconds
        timing = {
            "timing/steps_per_second": number / seconds,
            "timing/seconds_per_step": seconds / number,
            f"timing/{self._targets}_per_second": targets / seconds,
        }
        if self._full_use is not None:
            timing["timing/model_flops_utilization"] = self._full_use * number / seconds
        return timing

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._progress.close()
        self._writer.close()


def summarize(steps: list[dict[str, Any]]) -> dict[str, float]:
    """One value for each metric of several steps; sums over targets become means over all their real targets.

    nats become perplexity, exp of their mean over the targets of all steps: infinite where that is past 709.
    """
    columns = {name: np.asarray([metrics[name] for metrics in steps], np.float64) for name in steps[0]}
    weight = columns.pop("weight").sum()
    scalars = {}
    for name, column in columns.items():
        if name in SUMS:
            scalars[name] = column.sum() / weight if weight else 0.0
        elif name == NATS:
            with np.errstate(over="ignore"):
                scalars[PERPLEXITY] = np.exp(column.sum() / weight) if weight else 1.0
        else:
            scalars[name] = column[-1] if name in LAST else column.mean()
    return {name: float(value) for name, value in scalars.items()}


def _check_finite(step, metrics):
    for name in ("loss", "gradient_norm"):
        if not math.isfinite(metrics[name]):
            raise NotFinite(
                f"{name} is {float(metrics[name])} at step {step}: training stops, and no checkpoint of this step or a "
                "later one is written. Likely: a learning rate that is too high, or ids outside the model's vocabulary"
            )


class Progress:
    """A progress bar with the time that remains on a terminal; elsewhere one plain line for each `show`."""

    def __init__(self, step: int, last_step: int, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._last, self.steps_per_second = last_step, None
        self._first = jax.process_index() == 0
        hidden = not (self._first and self._stream.isatty())
        self._bar = tqdm(
            total=last_step, initial=step, unit="step", file=self._stream, disable=hidden, dynamic_ncols=True
        )

    def advance(self) -> None:
        self._bar.update()

    def show(self, step: int, scalars: Mapping[str, float]) -> None:
        """Loss, accuracy, a language model's perplexity, and speed after a step."""
        values = shown(scalars)
        if not self._bar.disable:
            self._bar.set_postfix(values)
        elif self._first:
            words = [f"step {step}/{self._last}", *(f"{name} {value}" for name, value in values.items())]
            if self.steps_per_second:
                left = round((self._last - step) / self.steps_per_second)
                words += [f"{self.steps_per_second:.3g} steps/s", f"{tqdm.format_interval(left)} left"]
            print("  ".join(words), file=self._stream, flush=True)

    def close(self) -> None:
        self._bar.close()


def shown(scalars: Mapping[str, float]) -> dict[str, str]:
    """What a line for the user holds of the scalars."""
    return {name: f"{scalars[name]:.4g}" for name in SHOWN if name in scalars}


def say(*words: Any) -> None:
    """A line for the user, on the first process, above a progress bar where there is one."""
    if jax.process_index() == 0:
        tqdm.write(" ".join(map(str, words)), file=sys.stderr)


class _Said(logging.Handler):
    def emit(self, record):
        say(record.getMessage())


def say_what_is_logged() -> None:
    """What the library's own loggers tell of a run, such as which algorithm attention takes and why, is said to the user."""
    logger = logging.getLogger("synthesizer_jax")
    if not any(isinstance(handler, _Said) for handler in logger.handlers):
        logger.addHandler(_Said())
    logger.setLevel(logging.INFO)


def model_info(mesh: Mesh, declared: Any, rules: sharding.Rules = sharding.Rules()) -> str:
    """A table of the parameters of a TrainState of `Declared`: path, shape, logical axes, dtype, sharding, count."""
    rows = [("parameter", "shape", "axes", "dtype", "split over", "count")]
    for title, tree in (("", declared.params), (" (fixed)", declared.fixed)):
        placed = dict(sharding.named_leaves(sharding.parameter_shardings(mesh, tree, rules)))
        for name, leaf in sharding.named_leaves(tree):
            shape, axes = "x".join(map(str, leaf.shape)), ", ".join(map(str, leaf.axes))
            split = _split(placed[name])
            rows.append((name + title, shape, axes, jnp.dtype(leaf.dtype).name, split, f"{math.prod(leaf.shape):,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [
        "",
        f"Trained parameters:    {_count(declared.params):,}",
        f"Fixed parameters:      {_count(declared.fixed):,}",
    ]
    return "\n".join([*lines, f"Optimizer's numbers:   {_count(declared.opt_state):,}"]) + "\n"


def _count(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _split(placed):
    sizes = placed.mesh.shape
    return (
        ", ".join(f"{axis}={sizes[axis]}" for axis in jax.tree.leaves(tuple(placed.spec)) if sizes[axis] > 1) or "whole"
    )
