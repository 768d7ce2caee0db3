"""Where the tasks' examples come from. What is absent is said at once, with how to get it; nothing is downloaded.

Tfds      a dataset that TensorFlow Datasets has prepared, in --tfds_data_dir or in its own default folder.
Files     files in the folder that the environment variable SYNTHESIZER_JAX_DATA names, read by a function.
Lines     the lines of such files, or of any other text files, read as they are needed: files may be larger than memory.
Examples  made by a function.

Each has `description`, and `missing(split)`: how to get what is not there, or None.
"""

import dataclasses
import functools
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import seqio
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging

ENVIRONMENT = "SYNTHESIZER_JAX_DATA"

Example = Mapping[str, Any]


def places() -> tuple:
    """Where data is looked for by now: what was read elsewhere is not to be taken for it."""
    tfds_data_dir = seqio.LazyTfdsLoader("any/dataset:1.0.0").data_dir
    return tfds_data_dir, os.environ.get(ENVIRONMENT), tuple(map(str, seqio.get_global_cache_dirs()))


class Tfds(seqio.TfdsDataSource):
    """A prepared dataset; `name` has its version: "glue/rte:2.0.0". `splits`: those of the dataset, or a mapping of names to
    splits or slices ("train[:90%]")."""

    def __init__(self, name: str, splits: Sequence[str] | Mapping[str, str]):
        splits = dict(splits) if isinstance(splits, Mapping) else {split: split for split in splits}
        super().__init__(name, splits=splits, read_only=True)
        self._name, self._slices = name, splits

    @property
    def tfds_dataset(self):
        """A new one each time: seqio's keeps the folder that it first saw, whatever is set later (in a notebook)."""
        return _Loader(self._name, split_map=self._slices, read_only=True)

    @property
    def description(self) -> str:
        return f"TFDS {self._name}"

    def missing(self, split: str) -> str | None:
        loader = self.tfds_dataset
        folder, name = loader.data_dir, self._name
        where = folder or f"{tfds.core.constants.DATA_DIR} (give another as --tfds_data_dir)"
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.ERROR)  # TFDS warns of the folder where nothing is yet
        try:
            # A builder that seqio made before there was data would not see what has been prepared since.
            builder = loader.builder if loader.is_memoized() else tfds.builder(name, data_dir=folder)
            prepared, others = builder.is_prepared(), pathlib.Path(builder.data_dir).parent.glob("[0-9]*.*")
        except (AssertionError, tfds.core.DatasetNotFoundError) as error:  # a version or name that TFDS doesn't know
            return f"no data of {name} in {where}: {str(error).splitlines()[0]}"
        finally:
            logging.set_verbosity(verbosity)
        if not prepared:
            make = f"tfds build {name}" + (f" --data_dir={folder}" if folder else "")
            versions = ", ".join(sorted(path.name for path in others))
            there = f" (there is version {versions})" if versions else ""
            return f"no data of {name} in {where}{there}; make it, where there is a network, with: {make}"
        wanted = self._slices[split].partition("[")[0]
        if wanted not in builder.info.splits:
            return f"{name} in {where} has no split {wanted!r}; it has {', '.join(builder.info.splits)}"
        return None

    def _check(self, split):
        how = self.missing(split)
        if how is not None:
            raise FileNotFoundError(how)

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        self._check(split)
        return super().get_dataset(split, shuffle, seed, shard_info)

    def num_input_examples(self, split: str) -> int | None:
        self._check(split)
        return super().num_input_examples(split)

    def list_shards(self, split: str) -> Sequence[str]:
        self._check(split)
        return super().list_shards(split)


class _Loader(seqio.LazyTfdsLoader):
    """TFDS would keep small datasets in memory, and with them in every saved state of an iterator."""

    @property
    def read_config(self) -> tfds.ReadConfig:
        return dataclasses.replace(super().read_config, try_autocache=False)


class Examples(seqio.DataSource):
    """Examples from a function of the split, all in memory. (seqio's FunctionDataSource warns whenever it shuffles.)"""

    def __init__(
        self, examples: Callable[[str], Sequence[Example]], splits: Sequence[str], description: str = "made here"
    ):
        super().__init__(splits=tuple(splits))
        # Whoever names another folder, as in a notebook, wants what is there.
        self._read_once = functools.lru_cache(maxsize=None)(lambda split, places: examples(split))
        self.description = description

    def _examples(self, split: str) -> Sequence[Example]:
        return self._read_once(split, places())

    def missing(self, split: str) -> str | None:
        return None

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return True

    def list_shards(self, split: str) -> list[str]:
        return [split]

    def num_input_examples(self, split: str) -> int:
        return len(self._examples(split))

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        examples = self._examples(split)
        columns = {name: tf.constant([example[name] for example in examples]) for name in examples[0]}
        numbers = tf.data.Dataset.range(len(examples))
        if shard_info is not None:
            numbers = numbers.shard(shard_info.num_shards, shard_info.index)
        if shuffle:  # the numbers, as a saved iterator holds what is in its shuffle buffer
            numbers = numbers.shuffle(len(examples), seed=seed, reshuffle_each_iteration=True)
        return numbers.map(lambda number: {name: column[number] for name, column in columns.items()})


