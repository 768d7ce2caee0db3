"""From a seqio task or mixture to batches of numpy arrays, with a state from which a new process goes on exactly.

Keys are seqio's: encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, decoder_loss_weights and, where
examples are packed, {encoder,decoder}_segment_ids (1, 2, ...; 0 is padding) and {encoder,decoder}_positions (within the
example). All are int32 [rows, length].

**Hosts.** Every host runs the whole pipeline and keeps its rows of each batch. So batches, losses and states do not
depend on the number of hosts, and a run continues on another number of them. The price is reading everything on each
host; where that is too slow, cache the tasks.

Importing this module takes seconds (TensorFlow, seqio); the core does not.
"""

import difflib
import functools
import hashlib
import importlib.metadata
import io
import json
import pathlib
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from synthesizer_jax import tasks

FEATURES = ("inputs", "targets")
Batch = dict[str, np.ndarray]
Provider = seqio.Task | seqio.Mixture


class TrainBatches:
    """Batches without end (or for `num_epochs`), the same ones for the same arguments, on every run.

    A batch is `batch_size` rows over all hosts; this host's rows come out. With `num_epochs` the rows that do not fill
    the last batch are left out; without, examples come again and again, so a small split needs no special care.

    Args:
      mixture_or_task_name: a name registered with seqio; import its module first.
      task_feature_lengths: tokens of a row, {"inputs": ..., "targets": ...}; longer examples are cut.
      batch_size: rows of a batch, over all hosts.
      split: a split of the task; tasks of a mixture that do not have it are left out.
      seed: of the order, of mixing and of preprocessors that draw at random.
      pack: whether several examples share a row.
      shuffle: whether the order depends on the seed; without it, that of the source.
      use_cached_tasks: True: cached tasks only; False: never; None: where there is a cache.
      num_epochs: how often the examples are gone through; None: without end.
      shard: (index of this host, number of hosts).

    Raises: ValueError where a name, split, length or size is wrong, or where the split has no example.
    """

    def __init__(
        self,
        mixture_or_task_name: str,
        task_feature_lengths: Mapping[str, int],
        batch_size: int,
        *,
        split: str = "train",
        seed: int = 0,
        pack: bool = True,
        shuffle: bool = True,
        use_cached_tasks: bool | None = None,
        num_epochs: int | None = None,
        shard: tuple[int, int] = (0, 1),
    ):
        provider = get_mixture_or_task(mixture_or_task_name)
        check_lengths(task_feature_lengths)
        check_split(provider, split)
        self._rows = _rows(batch_size, shard)
        _check_integers(seed=(seed, 0), num_epochs=(1 if num_epochs is None else num_epochs, 1))
        cached = use_cache(provider, use_cached_tasks)
        lengths = {name: int(task_feature_lengths[name]) for name in FEATURES}
        self._identity = {
            "mixture_or_task_name": mixture_or_task_name,
            "task_feature_lengths": lengths,
            "batch_size": batch_size,
            "split": split,
            "seed": seed,
            "pack": pack,
            "shuffle": shuffle,
            "use_cached_tasks": cached,
            "num_epochs": num_epochs,
            "examples": _fingerprints(provider, lengths, split, cached, seed),
            "seqio": seqio.__version__,
            "tensorflow": tf.__version__,
        }
        options = {"split": split, "use_cached": cached, "seed": seed, "shuffle": shuffle, "num_epochs": num_epochs}
        dataset = _converted(provider, lengths, pack=pack, **options)
        dataset = dataset.batch(batch_size, drop_remainder=True).prefetch(2).with_options(_options())
        self._iterator = iter(dataset)
        self._empty = f"batch_size: {split!r} of {mixture_or_task_name!r} has fewer rows than one batch of {batch_size}"
        self._started = False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            batch = next(self._iterator)
        except StopIteration:
            if not self._started:
                raise ValueError(f"{self._empty}; give a smaller one, or num_epochs=None") from None
            raise
        self._started = True
        return {name: rows.numpy()[self._rows] for name, rows in batch.items()}

    def state(self) -> bytes:
        """Where the iterator stands: TensorFlow's checkpoint of it and the arguments it belongs to, in a zip archive.

        It holds the shuffle buffers, so its size is that of some thousand examples. The same on every host.
        """
        archive = io.BytesIO()
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
            tf.train.Checkpoint(iterator=self._iterator).write(f"{folder}/iterator")
            packed.writestr("identity.json", json.dumps(self._identity | {"started": self._started}))
            for path in sorted(pathlib.Path(folder).iterdir()):
                packed.write(path, path.name)
        return archive.getvalue()

    def restore(self, state: bytes) -> None:
        """Goes to where `state` was taken, also in a new process, on other devices and another number of hosts.

        Raises: ValueError that names each argument, or version, that differs from when the state was taken.
        """
        try:
            packed = zipfile.ZipFile(io.BytesIO(state))
            saved = json.loads(packed.read("identity.json"))
        except (zipfile.BadZipFile, KeyError, ValueError) as error:
            raise ValueError(f"state: these {len(state)} bytes are not a state of TrainBatches: {error}") from error
        self._started = saved.pop("started", False)
        differing = [
            f"{name} {saved.get(name)!r} then, {self._identity.get(name)!r} now"
            for name in dict.fromkeys([*self._identity, *saved])
            if saved.get(name) != self._identity.get(name)
        ]
        if differing:
            raise ValueError(
                f"state: it was taken from other batches: {'; '.join(differing)}. Use what was used then, or start the "
                "data anew from the saved parameters (INITIAL_CHECKPOINT_PATH)"
            )
        with packed, tempfile.TemporaryDirectory() as folder:
            packed.extractall(folder)
            tf.train.Checkpoint(iterator=self._iterator).read(f"{folder}/iterator").assert_consumed()

    def close(self) -> None:
        """Lets go of the pipeline's threads and buffers."""
        self._iterator, self._started = iter(()), True

    def __enter__(self) -> "TrainBatches":
        return self

    def __exit__(self, *unused) -> None:
        self.close()


