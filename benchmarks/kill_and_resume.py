"""A run that is killed again and again ends as one that never was: python benchmarks/kill_and_resume.py

Trains a tiny model once without interruption, and once in a model_dir whose process is ended at random moments: by SIGKILL
while it reads, computes, evaluates or saves, and by SIGTERM. The same command goes on each time, in a new process. Every
checkpoint that both runs have is compared to the bit (parameters, optimizer state, step), and so are their logs. Writes
docs/kill_and_resume.md, and ends with exit code 1 where anything differs. Takes some minutes.
"""

import argparse
import dataclasses
import multiprocessing
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from synthesizer_jax import data
from synthesizer_jax.models import t5_tiny
from synthesizer_jax.sharding import MeshShape, named_leaves
from synthesizer_jax.training import checkpoint
from synthesizer_jax.training.logging import read_lines
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.optimizer import Adafactor, InverseSqrt
from synthesizer_jax.training.step import Trainer

REPORT = pathlib.Path(__file__).parents[1] / "docs" / "kill_and_resume.md"
MODULE, TASK = "synthesizer_jax.tasks.quickstart", "quickstart_negation"
SIZES = {"features": 64, "mlp_features": 128, "heads": 2, "head_dim": 8, "vocab_size": 2048}
MODEL = t5_tiny("R+V", max_length=32, **SIZES, encoder_layers=1, decoder_layers=1)
OPTIMIZER = Adafactor(InverseSqrt(), min_size_to_factor=8)
CHECKPOINT_PERIOD = 4
STEPS_OF_A_START = 6  # after so many the moment comes at the latest
PAUSE = 0.02  # seconds of each step, so that a process makes few steps more until it is ended


class Paused(data.TrainBatches):
    def __next__(self):
        time.sleep(PAUSE)
        return super().__next__()


def run(folder: str, train_steps: int, cache: str) -> None:
    """What one process does; its errors go to a file beside the folder."""
    with open(f"{folder}.stderr", "w") as errors:
        os.dup2(errors.fileno(), 2)
    jax.config.update("jax_compilation_cache_dir", cache)  # of each process, compilation would take longest
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    data.TrainBatches = Paused
    train(
        model=MODEL,
        optimizer=OPTIMIZER,
        mixture_or_task_name=TASK,
        mixture_or_task_module=MODULE,
        task_feature_lengths={"inputs": 32, "targets": 16},
        batch_size=8,
        train_steps=train_steps,
        model_dir=folder,
        pack=False,
        checkpoint_period=CHECKPOINT_PERIOD,
        keep=None,
        log_period=3,
        eval_period=10,
        eval_steps=4,
    )


class Process:
    """A new process: forked from one that has imported everything and started nothing, as importing takes longest."""

    def __init__(self, folder: pathlib.Path, train_steps: int, cache: pathlib.Path):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([train.__module__, MODULE])
        self._process = context.Process(target=run, args=(str(folder), train_steps, str(cache)))
        self._errors = folder.with_name(f"{folder.name}.stderr")
        self._process.start()

    def runs(self) -> bool:
        return self._process.exitcode is None

    def signal(self, name: str) -> None:
        if self.runs():
            os.kill(self._process.pid, signal.Signals[name])

    def end(self, seconds: float) -> tuple[int, str]:
        """Waits for it. Its exit code, negative that of a signal which killed it, and what it said."""
        self._process.join(seconds)
        if self.runs():
            self._process.kill()
            sys.exit(f"a process did not end within {seconds} s\n{self._errors.read_text()[-3000:]}")
        return self._process.exitcode, self._errors.read_text()


@dataclasses.dataclass
class End:
    """How one process of the run ended."""

    number: int
    moment: str
    signal: str = "SIGKILL"
    came_from: str = ""  # where it had gone on from; "" where it was ended before it said so
    reached: int = 0  # the last step that its log holds
    unfinished: str = ""  # a checkpoint that was being written when it ended
    seconds: float = 0.0  # from the signal to the end of the process
    code: int = 0


def last_step(folder: pathlib.Path) -> int:
    lines = read_lines(folder / "train" / "metrics.jsonl")
    return int(lines[-1]["step"]) if lines else 0


def unfinished(folder: pathlib.Path) -> list[str]:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(name for name in names if name.startswith(f"{checkpoint.PREFIX}_") and "tmp" in name)


def wait_for(condition, process: Process) -> None:
    end = time.monotonic() + 120
    while not condition() and process.runs() and time.monotonic() < end:
        time.sleep(0.001)


def end(process: Process, folder: pathlib.Path, record: End, draw: random.Random) -> None:
    """Waits for the moment, sends the signal, and writes down what it hit."""
    begun = last_step(folder)
    if record.moment == "start":
        time.sleep(draw.uniform(0, 6))
    elif record.moment == "save":
        after = draw.randrange(1, STEPS_OF_A_START)
        wait_for(lambda: last_step(folder) >= begun + after, process)
        wait_for(lambda: unfinished(folder), process)
        time.sleep(draw.uniform(0, 0.02))
    else:
        after = draw.randrange(1, STEPS_OF_A_START)
        wait_for(lambda: last_step(folder) >= begun + after, process)
        time.sleep(draw.uniform(0, 0.1))
    sent = time.monotonic()
    process.signal(record.signal)
    record.code, errors = process.end(120)
    record.seconds = time.monotonic() - sent
    record.reached = last_step(folder)
    if record.moment != "start":  # what is there then, the process before left
        record.unfinished = ", ".join(unfinished(folder))
    found = re.search(r"goes on from .*/(\S+)|starts from (new parameters)", errors)
    record.came_from = (found[1] or found[2]) if found else ""
    if record.signal == "SIGTERM" and record.code not in (128 + signal.SIGTERM, -signal.SIGTERM):
        sys.exit(f"SIGTERM: exit code {record.code}\n{errors[-3000:]}")
    print(record, flush=True)


