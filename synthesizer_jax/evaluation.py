"""What a trained model says: metrics over every example of a split, and inference on tasks and text files.

Metrics are those of the seqio task. A language model has perplexity besides: exp of the mean of - log p(target token),
each token of each example (cut to its length) counting once; so has an encoder-decoder, given the inputs and the tokens
before, on a task without metrics, such as span corruption. A classifier of a task without metrics has accuracy in %.
Texts among a task's metrics, such as BLEU's signature, stand with the numbers.

Every host runs the same number of padded batches; the first one writes. Results go to
`inference_eval/<task>-<step>.jsonl` (a line per example) and `inference_eval/<task>-metrics.jsonl` (a line per
evaluation) beside the checkpoints, with TensorBoard scalars in `inference_eval/<task>/`.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import seqio
import tensorflow as tf
from etils import epath

from synthesizer_jax import data, sharding
from synthesizer_jax.models.batch import DECODER_ONLY, ENCODER_DECODER, ENCODER_ONLY, BatchKeys
from synthesizer_jax.prediction import PROMPT, Predictor
from synthesizer_jax.training import checkpoint, hosts
from synthesizer_jax.training.logging import say

VALIDATION = "validation"  # the split whose results have the task's name alone
NO_LABELS = {b"<unk>", b"-1.0"}  # targets of a split whose labels are kept secret, as T5 writes them
PREDICTION, SCORE = seqio.metrics.ModelOutputType.PREDICTION, seqio.metrics.ModelOutputType.SCORE
_GIVEN = {  # what metrics can ask of a model
    ENCODER_DECODER: ((PREDICTION, SCORE), "greedy decoding gives 'prediction' and 'score'"),
    DECODER_ONLY: ((SCORE,), "a language model, which has no inputs to answer, gives 'score'"),
    ENCODER_ONLY: ((PREDICTION, SCORE), "a classifier gives 'prediction' and 'score'"),
}


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
    mesh: sharding.MeshShape | None = None,
    rules: sharding.Rules | None = None,
) -> dict[str, dict[str, Any]]:
    """The metrics of each task that has the split, over all of its examples.

    Args:
      checkpoint_path: a checkpoint, or a model directory for its latest one; the model is read from beside it.
      mixture_or_task_name: a seqio task, or a mixture whose tasks are evaluated one by one.
      task_feature_lengths: tokens of "inputs" and "targets"; longer examples are cut, decoding stops at "targets". A
        language model has "targets" alone, a classifier "inputs".
      batch_size: examples in a batch; the last one is padded, the result does not depend on it.
      split: tasks of a mixture that do not have it are left out.
      output_dir: where results go; None: `inference_eval` beside the checkpoint.
      num_examples: only the first of each task; None: all.
      use_cached_tasks: None: where there is a cache.
      random_seed: of preprocessors that draw at random.
      mesh: how the devices are arranged; None: each holds the whole model.
      rules: where arrays are split over the mesh in another way than sharding.RULES says.

    Returns: task -> metric -> value.
    Raises: ValueError where the checkpoint, the task, its split, its labels, or what its metrics need is not there.
    """
    hosts.check_same(locals())
    path = checkpoint.find(checkpoint_path)
    keys = checkpoint.read_config(path).batch
    tasks = tasks_with_metrics(mixture_or_task_name, split, keys)
    folder = _folder(output_dir, path.parent / "inference_eval")
    of_data = {"split": split, "use_cached_tasks": use_cached_tasks, "seed": random_seed}
    tasks = _labelled(tasks, task_feature_lengths, **of_data)
    on_mesh = {"mesh": mesh, "rules": rules}
    path, predictor = checkpoint.use(
        checkpoint_path, lambda found: load(found, tasks, task_feature_lengths, batch_size, **on_mesh)
    )
    for cut in (cut for task in tasks for cut in data.cut_examples(task, task_feature_lengths, **of_data)):
        say(cut)
    results = {}
    for task in tasks:
        options = {"split": split, "use_cached": data.use_cache(task, use_cached_tasks, split), "seed": random_seed}
        split_of_task = _Split(task, keys, dict(task_feature_lengths), num_examples, options)
        own, functions = _own_metrics(split_of_task, predictor)
        logger = functools.partial(_ResultLogger, own=own, split=split)
        step = checkpoint.step_of(path)
        if task.metric_objs:
            evaluator = split_of_task.evaluator((logger,) if jax.process_index() == 0 else (), folder)
            computed, _ = evaluator.evaluate(compute_metrics=True, step=step, model_fns=functions)
            results[task.name] = own.metrics | _plain(computed.result()[task.name])
        else:
            if jax.process_index() == 0:
                logger(str(folder))(task.name, step, {}, split_of_task.examples(), {}, None)
            results[task.name] = own.metrics
    return results


def _labelled(tasks: list[seqio.Task], lengths, split, use_cached_tasks, seed) -> list[seqio.Task]:
    """Those whose split has labels. T5's placeholders for none, and a wrong answer, are the same to T5's metrics."""
    options = {"split": split, "seed": seed, "shuffle": False, "num_epochs": 1}

    def has_labels(task):
        if not task.metric_objs:
            return True
        examples = data.task_dataset(
            task, lengths, use_cached=data.use_cache(task, use_cached_tasks, split), **options
        ).take(32)
        texts = {example.get("targets_pretokenized") for example in examples.as_numpy_iterator()}
        return not texts or not texts <= NO_LABELS

    without = [task.name for task in tasks if not has_labels(task)]
    if len(without) == len(tasks):
        raise ValueError(
            f"split: {split!r} of {', '.join(without)} has no labels to compare answers with; `infer` writes the answers"
        )
    if without:
        say(f"left out, as their split {split!r} has no labels: {', '.join(without)}")
    return [task for task in tasks if task.name not in without]


@dataclasses.dataclass(frozen=True)
class _Split:
    """The examples of one task that are evaluated."""

    task: seqio.Task
    keys: BatchKeys
    lengths: Mapping[str, int]
    num_examples: int | None
    options: Mapping[str, Any]  # of seqio's get_dataset

    def examples(self) -> tf.data.Dataset:
        """With the task's features."""
        dataset = data.task_dataset(self.task, self.lengths, shuffle=False, num_epochs=1, **self.options)
        return dataset if self.num_examples is None else dataset.take(self.num_examples)

    def enumerated(self) -> tf.data.Dataset:
        """With the model's features, numbered."""
        return data.model_dataset(self.examples(), self.lengths, self.keys).enumerate()

    def evaluator(self, logger_cls, folder) -> seqio.Evaluator:
        return seqio.Evaluator(
            self.task.name,
            data.feature_converter(self.keys),
            eval_split=self.options["split"],
            use_cached=self.options["use_cached"],
            seed=self.options["seed"],
            sequence_length=dict(self.lengths),
            num_examples=self.num_examples,
            async_compute_metrics=False,
            logger_cls=logger_cls,
            log_dir=str(folder),
        )


