"""What a trained model says: seqio's metrics over every example of a split, and inference on tasks and text files.

Every host runs the same number of padded batches; the first one writes. Results go to
`inference_eval/<task>-<step>.jsonl` (a line per example) and `inference_eval/<task>-metrics.jsonl` (a line per
evaluation) beside the checkpoints, with TensorBoard scalars in `inference_eval/<task>/`.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import seqio
from etils import epath

from synthesizer_jax import data, sharding
from synthesizer_jax.decoding import greedy
from synthesizer_jax.models import EncoderDecoderConfig
from synthesizer_jax.models.parameters import Tree, bind
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
    tasks = [task for task in _tasks_with_split(mixture_or_task_name, split) if task.metric_objs]
    if not tasks:
        raise ValueError(
            f"mixture_or_task_name: {mixture_or_task_name!r} has no metrics; use `infer` to see what a model says"
        )
    for task in tasks:
        _check_metrics(task)
    predictor = Predictor.load(checkpoint_path, tasks, task_feature_lengths, batch_size)
    folder = _folder(output_dir, predictor.model_dir / "inference_eval")
    results = {}
    for task in tasks:
        evaluator = seqio.Evaluator(
            task.name,
            seqio.EncDecFeatureConverter(pack=False),
            split,
            data.use_cache(task, use_cached_tasks),
            random_seed,
            dict(task_feature_lengths),
            num_examples,
            async_compute_metrics=False,
            logger_cls=(_ResultLogger,) if jax.process_index() == 0 else (),
            log_dir=str(folder),
        )
        model_fns = {PREDICTION: predictor.predict_dataset, SCORE: predictor.score_dataset}
        metrics, _ = evaluator.evaluate(compute_metrics=True, step=predictor.step, model_fns=model_fns)
        results[task.name] = metrics.result()[task.name]
    return results


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
    tasks = seqio.get_subtasks(data.get_mixture_or_task(mixture_or_task_name))
    if input_file is None:
        tasks = _tasks_with_split(mixture_or_task_name, split)
        sources = {
            task.name: functools.partial(
                _task_examples, task, split, task_feature_lengths, random_seed, data.use_cache(task, use_cached_tasks)
            )
            for task in tasks
        }
    else:
        if not epath.Path(input_file).is_file():
            raise ValueError(f"input_file: no such file: {input_file}")
        tasks = tasks[:1]
        sources = {
            epath.Path(input_file).stem: functools.partial(_file_examples, tasks[0], input_file, task_feature_lengths)
        }
    predictor = Predictor.load(checkpoint_path, tasks, task_feature_lengths, batch_size)
    folder = _folder(output_dir, predictor.model_dir / "inference")
    written = []
    for task, (name, examples) in zip(tasks, sources.items(), strict=True):
        path = folder / f"{file_name(name)}-{predictor.step}.jsonl"
        answers = predictor.predict(examples())
        lines = (
            _line(task, example, task.output_features["targets"].vocabulary.decode(tokens.tolist()))
            for example, tokens in answers
        )
        _write_lines(path, lines)
        written.append(str(path))
    return written


@dataclasses.dataclass(frozen=True)
class Predictor:
    """A model with its parameters on today's devices, and the sizes of its batches."""

    config: EncoderDecoderConfig
    trained: Tree
    fixed: Tree
    step: int  # of the checkpoint
    model_dir: epath.Path
    batch_size: int
    input_length: int
    target_length: int
    vocabulary: seqio.Vocabulary  # of the targets
    mesh: jax.sharding.Mesh

    @classmethod
    def load(cls, checkpoint_path: str, tasks: list[seqio.Task], lengths: Mapping[str, int], batch_size: int):
        """From a checkpoint, for tasks that share their features."""
        for name in ("inputs", "targets"):
            if lengths.get(name, 0) < 1:
                raise ValueError(
                    f"task_feature_lengths: expected the tokens of inputs and of targets, such as "
                    f'{{"inputs": 512, "targets": 114}}, got {dict(lengths)}'
                )
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        path = checkpoint.find(checkpoint_path)
        mesh = sharding.MeshShape().build()
        config, trained, fixed = checkpoint.restore_params(path, mesh)
        vocabulary = tasks[0].output_features["targets"].vocabulary
        data.check_vocabulary(tasks, config.vocab_size)
        shards = mesh.shape[sharding.DATA] * mesh.shape[sharding.FSDP]
        return cls(
            config,
            trained,
            fixed,
            checkpoint.step_of(path),
            epath.Path(path).parent,
            -(-batch_size // shards) * shards,
            lengths["inputs"],
            lengths["targets"],
            vocabulary,
            mesh,
        )

    def predict(self, examples: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], np.ndarray]]:
        """Each example, whose "inputs" are token ids, with the ids that the model answers, [target_length]."""

        def row(example):
            return {"encoder_input_tokens": np.asarray(example["inputs"][: self.input_length], np.int32)}

        widths = {"encoder_input_tokens": self.input_length}
        return _mapped(examples, row, widths, self.batch_size, self._decode)

    def predict_dataset(self, dataset) -> list[tuple[int, np.ndarray]]:
        """seqio's predict_fn: (index, tokens) of every example of an enumerated dataset of model features."""
        widths = {"encoder_input_tokens": self.input_length}
        examples = dataset.as_numpy_iterator()
        return [
            (index, tokens)
            for (index, _), tokens in _mapped(examples, lambda e: e[1], widths, self.batch_size, self._decode)
        ]

    def score_dataset(self, dataset) -> list[tuple[int, float]]:
        """seqio's score_fn: (index, log-likelihood of the targets) of every example."""
        widths = dict.fromkeys(
            ("decoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights"), self.target_length
        )
        widths["encoder_input_tokens"] = self.input_length
        examples = dataset.as_numpy_iterator()
        return [
            (index, float(score))
            for (index, _), score in _mapped(examples, lambda e: e[1], widths, self.batch_size, self._score)
        ]

    def _decode(self, batch):
        with jax.set_mesh(self.mesh):
            return np.asarray(
                _decode(
                    self.config,
                    self.target_length,
                    self.vocabulary.eos_id,
                    self.vocabulary.vocab_size,
                    self.trained,
                    self.fixed,
                    self._place(batch)["encoder_input_tokens"],
                )
            )

    def _score(self, batch):
        with jax.set_mesh(self.mesh):
            return np.asarray(_score(self.config, self.trained, self.fixed, self._place(batch)))

    def _place(self, batch):
        split = sharding.batch_sharding(self.mesh)  # every host has the whole batch and places its part
        return {name: jax.make_array_from_callback(rows.shape, split, rows.__getitem__) for name, rows in batch.items()}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _decode(config, max_length, eos_id, vocab_size, trained, fixed, inputs):
    model = bind(config, trained, fixed)
    cache = model.init_cache(inputs, max_length)
    tokens = greedy(
        model.decode_step, cache, batch=inputs.shape[0], max_length=max_length, eos_id=eos_id, vocab_size=vocab_size
    )
    return _on_every_host(tokens)