def differences(whole: pathlib.Path, killed: pathlib.Path) -> tuple[list[str], list[int]]:
    """(what differs, the steps of the checkpoints that were compared)."""
    target = Trainer(MODEL, OPTIMIZER, MeshShape().build(jax.devices()[:1])).abstract_state()
    steps = [{checkpoint.step_of(path) for path in folder.iterdir()} - {None} for folder in (whole, killed)]
    faults, common = [], sorted(steps[0] & steps[1])
    if missing := sorted(steps[0] - steps[1]):
        faults.append(f"checkpoints of {missing} are missing")
    for step in common:
        states = [checkpoint.restore(folder / f"{checkpoint.PREFIX}_{step}", target) for folder in (whole, killed)]
        for (name, a), (_, b) in zip(*map(named_leaves, states), strict=True):
            if np.asarray(a).tobytes() != np.asarray(b).tobytes():
                faults.append(f"{name} at step {step}")
    for log in ("train/metrics.jsonl", f"training_eval/{TASK}/metrics.jsonl"):
        entries = [
            [{name: value for name, value in line.items() if "timing" not in name} for line in read_lines(folder / log)]
            for folder in (whole, killed)
        ]
        if entries[0] != entries[1]:
            faults.append(log)
    if leftovers := unfinished(killed):
        faults.append(f"left over: {leftovers}")
    return faults, common


def as_markdown(records: list[End], faults: list[str], compared: list[int], train_steps: int, minutes: float) -> str:
    kills = sum(record.signal == "SIGKILL" for record in records)
    terms = [record for record in records if record.signal == "SIGTERM" and record.code == 128 + signal.SIGTERM]
    lines = [
        "# Killed and resumed",
        "",
        f"Made by `python benchmarks/kill_and_resume.py` in {minutes:.1f} minutes, on a CPU. A run of {train_steps} steps was "
        f"ended {len(records)} times, {kills} times by SIGKILL, and the same command went on in a new process each time. "
        f"{len(compared)} checkpoints (every {CHECKPOINT_PERIOD} steps) were compared with those of a run that never stopped: "
        "parameters, optimizer state and step to the bit; so were the entries of both logs, all but the timing.",
        "",
        f"**{'All are equal.' if not faults else 'Different: ' + '; '.join(faults)}**",
        "",
        f"{sum(bool(record.unfinished) for record in records)} of the kills hit a checkpoint that was being written.",
    ]
    if terms:
        longest = max(record.seconds for record in terms)
        lines[-1] += f" SIGTERM was followed by a checkpoint and the end of the process within {longest:.1f} s."
    lines += [
        "",
        "| | signal | aimed at | went on from | last step in its log | being written | seconds to its end | exit code |",
        "| ---: | --- | --- | --- | ---: | --- | ---: | ---: |",
    ]
    lines += [
        f"| {r.number} | {r.signal} | {r.moment} | {r.came_from} | {r.reached} | {r.unfinished.partition('.')[0]} | "
        f"{r.seconds:.1f} | {r.code} |"
        for r in records
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--terms", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60, help="after which no more is killed")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the moments")
    arguments = parser.parse_args()
    begun, draw = time.monotonic(), random.Random(arguments.seed)
    moments = [("SIGKILL", moment) for _, moment in zip(range(arguments.kills), _cycle(), strict=False)]
    moments += [("SIGTERM", "any")] * arguments.terms
    draw.shuffle(moments)
    train_steps = 10 * (len(moments) + 2)
    with tempfile.TemporaryDirectory() as place:
        whole, killed, cache = (pathlib.Path(place, name) for name in ("whole", "killed", "compiled"))
        _finish(Process(whole, train_steps, cache))
        records = [End(number, moment, name) for number, (name, moment) in enumerate(moments, 1)]
        for record in records:
            if time.monotonic() - begun > 60 * arguments.minutes:
                records = records[: record.number - 1]
                break
            end(Process(killed, train_steps, cache), killed, record, draw)
        _finish(Process(killed, train_steps, cache))
        faults, compared = differences(whole, killed)
    minutes = (time.monotonic() - begun) / 60
    REPORT.write_text(as_markdown(records, faults, compared, train_steps, minutes))
    print(f"{faults or 'all equal'}; written to {REPORT}; {minutes:.1f} minutes; --seed {arguments.seed}")
    return 1 if faults else 0


def _cycle():
    while True:
        yield from ("any", "save", "any", "save", "start")


def _finish(process: Process) -> None:
    code, errors = process.end(900)
    if code:
        sys.exit(errors[-5000:])


if __name__ == "__main__":
    sys.exit(main())