@dataclasses.dataclass(frozen=True)
class _Own:
    """Metrics that do not come from the task, and what was inferred for them, under seqio's names."""

    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    inferences: Mapping[str, list[Any]] = dataclasses.field(default_factory=dict)


def _own_metrics(examples: _Split, predictor: Predictor) -> tuple[_Own, dict[int, Callable]]:
    """The model's own metrics, and the functions that give seqio's metrics what they ask for."""
    kinds = {PREDICTION: predictor.predict, SCORE: predictor.score}
    functions = {kind: functools.partial(_by_index, function) for kind, function in kinds.items()}
    if examples.keys == DECODER_ONLY or (examples.keys == ENCODER_DECODER and not examples.task.metric_objs):
        answers = list(_answers(predictor.score, examples.enumerated()))
        scores = [(index, score) for index, score, _ in answers]
        tokens = sum(int(example["decoder_loss_weights"].sum()) for _, _, example in answers)
        return _perplexity([float(score) for _, score in scores], tokens), {SCORE: lambda dataset: scores}
    if examples.keys == ENCODER_ONLY and not examples.task.metric_objs:
        return _accuracy(examples.task, _answers(predictor.predict, examples.enumerated())), functions
    return _Own(), functions


def _perplexity(scores: list[float], tokens: int) -> _Own:
    nats = -math.fsum(scores) / tokens
    return _Own({"loss": nats, "perplexity": float(np.exp(nats)), "target_tokens": tokens}, {"score": scores})