@functools.partial(jax.jit, static_argnums=0)
def _score(config, trained, fixed, batch):
    logits = bind(config, trained, fixed)(batch["encoder_input_tokens"], batch["decoder_input_tokens"])
    targets = batch["decoder_target_tokens"]
    log_likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return _on_every_host(jnp.where(batch["decoder_loss_weights"] > 0, log_likelihood, 0).sum(axis=-1))


def _on_every_host(array):
    return jax.lax.with_sharding_constraint(array, jax.sharding.PartitionSpec())


def _mapped(examples: Iterable, row: Callable, widths: Mapping[str, int], size: int, function: Callable) -> Iterator:
    """(example, result) for all examples. function: {name: [size, width]} -> [size, ...]; the last batch is filled up
    with its last row, whose extra results are dropped (an empty row would decode to the very end)."""
    examples = iter(examples)
    while chunk := list(itertools.islice(examples, size)):
        rows = [row(example) for example in chunk]
        rows += rows[-1:] * (size - len(rows))
        batch = {name: np.stack([_padded(r[name], width) for r in rows]) for name, width in widths.items()}
        yield from zip(chunk, function(batch), strict=False)


def _padded(ids: np.ndarray, width: int) -> np.ndarray:
    return np.pad(ids, (0, width - len(ids)))


# Examples


def _tasks_with_split(name: str, split: str) -> list[seqio.Task]:
    tasks = seqio.get_subtasks(data.get_mixture_or_task(name))
    found = [task for task in tasks if split in task.splits]
    if not found:
        splits = sorted({known for task in tasks for known in task.splits})
        raise ValueError(f"split: no task of {name!r} has a split {split!r}; they have {', '.join(splits)}")
    return found


def _check_metrics(task: seqio.Task) -> None:
    for metric in task.metric_objs:
        if metric.model_output_type not in (PREDICTION, SCORE):
            kind = seqio.metrics.ModelOutputType.to_str(metric.model_output_type)
            raise ValueError(
                f"task {task.name!r}: a metric asks for {kind!r}; greedy decoding gives 'prediction' and 'score' only"
            )


def _task_examples(task, split, lengths, seed, use_cached) -> Iterator[Mapping[str, Any]]:
    dataset = task.get_dataset(dict(lengths), split, use_cached=use_cached, shuffle=False, seed=seed, num_epochs=1)
    return dataset.as_numpy_iterator()


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


def file_name(task_name: str) -> str:
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
        task, folder, name = seqio.get_mixture_or_task(task_name), epath.Path(self.output_dir), file_name(task_name)
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
        return collections.deque(encoded, maxlen=0) and None
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
