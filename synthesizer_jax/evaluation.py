"""What a trained model says: seqio's metrics over every example of a split, and inference on tasks and text files.

Every host runs the same number of padded batches; the first one writes. Results go to
`inference_eval/<task>-<step>.jsonl` (a line per example) and `inference_eval/<task>-metrics.jsonl` (a line per
evaluation) beside the checkpoints, with TensorBoard scalars in `inference_eval/<task>/`.
"""

import functools
import hashlib
import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import seqio
from etils import epath

from synthesizer_jax import data, sharding
from synthesizer_jax.prediction import Predictor
from synthesizer_jax.training import checkpoint

PREDICTION, SCORE = seqio.metrics.ModelOutputType.PREDICTION, seqio.metrics.ModelOutputType.SCORE


def evaluate(
    *,
    checkpoint_path: str,
    mixture_or_task_name: str,
    task_feature_lengths: Mapping[str, int],
    batch_size: int = 64,
    split: str = "validation",
    output_dir: str | None = None,
    num_examples: int | None = None,
    use_cached_tasks: bool | None = None,
    random_seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """The metrics of each task that has the split, over all of its examples.

    Args:
      checkpoint_path: a checkpoint, or a model directory for its latest one; the model is read from beside it.
      mixture_or_task_name: a seqio task, or a mixture whose tasks are evaluated one by one.
      task_feature_lengths: tokens of "inputs" and "targets"; longer examples are cut, decoding stops at "targets".
      batch_size: examples in a batch; the last one is padded, the result does not depend on it.
      split: tasks of a mixture that do not have it are left out.
      output_dir: where results go; None: `inference_eval` beside the checkpoint.
      num_examples: only the first of each task; None: all.
      use_cached_tasks: None: where there is a cache.
      random_seed: of preprocessors that draw at random.

    Returns: task -> metric -> value.
    Raises: ValueError where the checkpoint, the task, its split, or what its metrics need is not there.
    """
    tasks = tasks_with_metrics(mixture_or_task_name, split)
    path = checkpoint.find(checkpoint_path)
    folder = _folder(output_dir, path.parent / "inference_eval")
    predictor = load(path, tasks, task_feature_lengths, batch_size)
    functions = {PREDICTION: predictor.predict, SCORE: predictor.score}
    results = {}
    for task in tasks:
        evaluator = seqio.Evaluator(
            task.name,
            seqio.EncDecFeatureConverter(pack=False),
            eval_split=split,
            use_cached=data.use_cache(task, use_cached_tasks),
            seed=random_seed,
            sequence_length=dict(task_feature_lengths),
            num_examples=num_examples,
            async_compute_metrics=False,
            logger_cls=(_ResultLogger,) if jax.process_index() == 0 else (),
            log_dir=str(folder),
        )
        metrics, _ = evaluator.evaluate(
            compute_metrics=True,
            step=checkpoint.step_of(path),
            model_fns={kind: functools.partial(_by_index, function) for kind, function in functions.items()},
        )
        results[task.name] = metrics.result()[task.name]
    return results


def _by_index(function, dataset) -> list[tuple[int, Any]]:
    """seqio's protocol: an enumerated dataset of model features in, (index, output) out."""
    answers = function(dataset.as_numpy_iterator(), lambda example: example[1])
    return [(index, output) for (index, _), output in answers]


def infer(
    *,
    checkpoint_path: str,
    mixture_or_task_name: str,
    task_feature_lengths: Mapping[str, int],
    batch_size: int = 64,
    split: str = "validation",
    input_file: str | None = None,
    output_dir: str | None = None,
    use_cached_tasks: bool | None = None,
    random_seed: int = 0,
) -> list[str]:
    """Writes what the model says to a split of a task, or to each line of a text file, as jsonl.

    input_file: text with one input a line, in the words that the model sees (a task's prefix included); the task then
    gives the vocabulary. output_dir: None: `inference` beside the checkpoint. The rest is as in `evaluate`.

    Returns: the files written, `<task or file name>-<step>.jsonl`; one line of {input, target, prediction} per example.
    """
    if input_file is None:
        tasks = _tasks_with_split(mixture_or_task_name, split)
        options = {"split": split, "lengths": dict(task_feature_lengths), "seed": random_seed}
        sources = {task.name: (task, _task_examples(task, use_cached_tasks, **options)) for task in tasks}
    else:
        if not epath.Path(input_file).is_file():
            raise ValueError(f"input_file: no such file: {input_file}")
        tasks = seqio.get_subtasks(data.get_mixture_or_task(mixture_or_task_name))[:1]
        examples = _file_examples(tasks[0], input_file, task_feature_lengths)
        sources = {epath.Path(input_file).stem: (tasks[0], examples)}
    path = checkpoint.find(checkpoint_path)
    folder = _folder(output_dir, path.parent / "inference")
    predictor = load(path, tasks, task_feature_lengths, batch_size)
    written = []
    for name, (task, examples) in sources.items():
        answers = predictor.predict(examples, lambda example: {"encoder_input_tokens": example["inputs"]})
        decode = task.output_features["targets"].vocabulary.decode
        results = folder / f"{_file_name(name)}-{checkpoint.step_of(path)}.jsonl"
        _write_lines(results, (_line(task, example, decode(tokens.tolist())) for example, tokens in answers))
        written.append(str(results))
    return written


def load(path: epath.PathLike, tasks: list[seqio.Task], lengths: Mapping[str, int], batch_size: int) -> Predictor:
    """The model of a checkpoint on all devices, for tasks that share a vocabulary; checked before arrays are read."""
    if batch_size < 1:
        raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
    config = checkpoint.read_config(path)
    data.check_lengths(lengths)
    for task in tasks:
        data.check_vocabulary(task.name, config.vocab_size)
    mesh = sharding.MeshShape().build()
    _, trained, fixed = checkpoint.restore_params(path, mesh)
    vocabulary = tasks[0].output_features["targets"].vocabulary
    sizes = (batch_size, lengths["inputs"], lengths["targets"], vocabulary.eos_id, vocabulary.vocab_size)
    return Predictor(config, trained, fixed, mesh, *sizes)


# Examples


def _tasks_with_split(name: str, split: str) -> list[seqio.Task]:
    provider = data.get_mixture_or_task(name)
    data.check_split(provider, split)
    return [task for task in seqio.get_subtasks(provider) if split in task.splits]


def tasks_with_metrics(name: str, split: str) -> list[seqio.Task]:
    """The tasks that `evaluate` evaluates. Raises ValueError where there are none, or where a metric cannot be had."""
    tasks = [task for task in _tasks_with_split(name, split) if task.metric_objs]
    if not tasks:
        raise ValueError(f"mixture_or_task_name: {name!r} has no metrics; use `infer` to see what a model says")
    for task in tasks:
        for metric in task.metric_objs:
            if metric.model_output_type not in (PREDICTION, SCORE):
                kind = seqio.metrics.ModelOutputType.to_str(metric.model_output_type)
                raise ValueError(
                    f"task {task.name!r}: a metric asks for {kind!r}; greedy decoding gives 'prediction' and 'score'"
                )
    return tasks


def _task_examples(task, use_cached, split, lengths, seed) -> Iterator[Mapping[str, Any]]:
    use_cached = data.use_cache(task, use_cached)
    dataset = task.get_dataset(lengths, split, use_cached=use_cached, shuffle=False, seed=seed, num_epochs=1)
    yield from dataset.as_numpy_iterator()


def _file_examples(task, path, lengths) -> Iterator[Mapping[str, Any]]:
    feature = task.output_features["inputs"]
    end = [feature.vocabulary.eos_id] if feature.add_eos else []
    with epath.Path(path).open("r") as lines:
        for line in lines:
            ids = feature.vocabulary.encode(line.rstrip("\n"))[: lengths["inputs"] - len(end)]
            yield {"inputs_pretokenized": line.rstrip("\n"), "inputs": np.asarray(ids + end, np.int32)}


def _text(task: seqio.Task, example: Mapping[str, Any], feature: str) -> str:
    text = example.get(f"{feature}_pretokenized")
    if text is None:
        return task.output_features[feature].vocabulary.decode(example[feature].tolist())
    return text.decode("utf-8") if isinstance(text, bytes) else str(text)


# Files


def _file_name(task_name: str) -> str:
    """A task's name as part of a file's name: a long one is cut, and told from others by a hash."""
    if len(task_name) <= 180:
        return task_name
    return f"{task_name[:160]}-{hashlib.sha256(task_name.encode()).hexdigest()[:16]}"


def _line(task: seqio.Task, example: Mapping[str, Any], prediction: str | None, **more: Any) -> dict[str, Any]:
    """{input, target, prediction} as text, and what the task's postprocessor makes of the last two where it does."""
    line = {"input": _text(task, example, "inputs")}
    if "targets" in example:
        line["target"] = _text(task, example, "targets")
    if prediction is None:
        return line | more
    line["prediction"] = prediction
    if "targets" in example:  # a postprocessor may look at the whole example
        made = {
            f"postprocessed_{name}": task.postprocess_fn(line[name], example=example, is_target=name == "target")
            for name in ("target", "prediction")
        }
        line |= made if any(made[f"postprocessed_{name}"] != line[name] for name in ("target", "prediction")) else {}
    return line | more


class _ResultLogger(seqio.loggers.Logger):
    """Called by seqio once per task: writes the examples, a line of metrics, and TensorBoard scalars."""

    def __init__(self, output_dir: str):
        super().__init__(output_dir)
        self._tensorboard = seqio.TensorBoardLogger(output_dir)

    def __call__(self, task_name, step, metrics, dataset, inferences, targets):
        task, folder, name = seqio.get_mixture_or_task(task_name), epath.Path(self.output_dir), _file_name(task_name)
        examples = list(dataset.as_numpy_iterator())
        nothing = itertools.repeat(None, len(examples))
        lines = (
            _line(task, example, text, **({} if score is None else {"score": score}))
            for example, text, score in zip(
                examples, inferences.get("output", nothing), inferences.get("score", nothing), strict=True
            )
        )
        _write_lines(folder / f"{name}-{step}.jsonl", lines)
        scalars = {key: value.value for key, value in metrics.items() if isinstance(value, seqio.metrics.Scalar)}
        log = folder / f"{name}-metrics.jsonl"
        before = log.read_text().splitlines() if log.exists() else []
        _write_lines(log, [*map(json.loads, before), {"step": step} | scalars])
        self._tensorboard(name, step, metrics, dataset, inferences, targets)


def _write_lines(path: epath.Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Whole or not at all. Every host runs through the lines, because that computes them; the first one writes."""
    encoded = (json.dumps(line, cls=seqio.loggers.TensorAndNumpyEncoder, ensure_ascii=False) + "\n" for line in lines)
    if jax.process_index() != 0:
        return deque(encoded, maxlen=0) and None
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.writelines(encoded)
    partial.replace(path)


def _folder(given: str | None, otherwise: epath.Path) -> epath.Path:
    folder = epath.Path(given or otherwise)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output_dir: cannot write to {folder}: {error.strerror or error}") from error
    return folder