class Files(Examples):
    """Examples that a function makes of files, all in memory.

    Args:
      files: split -> names below the folder of SYNTHESIZER_JAX_DATA. A split whose files are not there is missing, the
        others can be used.
      read: their paths -> examples.
      origin: where to get the files, for people.
      part: where splits share files: (split, all examples of its files) -> those of the split.
    """

    def __init__(
        self,
        files: Mapping[str, Sequence[str]],
        read: Callable[..., Iterable[Example]],
        origin: str,
        part: Callable[[str, list[Example]], Sequence[Example]] = lambda split, examples: examples,
    ):
        self._files, self._read, self._origin, self._part = files, read, origin, part
        super().__init__(self._from_files, tuple(files), _description(files))

    def missing(self, split: str) -> str | None:
        return _missing(self._files[split], self._origin)

    def _from_files(self, split):
        how = self.missing(split)
        if how is not None:
            raise FileNotFoundError(how)
        try:
            examples = self._part(split, list(self._read(*map(pathlib.Path, _paths(self._files[split])))))
        except (UnicodeDecodeError, OSError, zlib.error) as error:
            names = ", ".join(self._files[split])
            raise ValueError(f"{names}: cannot be read as text in UTF-8: {error}; {self._origin}") from error
        if not examples:
            raise ValueError(f"{', '.join(self._files[split])}: no examples in it")
        return examples


class Lines(seqio.FileDataSource):
    """{"text": line} for each line of text files (UTF-8), read as they are needed. Empty lines are left out.

    Args:
      files: split -> names or patterns ("news-*.gz") below the folder of SYNTHESIZER_JAX_DATA; a path from the root,
        or a remote one, is taken as it is. Files that end in ".gz" are unpacked.
      origin: where to get the files, for people.
      documents: whether lines up to an empty one are one text, with "\\n" between them, instead of a text each.
    """

    def __init__(self, files: Mapping[str, Sequence[str]], origin: str, documents: bool = False):
        self._files, self._origin = files, origin
        # One file after the other, as neighbouring lines belong together.
        super().__init__(functools.partial(_texts, documents=documents), files, cycle_length=1, block_length=1)

    @property
    def description(self) -> str:
        return _description(self._files)

    def missing(self, split: str) -> str | None:
        return _missing(self._files[split], self._origin)

    def list_shards(self, split: str) -> list[str]:
        how = self.missing(split)
        if how is not None:
            raise FileNotFoundError(how)
        return _paths(self._files[split])


def _texts(path: tf.Tensor, documents: bool) -> tf.data.Dataset:
    compression = tf.where(tf.strings.regex_full_match(path, r".*\.gz"), "GZIP", "")

    def cleaned(line):
        valid = tf.strings.unicode_transcode(line, "UTF-8", "UTF-8", errors="replace")
        with tf.control_dependencies([tf.debugging.Assert(valid == line, ["not UTF-8:", path, valid])]):
            return tf.strings.strip(tf.strings.regex_replace(line, "^\ufeff", ""))

    lines = tf.data.TextLineDataset(path, compression).map(cleaned, tf.data.AUTOTUNE)
    texts = _documents(lines) if documents else lines
    return texts.filter(lambda text: text != "").map(lambda text: {"text": text})


def _documents(lines: tf.data.Dataset) -> tf.data.Dataset:
    """Joined up to each empty line; "" where nothing ends."""

    def step(begun, line):
        ends, longer = line == "", tf.strings.join([begun, line], separator="\n")
        return tf.where(ends, "", tf.where(begun == "", line, longer)), tf.where(ends, begun, "")

    return lines.concatenate(tf.data.Dataset.from_tensors("")).scan("", step)


def _paths(names: Sequence[str]) -> list[str]:
    """The files that names or patterns stand for."""
    folder = os.environ.get(ENVIRONMENT, "")
    whole = [name if "://" in name else os.path.join(folder, name) for name in names]
    found = [
        path for name in whole for path in ([name] if tf.io.gfile.exists(name) else sorted(tf.io.gfile.glob(name)))
    ]
    return [path for path in found if not tf.io.gfile.isdir(path)]


def _missing(names: Sequence[str], origin: str) -> str | None:
    relative = [name for name in names if not os.path.isabs(name) and "://" not in name]
    folder = os.environ.get(ENVIRONMENT)
    if relative and folder is None:
        return f"--data_dir ({ENVIRONMENT}) is not given: the folder that has {', '.join(relative)}; {origin}"
    absent = [name for name in names if not _paths([name])]
    if absent:
        where = f" in {folder} (--data_dir, {ENVIRONMENT})" if relative else ""
        return f"no {', '.join(absent)}{where}; {origin}"
    return None


def _description(files: Mapping[str, Sequence[str]]) -> str:
    first, *others = dict.fromkeys(name for names in files.values() for name in names)
    return f"files {first}" + (f" and {len(others)} more" if others else "")


OURS = (Tfds, Examples, Lines)  # those that have `description` and `missing`
