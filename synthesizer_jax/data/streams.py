"""A stream: one of `shards` parts of the examples, with an order, random draws and a mixing of its own.

Stream s reads every shards-th example of each task, or every shards-th file where a task has at least as many files.
All streams together have each example once in an epoch, and what a stream holds depends on `shards` and the seed alone.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import seqio
import tensorflow as tf

from synthesizer_jax.data.examples import number_of_examples, task_dataset
from synthesizer_jax.data.providers import Provider, with_split

FEW = 100  # examples for each stream: with so many a part of them is not empty


def stream_dataset(
    provider: Provider,
    lengths: Mapping[str, int],
    stream: int,
    shards: int,
    *,
    split: str,
    use_cached: bool,
    seed: int,
    shuffle: bool,
    num_epochs: int | None,
) -> tf.data.Dataset:
    """Examples of one stream, as task_dataset gives them; the only stream has those of the task itself."""
    options = {"split": split, "shuffle": shuffle, "num_epochs": num_epochs}
    if shards == 1:
        return task_dataset(provider, lengths, use_cached=use_cached, seed=seed, **options)
    tasks = [(task, _part(task, split, use_cached, stream, shards, seed)) for task in with_split(provider, split)]
    if isinstance(provider, seqio.Task):
        ((_, part),) = tasks
    else:
        rates = [(part, provider.get_rate(task)) for task, part in tasks]
        part = seqio.Mixture(provider.name, rates, sample_fn=provider._sample_fn)
    return task_dataset(part, lengths, use_cached=False, seed=_own_seed(seed, stream, shards), **options)


def check_streams(
    provider: Provider,
    lengths: Mapping[str, int],
    streams: Iterable[int],
    shards: int,
    *,
    split: str,
    use_cached: bool,
    seed: int,
) -> None:
    """Raises ValueError where a task has nothing for one of these streams."""
    if shards == 1:
        return
    options = {"split": split, "use_cached": use_cached, "seed": seed, "shuffle": False, "num_epochs": 1}
    for task in with_split(provider, split):
        count = number_of_examples(task, split, use_cached)
        if count is not None and count < shards:
            raise ValueError(
                f"shards: {split!r} of {task.name!r} has {count} examples, fewer than {shards} shards; expected at "
                f"most {count} shards"
            )
        if count is not None and count >= FEW * shards:
            continue
        for stream in streams:
            if not any(True for _ in stream_dataset(task, lengths, stream, shards, **options).take(1)):
                raise ValueError(
                    f"shards: {split!r} of {task.name!r} has no example in shard {stream} of {shards}; expected fewer "
                    "shards"
                )


def _part(task: seqio.Task, split: str, use_cached: bool, stream: int, shards: int, order_seed: int) -> seqio.Task:
    """A task that reads one stream's part of what a task reads: its source, or its cache."""
    source, steps = task.source, list(task.preprocessors)
    if use_cached and task.supports_caching:
        source = task._get_cached_source(split)
        places = [place for place, step in enumerate(steps) if isinstance(step, seqio.CacheDatasetPlaceholder)]
        steps = steps[places[0] + 1 :]
    return task.replace(source=_Part(source, stream, shards, order_seed), preprocessors=steps)


def _own_seed(seed: int, stream: int, shards: int) -> int:
    return int(np.random.SeedSequence((seed, shards, stream)).generate_state(1)[0] >> 1)  # seqio takes int32


class _Part(seqio.DataSource):
    """One of `shards` parts of a source. They have one seed of the source's order, as they divide the same order."""

    def __init__(self, source: seqio.DataSource, index: int, shards: int, order_seed: int):
        super().__init__(splits=tuple(source.splits), performs_internal_shuffling=source.performs_internal_shuffling)
        self._source, self._index, self._shards, self._order_seed = source, index, shards, order_seed

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return False

    def list_shards(self, split: str) -> list[str]:
        return [split]

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        source, order = self._source, {"split": split, "seed": self._order_seed}
        if source.supports_arbitrary_sharding or len(source.list_shards(split)) >= self._shards:
            return source.get_dataset(**order, shuffle=shuffle, shard_info=seqio.ShardInfo(self._index, self._shards))
        # Its few files in their order: TensorFlow forgets how often a shuffle began anew that is below an exhausted
        # shard, so that a restored iterator would have other epochs. Examples are shuffled above.
        return source.get_dataset(**order, shuffle=False).shard(self._shards, self._index)