def _accuracy(task: seqio.Task, answers: Iterable[tuple[int, np.ndarray, Mapping[str, np.ndarray]]]) -> _Own:
    pairs = [(int(ids[0]), int(example["labels"])) for _, ids, example in answers]
    percent = 100 * float(np.mean([said == label for said, label in pairs]))
    vocabulary = task.output_features[data.TARGETS].vocabulary
    return _Own({"accuracy": percent}, {"output": [_decoded(vocabulary, [said]) for said, _ in pairs]})


def _answers(function, dataset) -> Iterator[tuple[int, Any, Mapping[str, np.ndarray]]]:
    """(index, output, example) of an enumerated dataset of model features."""
    for (index, example), output in function(dataset.as_numpy_iterator(), lambda numbered: numbered[1]):
        yield int(index), output, example


def _by_index(function, dataset) -> list[tuple[int, Any]]:
    """seqio's protocol: an enumerated dataset of model features in, (index, output) out."""
    return [(index, output) for index, output, _ in _answers(function, dataset)]


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
    mesh: sharding.MeshShape | None = None,
    rules: sharding.Rules | None = None,
) -> list[str]:
    """Writes what the model says to a split of a task, or to each line of a text file, as jsonl.

    An encoder-decoder answers the inputs, a classifier names their class; a language model continues the lines of a
    file, up to "targets" tokens with the line's own.

    input_file: text with one input a line, in the words that the model sees (a task's prefix included); the task then
    gives the vocabulary. output_dir: None: `inference` beside the checkpoint. The rest is as in `evaluate`.

    Returns: the files written, `<task or file name>-<step>.jsonl`, of a split other than "validation"
    `<task>-<split>-<step>.jsonl`; one line of {input, target, prediction} per example.
    """
    hosts.check_same(locals())
    path = checkpoint.find(checkpoint_path)
    keys = checkpoint.read_config(path).batch
    check_source(keys, input_file)
    if input_file is None:
        tasks = _tasks_with_split(mixture_or_task_name, split)
    else:
        tasks = seqio.get_subtasks(data.get_mixture_or_task(mixture_or_task_name))[:1]
    folder = _folder(output_dir, path.parent / "inference")
    on_mesh = {"mesh": mesh, "rules": rules}
    path, predictor = checkpoint.use(
        checkpoint_path, lambda found: load(found, tasks, task_feature_lengths, batch_size, **on_mesh)
    )
    lengths = dict(task_feature_lengths)
    if input_file is None:
        options = {"split": split, "lengths": lengths, "seed": random_seed}
        sources = {_name(task.name, split): (task, _task_examples(task, use_cached_tasks, **options)) for task in tasks}
    elif keys == DECODER_ONLY:
        sources = {epath.Path(input_file).stem: (tasks[0], _prompts(tasks[0], input_file, lengths))}
    else:
        sources = {epath.Path(input_file).stem: (tasks[0], _file_examples(tasks[0], input_file, lengths))}
    features = _prompt_features if keys == DECODER_ONLY else _input_features
    written = []
    for name, (task, examples) in sources.items():
        answers = predictor.predict(examples, features)
        results = folder / f"{_file_name(name)}-{checkpoint.step_of(path)}.jsonl"
        _write_lines(results, (_line(task, example, _said(task, example, ids)) for example, ids in answers))
        written.append(str(results))
    return written


