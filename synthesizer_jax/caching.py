"""Tasks tokenised once and for all: the `cache` command, with seqio's Beam transforms.

A cache is a folder `<output_cache_dir>/<task>` that seqio reads for training and evaluation in the task's place, up to its
CacheDatasetPlaceholder. It is whole when the file COMPLETED is in it, which is written last.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence

import seqio
import tensorflow as tf

from synthesizer_jax import data

DIRECT = "--runner=DirectRunner"
COMPLETED = "COMPLETED"
MOST_SHARDS = 64


@dataclasses.dataclass(frozen=True)
class Cached:
    """What was made of a task."""

    name: str
    folder: str
    examples: Mapping[str, int]  # split -> examples that are cached
    left_out: Mapping[str, str]  # split -> how to get its data
    made: bool = True  # False: it was there already


def cache(
    names: Sequence[str],
    output_cache_dir: str,
    *,
    splits: Sequence[str] | None = None,
    num_shards: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
    pipeline_options: Sequence[str] = (DIRECT,),
    modules: Sequence[str] = (),
    tfds_data_dir: str | None = None,
) -> list[Cached]:
    """Caches tasks, and of mixtures every task.

    Args:
      names: of tasks and mixtures.
      output_cache_dir: a folder, local or of a file system that TensorFlow knows.
      splits: which ones; None: all whose data is there.
      num_shards: files of a split; more of them shuffle better in training. None: one for each 100 rows, at most 64.
      seed: of preprocessors that draw at random before the cache.
      overwrite: whether a cache that is there is made again; otherwise it stays as it is.
      pipeline_options: of Beam, such as "--runner=DataflowRunner". Its workers need this package, the modules, and the
        environment variables that vocabulary and data are found by.
      modules: imported by Beam's workers, which have to know the tasks.
      tfds_data_dir: where the workers find TFDS's data.

    Raises: ValueError before anything runs where a name, split or number is wrong or a task can't be cached,
      FileNotFoundError where data is missing, ImportError without Beam.
    """
    if not names:
        raise ValueError("cache: name a task or mixture; `tasks` lists them")
    if num_shards is not None and num_shards < 1:
        raise ValueError(f"num_shards: expected at least 1, got {num_shards}")
    if not output_cache_dir:
        raise ValueError("output_cache_dir: expected a folder, got ''")
    providers = [data.get_mixture_or_task(name) for name in names]
    found = {task.name: task for provider in providers for task in seqio.get_subtasks(provider)}
    plans = {task: _plan(task, splits) for task in found.values()}  # all of them before the first one runs
    results = []
    for task, (there, left_out) in plans.items():
        folder = os.path.join(output_cache_dir, seqio.get_task_dir_from_name(task.name))
        todo = _todo(task, folder, there, overwrite)
        if todo:
            _run(task, todo, folder, num_shards, seed, pipeline_options, modules, tfds_data_dir)
        results.append(Cached(task.name, folder, _examples(folder, task, there), left_out, made=bool(todo)))
    return results


def _todo(task: seqio.Task, folder: str, splits: Sequence[str], overwrite: bool) -> list[str]:
    """The splits that are to be made. What is in their way, and all that an interrupted run has left, is removed."""
    if not tf.io.gfile.exists(folder):
        return list(splits)
    if not tf.io.gfile.exists(os.path.join(folder, COMPLETED)):
        tf.io.gfile.rmtree(folder)
        return list(splits)
    if not overwrite:
        data.check_cache(task, folder)  # splits of one vocabulary only
    todo = [s for s in splits if overwrite or not tf.io.gfile.exists(seqio.get_cached_info_path(folder, s))]
    if todo:
        tf.io.gfile.remove(os.path.join(folder, COMPLETED))
    for split in todo:
        for path in tf.io.gfile.glob(seqio.get_cached_tfrecord_prefix(folder, split) + "*"):
            tf.io.gfile.remove(path)
    return todo


def _plan(task: seqio.Task, wanted: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """The splits to cache, and how to get those that are left out."""
    if not task.supports_caching:
        raise ValueError(
            f"{task.name!r} cannot be cached: it has no seqio.CacheDatasetPlaceholder among its preprocessors"
        )
    data.load_vocabularies(task)
    for split in wanted or ():
        data.check_split(task, split)  # its data too
    missing = {split: how for split in wanted or task.splits if (how := data.how_to_get(task, split)) is not None}
    there = [split for split in wanted or task.splits if split not in missing]
    if missing and (wanted or not there):
        raise FileNotFoundError("; ".join(dict.fromkeys(missing.values())))
    return there, missing


def _run(task, splits, folder, num_shards, seed, pipeline_options, modules, tfds_data_dir):
    try:
        import apache_beam as beam
        from seqio import beam_utils
    except ImportError as error:
        raise ImportError(f"caching needs Apache Beam: pip install 'synthesizer_jax[cache]' ({error})") from error
    try:
        tf.io.gfile.makedirs(folder)
    except tf.errors.OpError as error:
        raise OSError(f"output_cache_dir: cannot write to {folder}: {error.message}") from error
    options = beam.options.pipeline_options.PipelineOptions(list(pipeline_options))
    with beam.Pipeline(options=options) as pipeline:
        written = []
        for split in splits:
            source = beam_utils.PreprocessTask(
                task, split, preprocessors_seed=seed, modules_to_import=tuple(modules), tfds_data_dir=tfds_data_dir
            )
            # The shuffle goes over all examples: those of a shard would otherwise stay together.
            examples = pipeline | f"read {split}" >> source | f"shuffle {split}" >> beam.Reshuffle()
            files = _shards(task, split) if num_shards is None else num_shards
            info = examples | f"describe {split}" >> beam_utils.GetInfo(files)
            stats = examples | f"count {split}" >> beam_utils.GetStats(task.output_features)
            records = beam_utils.WriteExampleTfRecord(seqio.get_cached_tfrecord_prefix(folder, split), files)
            written += [
                examples | f"write {split}" >> records,
                info | f"write info {split}" >> beam_utils.WriteJson(seqio.get_cached_info_path(folder, split)),
                stats | f"write stats {split}" >> beam_utils.WriteJson(seqio.get_cached_stats_path(folder, split)),
            ]
    with tf.io.gfile.GFile(os.path.join(folder, data.VOCABULARIES), "w") as file:
        json.dump(data.vocabulary_fingerprints(task), file)
    with tf.io.gfile.GFile(os.path.join(folder, COMPLETED), "w") as file:
        file.write("")


def _shards(task: seqio.Task, split: str) -> int:
    rows = task.num_input_examples(split)
    return MOST_SHARDS if rows is None else int(min(MOST_SHARDS, max(1, rows // 100)))


def _examples(folder, task, splits):
    counts = {}
    for split in splits:
        with tf.io.gfile.GFile(seqio.get_cached_stats_path(folder, split)) as file:
            counts[split] = json.load(file)["examples"]
    return counts
