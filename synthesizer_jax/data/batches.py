"""Batches of numpy arrays, with a state from which a new process goes on exactly."""

import functools
import io
import json
import pathlib
import tempfile
import zipfile
from collections.abc import Iterator, Mapping

import numpy as np
import seqio
import tensorflow as tf

from synthesizer_jax.data.converters import model_dataset
from synthesizer_jax.data.examples import fingerprints, ordered, task_dataset
from synthesizer_jax.data.providers import (
    check_features,
    check_integers,
    check_lengths,
    check_packing,
    check_split,
    get_mixture_or_task,
    use_cache,
    with_split,
)
from synthesizer_jax.models.batch import ENCODER_DECODER, BatchKeys

Batch = dict[str, np.ndarray]


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
        check_integers(seed=(seed, 0), num_epochs=(1 if num_epochs is None else num_epochs, 1))
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
            "examples": fingerprints(provider, lengths, keys, split, cached, seed),
            "seqio": seqio.__version__,
            "tensorflow": tf.__version__,
        }
        options = {"split": split, "use_cached": cached, "seed": seed, "shuffle": shuffle, "num_epochs": num_epochs}
        dataset = _converted(provider, lengths, keys, pack=pack, **options)
        dataset = dataset.batch(batch_size, drop_remainder=True).prefetch(2).with_options(ordered())
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
    fingerprints(provider, lengths, keys, split, cached, seed)  # raises where there are no examples
    options = {"split": split, "use_cached": cached, "seed": seed, "shuffle": False, "num_epochs": 1, "pack": False}
    datasets = [_converted(task, lengths, keys, **options) for task in with_split(provider, split)]
    dataset = functools.reduce(tf.data.Dataset.concatenate, datasets).batch(batch_size).with_options(ordered())
    return _padded(dataset, batch_size, rows)


def _padded(dataset: tf.data.Dataset, batch_size: int, rows: slice) -> Iterator[tuple[Batch, int]]:
    for batch in dataset.as_numpy_iterator():
        real = len(next(iter(batch.values())))
        missing = (0, batch_size - real)
        filled = {name: np.pad(ids, (missing, (0, 0))[: ids.ndim])[rows] for name, ids in batch.items()}
        yield filled, min(max(real - rows.start, 0), rows.stop - rows.start)


def _converted(provider, lengths, keys, *, pack, **options):
    return model_dataset(task_dataset(provider, lengths, **options), lengths, keys, pack)


def _rows(batch_size: int, shard: tuple[int, int]) -> slice:
    """This host's rows of a batch over all hosts."""
    index, count = shard
    check_integers(batch_size=(batch_size, 1))
    if not 0 <= index < count:
        raise ValueError(f"shard: expected (index, count) with 0 <= index < count, got {shard}")
    if batch_size % count:
        raise ValueError(f"batch_size: {batch_size} rows cannot be divided among {count} hosts")
    size = batch_size // count
    return slice(index * size, (index + 1) * size)