def eval_batches(
    mixture_or_task_name: str,
    task_feature_lengths: Mapping[str, int],
    batch_size: int,
    *,
    split: str = "validation",
    seed: int = 0,
    use_cached_tasks: bool | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Iterator[tuple[Batch, int]]:
    """Every example of the split once, not packed, in order; of a mixture, one task's after the other's.

    Yields: a batch, always of the same shape, and how many of this host's rows are examples. The rows after them are
    all padding, with weight 0. Every host gets the same number of batches.
    """
    provider = get_mixture_or_task(mixture_or_task_name)
    check_lengths(task_feature_lengths)
    check_split(provider, split)
    rows = _rows(batch_size, shard)
    cached = use_cache(provider, use_cached_tasks)
    lengths = {name: int(task_feature_lengths[name]) for name in FEATURES}
    _fingerprints(provider, lengths, split, cached, seed)  # raises where there are no examples
    options = {"split": split, "use_cached": cached, "seed": seed, "shuffle": False, "num_epochs": 1, "pack": False}
    datasets = [_converted(task, lengths, **options) for task in _with_split(provider, split)]
    dataset = functools.reduce(tf.data.Dataset.concatenate, datasets).batch(batch_size).with_options(_options())
    return _padded(dataset, batch_size, rows)


def _padded(dataset: tf.data.Dataset, batch_size: int, rows: slice) -> Iterator[tuple[Batch, int]]:
    for batch in dataset.as_numpy_iterator():
        real = len(batch["encoder_input_tokens"])
        filled = {name: np.pad(ids, ((0, batch_size - real), (0, 0)))[rows] for name, ids in batch.items()}
        yield filled, min(max(real - rows.start, 0), rows.stop - rows.start)


# Names, splits, lengths, vocabularies, caches


def get_mixture_or_task(name: str | Provider) -> Provider:
    """What is registered under a name. Raises ValueError with near misses and the module that has to be imported."""
    if isinstance(name, Provider):
        return name
    registered = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
    if name in registered:
        return seqio.get_mixture_or_task(name)
    shipped = {known: module for module, names in tasks.CONTENTS.items() for known in names}
    if name in shipped:
        raise ValueError(
            f"mixture_or_task_name: No Task or Mixture found with name {name!r}; import {shipped[name]} first, which "
            f"registers it: MIXTURE_OR_TASK_MODULE={shipped[name]!r}"
        )
    near = difflib.get_close_matches(str(name), registered | set(shipped), n=3)
    where = {known: f"{known} ({shipped[known]})" if known in shipped else known for known in near}
    raise ValueError(
        f"mixture_or_task_name: No Task or Mixture found with name {name!r}; "
        + (f"did you mean {' or '.join(where.values())}? " if near else "")
        + "Import the module that registers it first: MIXTURE_OR_TASK_MODULE; ours are "
        + ", ".join(tasks.CONTENTS)
    )


def check_lengths(task_feature_lengths: Mapping[str, int]) -> None:
    """Raises ValueError unless there is a positive length for exactly "inputs" and "targets"."""
    if not isinstance(task_feature_lengths, Mapping) or set(task_feature_lengths) != set(FEATURES):
        raise ValueError(
            'task_feature_lengths: expected {"inputs": TOKENS, "targets": TOKENS}, got '
            f"{dict(task_feature_lengths) if isinstance(task_feature_lengths, Mapping) else task_feature_lengths!r}"
        )
    _check_integers(**{f'task_feature_lengths["{name}"]': (task_feature_lengths[name], 1) for name in FEATURES})


def check_split(mixture_or_task: str | Provider, split: str) -> None:
    """Raises ValueError, with the splits that there are, where no task has this one."""
    provider = get_mixture_or_task(mixture_or_task)
    if not _with_split(provider, split):
        splits = sorted({known for task in seqio.get_subtasks(provider) for known in task.splits})
        raise ValueError(f"split: {provider.name!r} has no split {split!r}; it has {', '.join(splits)}")


def output_vocabulary(mixture_or_task: str | Provider, feature: str = "targets") -> seqio.Vocabulary:
    """The vocabulary of a feature: `.vocab_size` counts its sentinels, `.decode(ids)` gives text."""
    provider = get_mixture_or_task(mixture_or_task)
    if feature not in provider.output_features:
        known = ", ".join(provider.output_features)
        raise ValueError(f"feature: {provider.name!r} has no feature {feature!r}; it has {known}")
    return provider.output_features[feature].vocabulary


def check_vocabulary(mixture_or_task: str | Provider, vocab_size: int) -> None:
    """Raises ValueError where a model with `vocab_size` embedding rows has none for some of the task's ids."""
    provider = get_mixture_or_task(mixture_or_task)
    for feature in FEATURES:
        ids = output_vocabulary(provider, feature).vocab_size
        if ids > vocab_size:
            raise ValueError(
                f"vocab_size: {feature!r} of {provider.name!r} has ids up to {ids - 1}, the model has {vocab_size} "
                f"rows; use at least vocab_size={-(-ids // 128) * 128}, or the task with the model's own vocabulary"
            )


def use_cache(mixture_or_task: str | Provider, use_cached_tasks: bool | None = None) -> bool:
    """Whether to read seqio's cache. None: where every task that can be cached is. True: an error where one is not."""
    provider = get_mixture_or_task(mixture_or_task)
    cacheable = [task for task in seqio.get_subtasks(provider) if task.supports_caching]
    missing = [task.name for task in cacheable if task.cache_dir is None]
    if use_cached_tasks and (missing or not cacheable):
        folders = ", ".join(map(str, seqio.get_global_cache_dirs())) or "none: see seqio.set_global_cache_dirs"
        raise ValueError(
            f"use_cached_tasks: no cache of {', '.join(missing) or repr(provider.name)} in the cache folders "
            f"({folders}); make one with seqio_cache_tasks, or leave USE_CACHED_TASKS out to use one where there is one"
        )
    if use_cached_tasks is None:
        return bool(cacheable) and not missing
    return use_cached_tasks


def _with_split(provider: Provider, split: str) -> list[seqio.Task]:
    return [task for task in seqio.get_subtasks(provider) if split in task.splits]


def _check_integers(**least: tuple[Any, int]) -> None:
    for name, (value, minimum) in least.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < minimum:
            raise ValueError(f"{name}: expected an integer of at least {minimum}, got {value!r}")


def _rows(batch_size: int, shard: tuple[int, int]) -> slice:
    """This host's rows of a batch over all hosts."""
    index, count = shard
    _check_integers(batch_size=(batch_size, 1))
    if not 0 <= index < count:
        raise ValueError(f"shard: expected (index, count) with 0 <= index < count, got {shard}")
    if batch_size % count:
        raise ValueError(f"batch_size: {batch_size} rows cannot be divided among {count} hosts")
    size = batch_size // count
    return slice(index * size, (index + 1) * size)


# Datasets


def _task_features(provider: Provider, lengths: dict[str, int], **options) -> tf.data.Dataset:
    """Examples of "inputs" and "targets" in an order that depends on the options only."""
    try:
        return provider.get_dataset(lengths, **options).with_options(_options())
    except ValueError as error:
        raise ValueError(f"{provider.name!r} with task_feature_lengths={lengths}: {error}") from error


def _converted(provider: Provider, lengths: dict[str, int], *, pack: bool, **options) -> tf.data.Dataset:
    """Rows of model features."""
    return seqio.EncDecFeatureConverter(pack=pack)(_task_features(provider, lengths, **options), lengths)


def _options() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = True
    return options


def _fingerprints(provider: Provider, lengths: dict[str, int], split: str, cached: bool, seed: int) -> dict[str, str]:
    key = tuple(lengths.items())
    return {task.name: _fingerprint(task, key, split, cached, seed) for task in _with_split(provider, split)}


@functools.lru_cache(maxsize=64)
def _fingerprint(task: seqio.Task, lengths: tuple[tuple[str, int], ...], split: str, cached: bool, seed: int) -> str:
    """A hash of a task's first examples: it differs where text or vocabulary do. Raises where there is none."""
    options = {"split": split, "use_cached": cached, "shuffle": False, "seed": seed, "num_epochs": 1}
    dataset = _task_features(task, dict(lengths), **options)
    digest, count = hashlib.sha256(), 0
    for count, example in enumerate(dataset.take(32).as_numpy_iterator(), start=1):
        for name in FEATURES:
            digest.update(example[name].tobytes() + b";")
    if not count:
        raise ValueError(f"split: {split!r} of {task.name!r} has no examples")
    return digest.hexdigest()[:16]


# Packages


def check_packages() -> None:
    """Raises ImportError where a nightly package, which t5 asks for, lies on top of the stable one of the same name."""
    for module, stable, nightly in ((seqio, "seqio", "seqio-nightly"), (tfds, "tensorflow-datasets", "tfds-nightly")):
        try:
            expected = importlib.metadata.version(stable)
        except importlib.metadata.PackageNotFoundError:
            expected = None
        if module.__version__ != expected:
            raise ImportError(
                f"the {module.__name__} that was imported is {module.__version__}, but {stable} is "
                f"{expected or 'not installed'}: {nightly} lies on top of it. Repair: "
                "pip install --force-reinstall --no-deps seqio tensorflow-datasets"
            )


def _keep_off_accelerators() -> None:
    """TensorFlow takes all memory of the accelerators that it sees, and JAX then gets none."""
    for kind in ("GPU", "TPU"):
        try:
            tf.config.set_visible_devices([], kind)
        except RuntimeError as error:  # TensorFlow has run already: too late to hide anything
            if tf.config.get_visible_devices(kind):
                raise RuntimeError(f"TensorFlow holds {kind}s; import synthesizer_jax.data before using it") from error


check_packages()
_keep_off_accelerators()
