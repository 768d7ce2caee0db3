"""Tasks and mixtures by name, and whether they fit what is asked of them."""

import difflib
import hashlib
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from synthesizer_jax import tasks
from synthesizer_jax.models.batch import ENCODER_DECODER, BatchKeys
from synthesizer_jax.models.config import EncoderOnlyConfig, ModelConfig
from synthesizer_jax.tasks import sources

TARGETS = "targets"
VOCABULARIES = "vocabularies.json"  # in a cache of ours: what its ids are of
Provider = seqio.Task | seqio.Mixture


def get_mixture_or_task(name: str | Provider) -> Provider:
    """What is registered under a name; the module of a shipped task is imported. Raises ValueError with near misses."""
    if isinstance(name, Provider):
        return name
    registered = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
    shipped = {known: module for module, names in tasks.CONTENTS.items() for known in names}
    if name in shipped and name not in registered:
        importlib.import_module(shipped[name])
    if name in shipped or name in registered:
        return seqio.get_mixture_or_task(name)
    near = difflib.get_close_matches(str(name), registered | set(shipped), n=3)
    where = {known: f"{known} ({shipped[known]})" if known in shipped else known for known in near}
    raise ValueError(
        f"mixture_or_task_name: No Task or Mixture found with name {name!r}; "
        + (f"did you mean {' or '.join(where.values())}? " if near else "")
        + "Import the module that registers it first: MIXTURE_OR_TASK_MODULE; ours are "
        + ", ".join(tasks.CONTENTS)
    )


def check_lengths(task_feature_lengths: Mapping[str, int], keys: BatchKeys = ENCODER_DECODER) -> None:
    """Raises ValueError unless there is a positive length for exactly the features that the kind of model needs."""
    if not isinstance(task_feature_lengths, Mapping) or set(task_feature_lengths) != set(keys.task_features):
        wanted = ", ".join(f'"{name}": TOKENS' for name in keys.task_features)
        raise ValueError(
            f"task_feature_lengths: expected {{{wanted}}} for {keys.kind}, got "
            f"{dict(task_feature_lengths) if isinstance(task_feature_lengths, Mapping) else task_feature_lengths!r}"
        )
    check_integers(**{f'task_feature_lengths["{n}"]': (task_feature_lengths[n], 1) for n in keys.task_features})


def check_room(mixture_or_task: str | Provider, lengths: Mapping[str, int]) -> None:
    """Raises ValueError where a row could hold nothing but the end of the sequence; span corruption would never end."""
    for name, feature in get_mixture_or_task(mixture_or_task).output_features.items():
        if feature.add_eos and lengths.get(name, 2) < 2:
            raise ValueError(
                f'task_feature_lengths["{name}"]: expected at least 2 tokens, of which the last is the end of the '
                f"sequence, got {lengths[name]}"
            )


def check_packing(keys: BatchKeys, pack: bool) -> None:
    """Raises ValueError where examples can't share rows."""
    if pack and not keys.packing:
        raise ValueError(
            f"pack: {keys.kind} gives one answer for a row, so that a row holds one example; set pack=False (PACK = False)"
        )


def check_features(mixture_or_task: str | Provider, keys: BatchKeys) -> None:
    """Raises ValueError where a task lacks what the kind of model reads, or has inputs that it would not read."""
    provider = get_mixture_or_task(mixture_or_task)
    has, reads = set(provider.output_features), {*keys.task_features, TARGETS}
    if reads - has or (has - reads) & {"inputs"}:
        raise ValueError(
            f"mixture_or_task_name: {provider.name!r} has the features {' and '.join(sorted(has))}, but {keys.kind} reads "
            f"{' and '.join(sorted(reads))}"
        )


