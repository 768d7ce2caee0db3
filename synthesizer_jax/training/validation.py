"""Evaluation while training: loss, accuracy and perplexity of validation tasks given the right targets before."""

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import seqio

from synthesizer_jax import data, sharding
from synthesizer_jax.training.logging import ScalarWriter, say, shown, summarize
from synthesizer_jax.training.step import Trainer, TrainState

TRAINING_EVAL = "training_eval"  # in model_dir
VALIDATION = "validation"  # the split


class Evaluation:
    """Of each task that has the split, with a log of its own. Use as a context manager."""

    def __init__(
        self,
        trainer: Trainer,
        mixture_or_task_name: str | None,
        source: Mapping[str, Any],
        eval_steps: int | None,
        model_dir: str,
        after_step: int,
    ):
        """mixture_or_task_name: None: no task. source: what data.eval_batches is given besides. eval_steps: batches of each
        task; None: all. after_step: what the logs have of later steps is dropped."""
        self._trainer, self._source, self._eval_steps = trainer, source, eval_steps
        self._step = trainer.eval_step()
        tasks = [] if mixture_or_task_name is None else _tasks(mixture_or_task_name)
        folder = f"{model_dir}/{TRAINING_EVAL}"
        self._writers = {task: ScalarWriter(f"{folder}/{_folder_name(task)}", after_step) for task in tasks}

    def __call__(
        self, state: TrainState, step: int, goes_on: Callable[[], bool] = lambda: True
    ) -> dict[str, dict[str, float]] | None:
        """Task -> metrics. `goes_on` is asked after each batch, on all hosts alike; None where it said no."""
        results = {}
        for task, writer in self._writers.items():
            batches = itertools.islice(data.eval_batches(task, split=VALIDATION, **self._source), self._eval_steps)
            sums = []
            for batch, _ in batches:
                sums.append(self._step(state, sharding.place_batch(self._trainer.mesh, batch)))
                if not goes_on():
                    return None
            results[task] = summarize(jax.device_get(sums))
            writer.write(step, results[task])
            say(f"step {step}  {task}:", *(f" {name} {value}" for name, value in shown(results[task]).items()))
        return results

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for writer in self._writers.values():
            writer.close()


def _tasks(mixture_or_task_name: str) -> list[str]:
    provider = data.get_mixture_or_task(mixture_or_task_name)
    found = [task for task in seqio.get_subtasks(provider) if VALIDATION in task.splits]
    if not found:
        say(f"{mixture_or_task_name} has no {VALIDATION} split: no evaluation")
    missing = {
        task.name: how
        for task in found
        if not data.is_cached(task, VALIDATION) and (how := data.how_to_get(task, VALIDATION)) is not None
    }
    for name, how in missing.items():
        say(f"no evaluation on {name}: {how}")
    return [task.name for task in found if task.name not in missing]


def _folder_name(task: str) -> str:
    return re.sub(r"[^\w.+-]", "_", task)[:200]  # file systems take 255
