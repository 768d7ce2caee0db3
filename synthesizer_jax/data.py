"""From a seqio task or mixture to batches of numpy arrays, with a state from which a new process goes on exactly.

Keys are seqio's, and models/batch.py has those of each kind of model: encoder_input_tokens, decoder_input_tokens,
decoder_target_tokens, decoder_loss_weights and, where examples are packed, {encoder,decoder}_segment_ids (1, 2, ...; 0 is
padding) and {encoder,decoder}_positions (within the example), int32 [rows, length]; labels and loss_weights, int32 [rows].

What a task has: for an encoder-decoder the features "inputs" and "targets", token ids both; for a language model
"targets" alone; for a classifier "inputs", and "targets" that is one class id, int32 [1], whose vocabulary has as many
entries as there are classes (tasks/labels.py, or seqio.PassThroughVocabulary), without an end-of-sequence id.

**Hosts.** Every host runs the whole pipeline and keeps its rows of each batch. So batches, losses and states do not
depend on the number of hosts, and a run continues on another number of them. The price is reading everything on each
host; where that is too slow, cache the tasks.

Importing this module takes seconds (TensorFlow, seqio); the core does not.
"""

import difflib
import functools
import hashlib
import importlib
import importlib.metadata
import io
import json
import pathlib
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from synthesizer_jax import tasks
from synthesizer_jax.models.batch import DECODER_ONLY, ENCODER_DECODER, ENCODER_ONLY, BatchKeys
from synthesizer_jax.models.config import EncoderOnlyConfig, ModelConfig

TARGETS = "targets"
Batch = dict[str, np.ndarray]
Provider = seqio.Task | seqio.Mixture


class TrainBatches:
    """Batches without end (or for `num_epochs`), the same ones for the same arguments, on every run.

    A batch is `batch_size` rows over all hosts; this host's rows come out. With `num_epochs` the rows that do not fill
    the last batch are left out; without, examples come again and again, so a small split needs no special care.

    Args:
      mixture_or_task_name: a name registered with seqio; import its module first.
      task_feature_lengths: tokens of a row, {"inputs": ..., "targets": ...}, those that `keys` names; longer examples
        are cut.
      batch_size: rows of a batch, over all hosts.
      keys: what the kind of model reads, such as config.batch.
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
        keys: BatchKeys = ENCODER_DECODER,
        split: str = "train",
        seed: int = 0,
        pack: bool = True,
        shuffle: bool = True,
        use_cached_tasks: bool | None = None,
        num_epochs: int | None = None,
        shard: tuple[int, int] = (0, 1),
    ):
        provider = get_mixture_or_task(mixture_or_task_name)
        check_lengths(task_feature_lengths, keys)
        check_packing(keys, pack)
        check_features(provider, keys)
        check_split(provider, split)
        self._rows = _rows(batch_size, shard)
        _check_integers(seed=(seed, 0), num_epochs=(1 if num_epochs is None else num_epochs, 1))
        cached = use_cache(provider, use_cached_tasks)
        lengths = {name: int(task_feature_lengths[name]) for name in keys.task_features}  # they tell the kind of model
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
            "examples": _fingerprints(provider, lengths, keys, split, cached, seed),
            "seqio": seqio.__version__,
            "tensorflow": tf.__version__,
        }
        options = {"split": split, "use_cached": cached, "seed": seed, "shuffle": shuffle, "num_epochs": num_epochs}
        dataset = _converted(provider, lengths, keys, pack=pack, **options)
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
    keys: BatchKeys = ENCODER_DECODER,
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
    check_lengths(task_feature_lengths, keys)
    check_features(provider, keys)
    check_split(provider, split)
    rows = _rows(batch_size, shard)
    cached = use_cache(provider, use_cached_tasks)
    lengths = {name: int(task_feature_lengths[name]) for name in keys.task_features}
    _fingerprints(provider, lengths, keys, split, cached, seed)  # raises where there are no examples
    options = {"split": split, "use_cached": cached, "seed": seed, "shuffle": False, "num_epochs": 1, "pack": False}
    datasets = [_converted(task, lengths, keys, **options) for task in _with_split(provider, split)]
    dataset = functools.reduce(tf.data.Dataset.concatenate, datasets).batch(batch_size).with_options(_options())
    return _padded(dataset, batch_size, rows)


def _padded(dataset: tf.data.Dataset, batch_size: int, rows: slice) -> Iterator[tuple[Batch, int]]:
    for batch in dataset.as_numpy_iterator():
        real = len(next(iter(batch.values())))
        missing = (0, batch_size - real)
        filled = {name: np.pad(ids, (missing, (0, 0))[: ids.ndim])[rows] for name, ids in batch.items()}
        yield filled, min(max(real - rows.start, 0), rows.stop - rows.start)


# Names, splits, lengths, vocabularies, caches


def get_mixture_or_task(name: str | Provider) -> Provider:
    """What is registered under a name; the module of a shipped task is imported. Raises ValueError with near misses."""
    if isinstance(name, Provider):
        return name
    registered = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
    shipped = {known: module for module, names in tasks.CONTENTS.items() for known in names}
    if name in shipped and name not in registered:
        importlib.import_module(shipped[name])
        return seqio.get_mixture_or_task(name)
    if name in registered:
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
    _check_integers(**{f'task_feature_lengths["{n}"]': (task_feature_lengths[n], 1) for n in keys.task_features})


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
    """Raises ValueError, with the splits that there are, where no task has this one."""
    provider = get_mixture_or_task(mixture_or_task)
    if not _with_split(provider, split):
        splits = sorted({known for task in seqio.get_subtasks(provider) for known in task.splits})
        raise ValueError(f"split: {provider.name!r} has no split {split!r}; it has {', '.join(splits)}")


def output_vocabulary(mixture_or_task: str | Provider, feature: str = TARGETS) -> seqio.Vocabulary:
    """The vocabulary of a feature: `.vocab_size` counts its sentinels, `.decode(ids)` gives text."""
    provider = get_mixture_or_task(mixture_or_task)
    if feature not in provider.output_features:
        known = ", ".join(provider.output_features)
        raise ValueError(f"feature: {provider.name!r} has no feature {feature!r}; it has {known}")
    return provider.output_features[feature].vocabulary


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


class LabelFeatureConverter(seqio.FeatureConverter):
    """For classifiers: an example's "inputs" and its class id to encoder_input_tokens, labels and loss_weights.

    {"inputs": [7, 8, 1], "targets": [2]} with {"inputs": 4, "targets": 1} gives
    {"encoder_input_tokens": [7, 8, 1, 0], "labels": 2, "loss_weights": 1}.
    """

    TASK_FEATURES = {
        "inputs": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32),
        TARGETS: seqio.FeatureConverter.FeatureSpec(dtype=tf.int32),
    }
    MODEL_FEATURES = {
        "encoder_input_tokens": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32),
        "labels": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32, rank=0),
        "loss_weights": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32, rank=0),
    }
    PACKING_FEATURE_DTYPES = None  # seqio refuses to pack then

    def _convert_features(self, ds, task_feature_lengths):
        def convert(example):
            label = tf.reshape(tf.ensure_shape(example[TARGETS], [1]), [])
            weight = tf.ones([], tf.int32)
            return {"encoder_input_tokens": example["inputs"], "labels": label, "loss_weights": weight}

        return self._pack_or_pad(ds, {"inputs": task_feature_lengths["inputs"]}).map(convert, tf.data.AUTOTUNE)

    def get_model_feature_lengths(self, task_feature_lengths):
        return {"encoder_input_tokens": task_feature_lengths["inputs"], "labels": 1, "loss_weights": 1}


_CONVERTERS = {
    ENCODER_DECODER: seqio.EncDecFeatureConverter,
    DECODER_ONLY: seqio.LMFeatureConverter,
    ENCODER_ONLY: LabelFeatureConverter,
}


def feature_converter(keys: BatchKeys, pack: bool = False) -> seqio.FeatureConverter:
    """From the task's features to those of a kind of model."""
    return _CONVERTERS[keys](pack=pack)