def check_model(mixture_or_task: str | Provider, config: ModelConfig) -> None:
    """Raises ValueError where a task's features, vocabularies or labels are not those that a model is made for."""
    provider = get_mixture_or_task(mixture_or_task)
    check_features(provider, config.batch)
    check_vocabulary(provider, config.vocab_size, config.batch.task_features)
    if isinstance(config, EncoderOnlyConfig):
        labels = output_vocabulary(provider).vocab_size
        if labels != config.num_classes:
            raise ValueError(
                f"num_classes: {TARGETS!r} of {provider.name!r} is one of {labels} ids, the model has "
                f"{config.num_classes} classes; a classifier's task has a vocabulary of its labels"
            )
    elif output_vocabulary(provider).eos_id is None:
        raise ValueError(
            f"mixture_or_task_name: {TARGETS!r} of {provider.name!r} have no end-of-sequence id, as the labels of a "
            f"classifier's task; {config.batch.kind} says sequences of tokens"
        )


def check_split(mixture_or_task: str | Provider, split: str) -> None:
    """Raises ValueError, with the splits that there are, where no task has this one; FileNotFoundError, with all that is
    missing and how to get it, where a task's data is neither there nor cached."""
    provider = get_mixture_or_task(mixture_or_task)
    tasks = with_split(provider, split)
    if not tasks:
        splits = sorted({known for task in seqio.get_subtasks(provider) for known in task.splits})
        raise ValueError(f"split: {provider.name!r} has no split {split!r}; it has {', '.join(splits)}")
    missing = [how for task in tasks if not is_cached(task, split) and (how := how_to_get(task, split)) is not None]
    if missing:
        raise FileNotFoundError("; ".join(dict.fromkeys(missing)))


def describe_split(mixture_or_task: str | Provider, split: str, use_cached_tasks: bool | None) -> str:
    """What is read, for people: the split, its tasks, and whether from a cache."""
    provider = get_mixture_or_task(mixture_or_task)
    cached = "cached" if use_cache(provider, use_cached_tasks, split) else "not cached"
    return f"data: split {split!r} of {', '.join(task.name for task in with_split(provider, split))} ({cached})"


def how_to_get(task: seqio.Task, split: str) -> str | None:
    """How to get the data of a split's source that is not there; None where it is, or where the source does not say: those
    of seqio may have folders of their own, or download."""
    return task.source.missing(split) if isinstance(task.source, sources.OURS) else None


def output_vocabulary(mixture_or_task: str | Provider, feature: str = TARGETS) -> seqio.Vocabulary:
    """The vocabulary of a feature: `.vocab_size` counts its sentinels, `.decode(ids)` gives text."""
    provider = get_mixture_or_task(mixture_or_task)
    if feature not in provider.output_features:
        known = ", ".join(provider.output_features)
        raise ValueError(f"feature: {provider.name!r} has no feature {feature!r}; it has {known}")
    return provider.output_features[feature].vocabulary


def decoded(vocabulary: seqio.Vocabulary, ids: Sequence[int]) -> str:
    """The text of all ids, with </s> between texts that were joined, where seqio's decode stops; the ids themselves where
    the vocabulary has no text for them."""
    parts: list[list[int]] = [[]]
    for i in map(int, ids):
        if i == vocabulary.eos_id:
            parts.append([])
        else:
            parts[-1].append(i)
    texts = [vocabulary.decode(part) for part in (parts if parts[-1] else parts[:-1])]
    return " </s> ".join(text if isinstance(text, str) else " ".join(map(str, text)) for text in texts)


def load_vocabularies(provider: Provider) -> None:
    """Raises OSError or ValueError where one can't be read, as it is: inside of a pipeline it would be wrapped."""
    for feature in provider.output_features.values():
        _ = feature.vocabulary.vocab_size


def check_vocabulary(
    mixture_or_task: str | Provider, vocab_size: int, features: Sequence[str] = ENCODER_DECODER.task_features
) -> None:
    """Raises ValueError where a model with `vocab_size` embedding rows has none for some of the task's ids."""
    provider = get_mixture_or_task(mixture_or_task)
    for feature in features:
        ids = output_vocabulary(provider, feature).vocab_size
        if ids > vocab_size:
            raise ValueError(
                f"vocab_size: {feature!r} of {provider.name!r} has ids up to {ids - 1}, the model has {vocab_size} "
                f"rows; use at least vocab_size={-(-ids // 128) * 128}, or the task with the model's own vocabulary"
            )


