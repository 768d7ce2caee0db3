"""Examples with a task's features, in an order that depends on the arguments only."""

import functools
import hashlib
from collections.abc import Mapping

import numpy as np
import seqio
import tensorflow as tf

from synthesizer_jax.data.providers import (
    TARGETS,
    Provider,
    check_room,
    get_mixture_or_task,
    load_vocabularies,
    output_vocabulary,
    with_split,
)
from synthesizer_jax.models.batch import ENCODER_ONLY, BatchKeys
from synthesizer_jax.tasks import sources


def task_dataset(mixture_or_task: str | Provider, lengths: Mapping[str, int], **options) -> tf.data.Dataset:
    """Examples with the task's features in an order that depends on the options only, those of seqio's get_dataset."""
    provider = get_mixture_or_task(mixture_or_task)
    load_vocabularies(provider)
    check_room(provider, lengths)
    if isinstance(provider, seqio.Mixture):
        options |= {"log_mixing_proportions": False}  # seqio would read a part of the cache for it
    try:
        # seqio would keep small sources in memory, and with them in every saved state of an iterator.
        return provider.get_dataset(dict(lengths), try_in_mem_cache=False, **options).with_options(ordered())
    except ValueError as error:
        raise ValueError(f"{provider.name!r} with task_feature_lengths={dict(lengths)}: {error}") from error


def ordered() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = True
    return options


def number_of_examples(task: seqio.Task, split: str, use_cached: bool) -> int | None:
    """Of the source, or the cache, before what follows; None where that is not known."""
    if use_cached and task.supports_caching:
        return task.get_cached_stats(split)["examples"]
    count = task.num_input_examples(split)
    return None if count is None or not np.isfinite(count) else int(count)


def fingerprints(provider, lengths, keys, split, cached, seed) -> dict[str, str]:
    """A hash of each task's first examples: it differs where text or vocabulary do. Raises where there is none."""
    key = tuple(lengths.items()), keys, split, cached, seed, sources.places()
    return {task.name: _fingerprint(task, *key) for task in with_split(provider, split)}


@functools.lru_cache(maxsize=64)
def _fingerprint(
    task: seqio.Task,
    lengths: tuple[tuple[str, int], ...],
    keys: BatchKeys,
    split: str,
    cached: bool,
    seed: int,
    places: tuple,  # where the data was looked for when this was computed
) -> str:
    options = {"split": split, "use_cached": cached, "shuffle": False, "seed": seed, "num_epochs": 1}
    dataset = task_dataset(task, dict(lengths), **options)
    digest, count = hashlib.sha256(str(number_of_examples(task, split, cached)).encode()), 0
    for count, example in enumerate(dataset.take(32).as_numpy_iterator(), start=1):
        if keys == ENCODER_ONLY:
            _check_label(task, example[TARGETS])
        for name in dict.fromkeys((*keys.task_features, TARGETS)):
            digest.update(example[name].tobytes() + b";")
    if not count:
        raise ValueError(f"split: {split!r} of {task.name!r} has no examples")
    return digest.hexdigest()[:16]


def _check_label(task, ids):
    classes = output_vocabulary(task).vocab_size
    if ids.shape != (1,) or not 0 <= ids[0] < classes:
        raise ValueError(
            f"{TARGETS}: expected one class id from 0 to {classes - 1} in each example of {task.name!r}, got {ids.tolist()}"
        )