def task_dataset(mixture_or_task: str | Provider, lengths: Mapping[str, int], **options) -> tf.data.Dataset:
    """Examples with the task's features in an order that depends on the options only, those of seqio's get_dataset."""
    provider = get_mixture_or_task(mixture_or_task)
    try:
        # seqio would keep small sources in memory, and with them in every saved state of an iterator.
        return provider.get_dataset(dict(lengths), try_in_mem_cache=False, **options).with_options(_options())
    except ValueError as error:
        raise ValueError(f"{provider.name!r} with task_feature_lengths={dict(lengths)}: {error}") from error


def model_dataset(
    dataset: tf.data.Dataset, lengths: Mapping[str, int], keys: BatchKeys, pack: bool = False
) -> tf.data.Dataset:
    """Rows of model features from examples with the task's features."""
    whole = dict(lengths) | ({TARGETS: 1} if keys == ENCODER_ONLY else {})  # a label is never cut, nor padded
    return feature_converter(keys, pack)(dataset, whole)


def _converted(provider, lengths, keys, *, pack, **options):
    return model_dataset(task_dataset(provider, lengths, **options), lengths, keys, pack)


def _options() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = True
    return options


def _fingerprints(provider, lengths, keys, split, cached, seed) -> dict[str, str]:
    key = tuple(lengths.items())
    return {task.name: _fingerprint(task, key, keys, split, cached, seed) for task in _with_split(provider, split)}


@functools.lru_cache(maxsize=64)
def _fingerprint(
    task: seqio.Task, lengths: tuple[tuple[str, int], ...], keys: BatchKeys, split: str, cached: bool, seed: int
) -> str:
    """A hash of a task's first examples: it differs where text or vocabulary do. Raises where there is none."""
    options = {"split": split, "use_cached": cached, "shuffle": False, "seed": seed, "num_epochs": 1}
    dataset = task_dataset(task, dict(lengths), **options)
    digest, count = hashlib.sha256(), 0
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