def check_source(keys: BatchKeys, input_file: str | None) -> None:
    """ValueError where `infer` has nothing to answer."""
    if input_file is not None and not epath.Path(input_file).is_file():
        raise ValueError(f"input_file: no such file: {input_file}")
    if input_file is None and keys == DECODER_ONLY:
        raise ValueError("input_file: a language model continues the lines of a text file: give one (INPUT_FILE)")


def _input_features(example):
    return {"encoder_input_tokens": example["inputs"]}


def _prompt_features(example):
    return {PROMPT: example[PROMPT]}


def _said(task, example, ids: np.ndarray) -> str:
    """The answer as text; a language model's without its prompt, so that the line and the answer make the text."""
    vocabulary = task.output_features[data.TARGETS].vocabulary
    whole = _decoded(vocabulary, ids.tolist())
    if PROMPT not in example:
        return whole
    given = _decoded(vocabulary, example[PROMPT].tolist())
    if whole.startswith(given):
        return whole[len(given) :]
    return _decoded(vocabulary, ids.tolist()[len(example[PROMPT]) :])


def load(
    path: epath.PathLike,
    tasks: list[seqio.Task],
    lengths: Mapping[str, int],
    batch_size: int,
    mesh: sharding.MeshShape | None = None,
    rules: sharding.Rules | None = None,
) -> Predictor:
    """The model of a checkpoint on all devices, for tasks that share a vocabulary; checked before arrays are read."""
    if batch_size < 1:
        raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
    config = checkpoint.read_config(path)
    data.check_lengths(lengths, config.batch)
    for task in tasks:
        data.check_model(task.name, config)
    on_mesh, rules = (mesh or sharding.MeshShape()).build(), rules or sharding.Rules()
    _, trained, fixed = checkpoint.restore_params(path, on_mesh, rules=rules)
    vocabulary = tasks[0].output_features[data.TARGETS].vocabulary
    ids = {"eos_id": vocabulary.eos_id, "vocab_size": vocabulary.vocab_size}
    return Predictor(config, trained, fixed, on_mesh, batch_size, dict(lengths), **ids, rules=rules)


# Examples


def _tasks_with_split(name: str, split: str) -> list[seqio.Task]:
    provider = data.get_mixture_or_task(name)
    data.check_split(provider, split)
    return [task for task in seqio.get_subtasks(provider) if split in task.splits]


def tasks_with_metrics(name: str, split: str, keys: BatchKeys = ENCODER_DECODER) -> list[seqio.Task]:
    """The tasks that `evaluate` evaluates: those with metrics, where some of them have any. Raises ValueError where a
    metric cannot be had."""
    tasks = _tasks_with_split(name, split)
    if keys == ENCODER_DECODER:  # a mixture's pretraining tasks would take longest, and say least
        tasks = [task for task in tasks if task.metric_objs] or tasks
    kinds, given = _GIVEN[keys]
    for task in tasks:
        data.check_features(task, keys)
        for metric in task.metric_objs:
            if metric.model_output_type not in kinds:
                kind = seqio.metrics.ModelOutputType.to_str(metric.model_output_type)
                raise ValueError(f"task {task.name!r}: a metric asks for {kind!r}; {given}")
    return tasks


def _task_examples(task, use_cached, split, lengths, seed) -> Iterator[Mapping[str, Any]]:
    options = {"split": split, "use_cached": data.use_cache(task, use_cached, split), "seed": seed}
    yield from data.task_dataset(task, lengths, shuffle=False, num_epochs=1, **options).as_numpy_iterator()


def _file_examples(task, path, lengths) -> Iterator[Mapping[str, Any]]:
    feature = task.output_features["inputs"]
    end = [feature.vocabulary.eos_id] if feature.add_eos else []
    with epath.Path(path).open("r") as lines:
        for line in lines:
            ids = feature.vocabulary.encode(line.rstrip("\n"))[: lengths["inputs"] - len(end)]
            yield {"inputs_pretokenized": line.rstrip("\n"), "inputs": np.asarray(ids + end, np.int32)}