def use_cache(mixture_or_task: str | Provider, use_cached_tasks: bool | None = None, split: str | None = None) -> bool:
    """Whether to read seqio's cache of a split (None: of any). use_cached_tasks None: where every task that can be cached
    is; True: an error where one is not; False: never."""
    provider = get_mixture_or_task(mixture_or_task)
    tasks = seqio.get_subtasks(provider) if split is None else with_split(provider, split)
    cacheable = [task for task in tasks if task.supports_caching]
    missing = [task.name for task in cacheable if not is_cached(task, split)]
    if use_cached_tasks and (missing or not cacheable):
        folders = ", ".join(map(str, seqio.get_global_cache_dirs())) or "none: give --seqio_additional_cache_dirs=DIR"
        of_split = "" if split is None else f" with the split {split!r}"
        raise ValueError(
            f"use_cached_tasks: no cache of {', '.join(missing) or repr(provider.name)}{of_split} in the cache folders "
            f"({folders}); make one with `python -m synthesizer_jax cache {' '.join(missing) or provider.name} "
            "--output_cache_dir=DIR`, or leave USE_CACHED_TASKS out to use one where there is one"
        )
    use = bool(cacheable) and not missing if use_cached_tasks is None else use_cached_tasks
    for task in cacheable if use else ():
        check_cache(task, task.cache_dir)
    return use


def check_cache(task: seqio.Task, folder: str) -> None:
    """Raises ValueError where a cache was made with another vocabulary than the task's (as far as it says)."""
    path = os.path.join(folder, VOCABULARIES)
    if not tf.io.gfile.exists(path):
        return  # made by other tools
    with tf.io.gfile.GFile(path) as file:
        then = json.load(file)
    now = vocabulary_fingerprints(task)
    different = [name for name in now if then.get(name) != now[name]]
    if different:
        raise ValueError(
            f"use_cached_tasks: the cache of {task.name!r} in {folder} was made with another vocabulary of "
            f"{' and '.join(different)} than today's; give that vocabulary, make the cache again (cache --overwrite), or "
            "set USE_CACHED_TASKS=False"
        )


def vocabulary_fingerprints(task: seqio.Task) -> dict[str, str]:
    """Of each feature: equal where its vocabulary has the same pieces."""

    def content(vocabulary):
        if isinstance(vocabulary, seqio.SentencePieceVocabulary):
            return vocabulary.sp_model
        return f"{type(vocabulary).__name__} {vocabulary.vocab_size} {vocabulary.eos_id}".encode()

    return {
        name: hashlib.sha256(content(feature.vocabulary)).hexdigest()[:16]
        for name, feature in task.output_features.items()
    }


def is_cached(task: seqio.Task, split: str | None) -> bool:
    """Whether seqio has a cache of it. A split whose data was not there when the others were cached is not."""
    if task.cache_dir is None:
        return False
    return split is None or tf.io.gfile.exists(seqio.get_cached_info_path(task.cache_dir, split))


def check_shards(batch_size: int, shards: int) -> None:
    """Raises ValueError unless each shard makes as many rows of a batch."""
    check_integers(shards=(shards, 1))
    if batch_size % shards:
        nearest = max(n for n in range(1, min(shards, batch_size) + 1) if batch_size % n == 0)
        raise ValueError(
            f"shards: {batch_size} rows of a batch cannot be divided among {shards} shards; expected a divisor such as {nearest}"
        )


def with_split(provider: Provider, split: str) -> list[seqio.Task]:
    return [task for task in seqio.get_subtasks(provider) if split in task.splits]


def check_integers(**least: tuple[Any, int]) -> None:
    for name, (value, minimum) in least.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < minimum:
            raise ValueError(f"{name}: expected an integer of at least {minimum}, got {value!r}")
