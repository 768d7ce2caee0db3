"""Batches of numpy arrays, with a state from which a new process goes on exactly."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from synthesizer_jax.data import state as states
from synthesizer_jax.data.converters import model_dataset
from synthesizer_jax.data.examples import fingerprints, ordered, task_dataset
from synthesizer_jax.data.providers import (
    check_features,
    check_integers,
    check_lengths,
    check_packing,
    check_shards,
    check_split,
    get_mixture_or_task,
    use_cache,
    with_split,
)
from synthesizer_jax.data.streams import check_streams, stream_dataset
from synthesizer_jax.models.batch import ENCODER_DECODER, BatchKeys

Batch = dict[str, np.ndarray]


def settings(
    mixture_or_task_name: str,
    task_feature_lengths: Mapping[str, int],
    batch_size: int,
    keys: BatchKeys,
    *,
    split: str,
    use_cached_tasks: bool | None,
    seed: int,
    pack: bool,
    shuffle: bool,
    num_epochs: int | None,
    shards: int,
) -> dict[str, Any]:
    """What the batches of `TrainBatches` depend on besides the examples: no state fits other settings."""
    provider = get_mixture_or_task(mixture_or_task_name)
    return {
        "mixture_or_task_name": mixture_or_task_name,
        "task_feature_lengths": {name: int(task_feature_lengths[name]) for name in keys.task_features},  # of this model
        "batch_size": batch_size,
        "split": split,
        "use_cached_tasks": use_cache(provider, use_cached_tasks, split),
        "seed": seed,
        "pack": pack,
        "shuffle": shuffle,
        "num_epochs": num_epochs,
        "shards": shards,
        "seqio": seqio.__version__,
        "tensorflow": tf.__version__,
    }


def check_settings(state: bytes, given: Mapping[str, Any]) -> None:
    """ValueError where a state of `TrainBatches` belongs to other settings, or examples where these are given."""
    saved = {name: value for name, value in states.identity(state).items() if name != "started"}
    if "examples" not in given:
        saved.pop("examples", None)
    differing = [
        f"{name} {saved.get(name)!r} then, {given.get(name)!r} now"
        for name in dict.fromkeys([*given, *saved])
        if saved.get(name) != given.get(name)
    ]
    if differing:
        raise ValueError(
            f"data: the checkpoint was saved with other batches: {'; '.join(differing)}. Use what was used then, or start "
            "the data anew from the saved parameters (INITIAL_CHECKPOINT_PATH)"
        )


class TrainBatches:
    """Batches without end (or for `num_epochs`), the same ones for the same arguments, on every run.

    A batch is `batch_size` rows over all hosts; this host's rows come out. They are made by `shards` streams, each with
    its part of the examples, its own order, mixing and packing, and batch_size / shards rows of each batch. A host runs
    the streams whose rows it needs: where shards is a multiple of the hosts, none runs twice. So batches depend on
    `shards`, never on the number of hosts.

    With `num_epochs` the rows that do not fill the last batch are left out: those of a stream, where the first stream
    that ends is the end of all. Parts differ by an example or by the sizes of files, and packed rows by what fits, so
    that with several shards a few rows of each are left out, more where files are of unequal size. Without `num_epochs`
    examples come again and again, so a small split needs no special care.

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
      shards: the number of streams; divides batch_size.
      shard: (index of this host, number of hosts).

    Raises: ValueError where a name, split, length or size is wrong, where the split has no example, or too few for the
      shards; FileNotFoundError where the data is not there.
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
        shards: int = 1,
        shard: tuple[int, int] = (0, 1),
    ):
        provider = get_mixture_or_task(mixture_or_task_name)
        check_lengths(task_feature_lengths, keys)
        check_packing(keys, pack)
        check_features(provider, keys)
        check_split(provider, split)
        self._rows = _rows_of_streams(batch_size, shards, shard)
        check_integers(seed=(seed, 0), num_epochs=(1 if num_epochs is None else num_epochs, 1))
        if num_epochs is not None and shards > 1 and shard[1] > 1:
            raise ValueError(
                f"num_epochs: {shards} shards on {shard[1]} hosts would end at different batches; use num_epochs=None, "
                "or shards=1"
            )
        order = {"seed": seed, "pack": pack, "shuffle": shuffle, "num_epochs": num_epochs, "shards": shards}
        source = {"use_cached_tasks": use_cached_tasks, "split": split}
        self._identity = settings(mixture_or_task_name, task_feature_lengths, batch_size, keys, **source, **order)
        cached, lengths = self._identity["use_cached_tasks"], self._identity["task_feature_lengths"]
        self._identity["examples"] = fingerprints(provider, lengths, keys, split, cached, seed)
        options = {"split": split, "use_cached": cached, "seed": seed}
        check_streams(provider, lengths, self._rows, shards, **options)

        def rows(stream):
            options_of_order = {"shuffle": shuffle, "num_epochs": num_epochs}
            examples = stream_dataset(provider, lengths, stream, shards, **options, **options_of_order)
            dataset = model_dataset(examples, lengths, keys, pack).batch(batch_size // shards, drop_remainder=True)
            return iter(dataset.prefetch(2).with_options(ordered()))

        self._iterators = {stream: rows(stream) for stream in self._rows}
        self._name = f"{split!r} of {mixture_or_task_name!r}"
        self._started, self._ended = False, False

    @property
    def divided(self) -> bool:
        """Whether hosts have streams of their own, so that a state is whole only with those of all (merge_states)."""
        return len(self._rows) < self._identity["shards"]

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        try:
            parts = [
                {name: rows.numpy()[self._rows[stream]] for name, rows in next(iterator).items()}
                for stream, iterator in self._iterators.items()
            ]
        except StopIteration:
            self._ended = True
            self._check_end()
            raise
        self._started = True
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _check_end(self):
        size, shards = self._identity["batch_size"], self._identity["shards"]
        if self._identity["num_epochs"] is None:
            raise ValueError(f"shards: a task in {self._name} has no example in one of {shards} shards; use fewer")
        if not self._started:
            divided = f", made by {shards} shards" if shards > 1 else ""
            raise ValueError(
                f"batch_size: {self._name} has fewer rows than one batch of {size}{divided}; give a smaller one, or "
                "num_epochs=None"
            )

    def state(self) -> bytes:
        """Where the iterators stand: TensorFlow's checkpoint of them and the arguments they belong to, a zip archive.

        It holds the shuffle buffers, so its size is that of some thousand examples for each stream. Of this host's
        streams; see `divided`.
        """
        return states.pack(self._identity | {"started": self._started}, self._iterators)

    def restore(self, state: bytes) -> None:
        """Goes to where `state` was taken, also in a new process, on other devices and another number of hosts.

        Raises: ValueError that names each argument, or version, that differs from when the state was taken, or the
          streams that the state lacks.
        """
        check_settings(state, self._identity)
        states.unpack(state, self._iterators)
        self._started, self._ended = states.identity(state).get("started", False), False

    def close(self) -> None:
        """Lets go of the pipelines' threads and buffers."""
        self._iterators, self._ended = {}, True

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
    cached = use_cache(provider, use_cached_tasks, split)
    lengths = {name: int(task_feature_lengths[name]) for name in keys.task_features}
    fingerprints(provider, lengths, keys, split, cached, seed)  # raises where there are no examples
    options = {"split": split, "use_cached": cached, "seed": seed, "shuffle": False, "num_epochs": 1}
    datasets = [
        model_dataset(task_dataset(task, lengths, **options), lengths, keys) for task in with_split(provider, split)
    ]
    dataset = functools.reduce(tf.data.Dataset.concatenate, datasets).batch(batch_size).with_options(ordered())
    return _padded(dataset, batch_size, rows)


def _padded(dataset: tf.data.Dataset, batch_size: int, rows: slice) -> Iterator[tuple[Batch, int]]:
    for batch in dataset.as_numpy_iterator():
        real = len(next(iter(batch.values())))
        missing = (0, batch_size - real)
        filled = {name: np.pad(ids, (missing, (0, 0))[: ids.ndim])[rows] for name, ids in batch.items()}
        yield filled, min(max(real - rows.start, 0), rows.stop - rows.start)


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


def _rows_of_streams(batch_size: int, shards: int, shard: tuple[int, int]) -> dict[int, slice]:
    """Stream -> which of its batch_size / shards rows are this host's; the streams without any are left out."""
    own = _rows(batch_size, shard)
    check_shards(batch_size, shards)
    size = batch_size // shards
    streams = range(own.start // size, -(-own.stop // size))
    return {s: slice(max(own.start - s * size, 0), min(own.stop - s * size, size)) for s in streams}