def _prompts(task, path, lengths) -> list[Mapping[str, Any]]:
    """The lines of a file as token ids, all read at once, so that a line that is too long is found first."""
    vocabulary = task.output_features[data.TARGETS].vocabulary
    with epath.Path(path).open("r") as lines:
        texts = [line.rstrip("\n") for line in lines]
    prompts = [np.asarray(vocabulary.encode(text), np.int32) for text in texts]
    for number, ids in enumerate(prompts, start=1):
        if len(ids) >= lengths[data.TARGETS]:
            raise ValueError(
                f"input_file: line {number} has {len(ids)} tokens, which leaves nothing to say within "
                f'task_feature_lengths["{data.TARGETS}"] = {lengths[data.TARGETS]}; give a larger length or a shorter line'
            )
    return [{"inputs_pretokenized": text, PROMPT: ids} for text, ids in zip(texts, prompts, strict=True)]


def _decoded(vocabulary: seqio.Vocabulary, ids: list[int]) -> str:
    """Text; the ids themselves where the vocabulary has no text for them."""
    text = vocabulary.decode(ids)
    return text if isinstance(text, str) else " ".join(map(str, text))


def _text(task: seqio.Task, example: Mapping[str, Any], feature: str) -> str:
    text = example.get(f"{feature}_pretokenized")
    if text is None:
        return data.decoded(task.output_features[feature].vocabulary, example[feature].tolist())
    return text.decode("utf-8") if isinstance(text, bytes) else str(text)


# Files


def _name(task_name: str, split: str) -> str:
    return _file_name(task_name if split == VALIDATION else f"{task_name}-{split}")


def _file_name(task_name: str) -> str:
    """A task's name as part of a file's name: a long one is cut, and told from others by a hash."""
    if len(task_name) <= 180:
        return task_name
    return f"{task_name[:160]}-{hashlib.sha256(task_name.encode()).hexdigest()[:16]}"


def _line(task: seqio.Task, example: Mapping[str, Any], prediction: str | None, **more: Any) -> dict[str, Any]:
    """{input, target, prediction} as text, and what the task's postprocessor makes of the last two where it does."""
    line = {}
    if "inputs" in example or "inputs_pretokenized" in example:
        line["input"] = _text(task, example, "inputs")
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

    def __init__(self, output_dir: str, own: _Own = _Own(), split: str = VALIDATION):
        super().__init__(output_dir)
        self._own, self._split, self._tensorboard = own, split, seqio.TensorBoardLogger(output_dir)

    def __call__(self, task_name, step, metrics, dataset, inferences, targets):
        task, folder, name = (
            seqio.get_mixture_or_task(task_name),
            epath.Path(self.output_dir),
            _name(task_name, self._split),
        )
        inferences = self._own.inferences | inferences
        metrics = {key: seqio.metrics.Scalar(value) for key, value in self._own.metrics.items()} | metrics
        examples = list(dataset.as_numpy_iterator())
        nothing = itertools.repeat(None, len(examples))
        lines = (
            _line(task, example, text, **({} if score is None else {"score": score}))
            for example, text, score in zip(
                examples, inferences.get("output", nothing), inferences.get("score", nothing), strict=True
            )
        )
        _write_lines(folder / f"{name}-{step}.jsonl", lines)
        log = folder / f"{name}-metrics.jsonl"
        before = log.read_text().splitlines() if log.exists() else []
        of_what = {"step": step, "split": self._split, "examples": len(examples)}
        _write_lines(log, [*map(json.loads, before), of_what | _plain(metrics)])
        say(f"{task_name}: {len(examples):,} examples of {self._split}, in {folder / name}-{step}.jsonl")
        self._tensorboard(name, step, metrics, dataset, inferences, targets)


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and texts. What else a metric may give, as histograms and pictures, is in TensorBoard."""
    plain = {}
    for name, value in metrics.items():
        if isinstance(value, seqio.metrics.Scalar):
            plain[name] = value.value
        elif isinstance(value, seqio.metrics.Text):
            plain[name] = tf.compat.as_text(value.textdata)
        elif not isinstance(value, seqio.metrics.MetricValue):
            plain[name] = value
    return plain


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
