"""How fast the input pipeline is, and whether a training step waits for it.

    python benchmarks/input_pipeline.py [--tfds_data_dir=DIR --vocabulary=FILE] [--seconds=4] [--rounds=3] [--rows=2]

Without a data folder, of the quickstart's tasks alone. Two Markdown tables:

1. Tokens (without padding) a second of the pipeline alone, with 1, 2 and 4 shards, with and without seqio's cache, as
   ratios to one shard without a cache: medians over rounds, in each of which all are measured one after the other.
2. Steps of T5-small, R+V, on a few packed rows of 512 and 114 tokens, inside the training loop: the part of the time in
   which the devices have nothing to do because the next batch is not there; as the loop is, and where it reads a batch
   only when the step before has ended. `alone`: the time of the same steps on a batch that is there already.

Absolute numbers are those of the machine, and of what else it does.
"""

import argparse
import concurrent.futures
import contextlib
import os
import statistics
import tempfile
import time
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import seqio

import synthesizer_jax as sj
from synthesizer_jax import caching, data
from synthesizer_jax.training import loop
from synthesizer_jax.training.optimizer import Adafactor, Constant
from synthesizer_jax.training.step import Trainer

LENGTHS = {"inputs": 512, "targets": 114}
TASKS = {  # name: lengths, whether packed
    "quickstart_span_corruption": (LENGTHS, True),
    "quickstart_finetune": ({"inputs": 96, "targets": 12}, True),
}
REAL_TASKS = {
    "c4_span_corruption": (LENGTHS, True),
    "wmt14_en_de": ({"inputs": 256, "targets": 256}, True),
    "glue_rte": ({"inputs": 256, "targets": 16}, False),
}
SHARDS = (1, 2, 4)
BATCH = 32


def rate(batches, seconds: float) -> float:
    """Tokens a second."""
    for _ in range(4):  # those that lie ready
        next(batches)
    tokens, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        batch = next(batches)
        tokens += int((batch["encoder_input_tokens"] > 0).sum()) + int(batch["decoder_loss_weights"].sum())
    return tokens / (time.perf_counter() - start)


def pipelines(tasks, options) -> None:
    print("| task | cached once in | tokens/s | " + " | ".join(f"{n} shards" for n in SHARDS[1:]), end="")
    print(" | " + " | ".join(f"cached, {n} shard{'s' * (n > 1)}" for n in SHARDS) + " | state, kB a shard |")
    print("| --- " * (4 + 2 * len(SHARDS)) + "|")
    for name, (lengths, pack) in tasks.items():
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            caching.cache([name], folder, splits=["train"], num_shards=8, tfds_data_dir=options.tfds_data_dir)
            made = time.perf_counter() - start
            with contextlib.ExitStack() as stack:
                variants = {}
                for cached in (False, True):
                    seqio.set_global_cache_dirs([folder] if cached else [])
                    for shards in SHARDS:
                        variant = data.TrainBatches(
                            name, lengths, BATCH, pack=pack, shards=shards, use_cached_tasks=cached
                        )
                        variants[cached, shards] = stack.enter_context(variant)
                rounds = [
                    {key: rate(batches, options.seconds) for key, batches in variants.items()}
                    for _ in range(options.rounds)
                ]
                state = len(variants[False, 4].state()) / 4 / 1000
        base = [found[False, 1] for found in rounds]
        ratios = [
            f"{statistics.median(found[key] / found[False, 1] for found in rounds):.2f}"
            for key in variants
            if key != (False, 1)
        ]
        print(
            f"| {name} | {made:.0f} s | {statistics.median(base):,.0f} | {' | '.join(ratios)} | {state:,.0f} |",
            flush=True,
        )


class Clock:
    """When batches were asked for and there, when steps began and ended."""

    def __init__(self, overlap: bool, constant: bool):
        self.overlap, self.constant = overlap, constant
        self.asked, self.there, self.ended = [], [], []
        self.last, self.batch = None, None
        self._watch = concurrent.futures.ThreadPoolExecutor(1)

    def began(self, sums):
        self.last = sums
        self.ended.append(self._watch.submit(lambda: jax.block_until_ready(sums) and time.perf_counter()))

    def waited(self) -> tuple[float, float]:
        """(seconds in which the step before had ended and the next batch was not there, seconds of all steps).

        The first two steps are left out: they are compiled.
        """
        ended = [step.result() for step in self.ended]
        pairs = list(zip(self.asked[1:], self.there[1:], ended[:-1], strict=True))[2:]
        waits = [max(0.0, there - max(asked, end)) for asked, there, end in pairs]
        return sum(waits), ended[-1] - ended[2]


def measured(clock: Clock):
    """The training loop with a clock."""
    train_step = Trainer.train_step

    class Batches(data.TrainBatches):
        def __next__(self):
            if not clock.overlap and clock.last is not None:
                jax.block_until_ready(clock.last)
            clock.asked.append(time.perf_counter())
            if clock.batch is None or not clock.constant:
                clock.batch = super().__next__()
            clock.there.append(time.perf_counter())
            return clock.batch

    def timed(trainer):
        step = train_step(trainer)

        def call(state, batch):
            state, sums = step(state, batch)
            clock.began(sums)
            return state, sums

        return call

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(data, "TrainBatches", Batches))
    stack.enter_context(mock.patch.object(Trainer, "train_step", timed))
    return stack


def steps(task: str, options) -> None:
    vocabulary = data.output_vocabulary(task).vocab_size
    model = sj.t5_small("R+V", max_length=512, vocab_size=-(-vocabulary // 128) * 128)
    found = {}
    for name, overlap, constant in (("alone", True, True), ("as it is", True, False), ("one by one", False, False)):
        clock = Clock(overlap, constant)
        with tempfile.TemporaryDirectory() as folder, measured(clock):
            loop.train(
                model=model,
                optimizer=Adafactor(Constant(1e-3)),
                mixture_or_task_name=task,
                task_feature_lengths=LENGTHS,
                batch_size=options.rows,
                train_steps=options.steps + 3,
                model_dir=folder,
                checkpoint_period=10**9,
                eval_period=None,
            )
        found[name] = clock.waited()
    print(f"\n| {task}, {options.rows} rows | waited for data | time of a step, to that alone |")
    print("| --- | --- | --- |")
    for name in ("as it is", "one by one"):
        waited, total = found[name]
        print(f"| {name} | {waited / total:.2%} | {total / found['alone'][1]:.2f} |")
    print(f"\nA step alone: {found['alone'][1] / options.steps:.2f} s.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tfds_data_dir", metavar="DIR", help="where TFDS keeps C4, WMT14 and GLUE; None: not measured"
    )
    parser.add_argument("--vocabulary", metavar="FILE", help="T5's sentencepiece.model")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="over which medians are taken")
    parser.add_argument("--rows", type=int, default=2, help="of a batch of T5-small")
    parser.add_argument("--steps", type=int, default=20, help="of T5-small")
    options = parser.parse_args()
    tasks = dict(TASKS)
    if options.tfds_data_dir:
        seqio.set_tfds_data_dir_override(options.tfds_data_dir)
        tasks = REAL_TASKS | TASKS
    if options.vocabulary:
        os.environ["SYNTHESIZER_JAX_VOCAB"] = options.vocabulary
    pipelines(tasks, options)
    steps(next(iter(tasks)), options)


if __name__ == "__main__":
    main()
