"""Training from beginning to end: data, steps, logs, evaluation, checkpoints, and going on where a run stopped."""

import base64
import contextlib
import dataclasses
import importlib
import itertools
import re
from collections.abc import Mapping
from typing import Any

import jax
import seqio
from etils import epath

from synthesizer_jax import data, sharding
from synthesizer_jax.models.batch import ENCODER_ONLY
from synthesizer_jax.models.config import ModelConfig
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training import checkpoint, hosts
from synthesizer_jax.training.logging import ScalarWriter, TrainingLog, model_info, say, shown, summarize
from synthesizer_jax.training.optimizer import Adafactor, AdamW, Optimizer
from synthesizer_jax.training.step import Trainer, TrainState

TRAIN, TRAINING_EVAL, MODEL_INFO = "train", "training_eval", "model-info.txt"  # in model_dir
VALIDATION = "validation"  # the split that is evaluated while training


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int  # updates made, those of earlier runs in the same model_dir included
    metrics: dict[str, float]  # means over the steps since the log before; empty where nothing was left to do
    evaluations: dict[str, dict[str, float]]  # task -> its last loss, accuracy, ...; empty without evaluation
    checkpoint: str  # path of the last one
    state: TrainState  # on the mesh


def train(
    *,
    model: ModelConfig,
    optimizer: Optimizer,
    mixture_or_task_name: str,
    task_feature_lengths: Mapping[str, int],
    batch_size: int,
    train_steps: int,
    model_dir: str,
    mixture_or_task_module: str | None = None,
    initial_checkpoint_path: str | None = None,
    random_seed: int = 0,
    pack: bool = True,
    z_loss: float = 1e-4,
    label_smoothing: float = 0.0,
    use_cached_tasks: bool | None = None,
    data_shards: int = 1,
    checkpoint_period: int = 1000,
    keep: int | None = 3,
    log_period: int = 100,
    eval_period: int | None = 1000,
    eval_steps: int | None = 20,
    mesh: MeshShape | None = None,
) -> TrainResult:
    """Trains a model, or goes on training it: a model_dir that holds a checkpoint is resumed, exactly.

    A resumed run has the parameters, optimizer state, step and position in the data of the last checkpoint. Any other
    run begins at step 0, from the parameters of `initial_checkpoint_path` (fine-tuning) or from new ones.

    Args:
      model: of any kind; must agree with a checkpoint that is read, but for dropout_rate, dtype and remat.
      optimizer: Adafactor(...) or AdamW(...).
      mixture_or_task_name: of seqio.
      task_feature_lengths: {"inputs": tokens, "targets": tokens} of a row; of a language model {"targets": tokens}, of a
        classifier {"inputs": tokens}. See data.py for what a task has.
      batch_size: rows of a batch over all devices and hosts.
      train_steps: updates in all, counted from step 0 of this model_dir: a run stopped after 400 of 1000 makes 600
        more. T5X counts on from the step of the initial checkpoint; here 1000 steps of fine-tuning are 1000.
      model_dir: where checkpoints, logs and model-info.txt go.
      mixture_or_task_module: a module that registers the task; imported first.
      initial_checkpoint_path: a checkpoint, or a model_dir for its last one. Not read where model_dir is resumed. A
        classifier takes embedding and encoder of an encoder-decoder, too; its head is then new.
      random_seed: of initial values, of dropout and of the order of the data.
      pack: whether several examples share a row; they do not see each other. False for a classifier.
      z_loss: weight of log(Z)^2; label_smoothing: probability given to other tokens or classes. See
        loss.py.
      use_cached_tasks: True: cached data only; False: never; None: where there is a cache.
      data_shards: streams that the data is read in, each batch_size / data_shards rows of a batch; hosts divide them.
        With 1 every host reads everything. Batches depend on this number, not on the hosts: a run is resumed with the
        same one, on any number of hosts.
      checkpoint_period: steps between checkpoints; there is one more at the end.
      keep: how many checkpoints stay; None: all.
      log_period: steps between entries of the log.
      eval_period: steps between evaluations of loss and accuracy (of a language model perplexity, too) on the
        validation splits; one more at the end.
        None: none at all.
      eval_steps: batches of each task in an evaluation; None: all examples.
      mesh: how the devices are arranged; None: all of them share the batch.

    Raises: ValueError before the first step where an argument is wrong; FileNotFoundError, with what to do, where data is
      missing; NotFinite when training diverges.
    """
    _check_counts(train_steps=train_steps, checkpoint_period=checkpoint_period, log_period=log_period)
    _check_counts(optional=True, eval_period=eval_period, eval_steps=eval_steps)
    _check_types(model, optimizer)
    devices = (mesh or MeshShape()).build()
    sharding.check_batch_size(devices, batch_size)
    if mixture_or_task_module is not None:
        _import(mixture_or_task_module)
    data.check_packing(model.batch, pack)
    data.check_shards(batch_size, data_shards)
    data.check_model(mixture_or_task_name, model)
    data.check_lengths(task_feature_lengths, model.batch)
    trainer = Trainer(model, optimizer, devices, random_seed, z_loss, label_smoothing)
    for cut in data.cut_examples(
        mixture_or_task_name, task_feature_lengths, use_cached_tasks=use_cached_tasks, seed=random_seed
    ):
        say(cut)
    _write_model_info(model_dir, trainer)
    say(data.describe_split(mixture_or_task_name, TRAIN, use_cached_tasks))

    source = {"task_feature_lengths": task_feature_lengths, "batch_size": batch_size, "keys": model.batch}
    source |= {"use_cached_tasks": use_cached_tasks, "shard": (jax.process_index(), jax.process_count())}
    with contextlib.ExitStack() as stack:
        order = {"seed": random_seed, "pack": pack, "shards": data_shards}
        batches = stack.enter_context(data.TrainBatches(mixture_or_task_name, **order, **source))
        writer = stack.enter_context(checkpoint.CheckpointWriter(model_dir, keep))
        state, step = _begin(trainer, batches, model_dir, initial_checkpoint_path, train_steps)
        targets = "examples" if model.batch == ENCODER_ONLY else "target_tokens"
        log = stack.enter_context(TrainingLog(f"{model_dir}/{TRAIN}", step, train_steps, targets=targets))
        tasks = _validation_tasks(mixture_or_task_name) if eval_period is not None else []
        evaluation = stack.enter_context(_Evaluation(trainer, tasks, source, eval_steps, model_dir, step))
        run = _Run(trainer, batches, writer, log, evaluation, checkpoint_period, log_period, eval_period)
        return run.to(train_steps, state, step, model_dir)


@dataclasses.dataclass(frozen=True)
class _Run:
    trainer: Trainer
    batches: data.TrainBatches
    writer: checkpoint.CheckpointWriter
    log: TrainingLog
    evaluation: "_Evaluation"
    checkpoint_period: int
    log_period: int
    eval_period: int | None

    def to(self, train_steps: int, state: TrainState, step: int, model_dir: str) -> TrainResult:
        train_step = self.trainer.train_step()
        metrics, evaluations = {}, {}
        batch = self._next_batch() if step < train_steps else None
        while step < train_steps:
            state, sums = train_step(state, batch)
            step += 1

            def due(period, last=step == train_steps, step=step):
                return period is not None and (last or step % period == 0)

            # The devices have begun; until their results are needed below, the next batch is read and brought to them.
            # A checkpoint has the place before it.
            position = self._position() if due(self.checkpoint_period) else None
            batch = self._next_batch() if step < train_steps else None
            self.log.add(sums)
            self.writer.check()

            # A log entry ends at each checkpoint, and all that belongs to a step is told before it is saved. So a
            # resumed run tells what one that never stopped would have, and nothing that is not finite is ever saved.
            if due(self.log_period) or due(self.checkpoint_period):
                metrics = self.log.flush()
            if due(self.eval_period):
                evaluations = self.evaluation(state, step)
                self.log.restart_clock()
            if due(self.checkpoint_period):
                self.writer.save(step, state, self.trainer.config, {"data": position})
                self.log.restart_clock()
        return TrainResult(step, metrics, evaluations, f"{model_dir}/{checkpoint.PREFIX}_{step}", state)

    def _next_batch(self) -> dict[str, jax.Array]:
        return sharding.place_batch(self.trainer.mesh, next(self.batches))

    def _position(self) -> str:
        """In the data; where hosts have streams of their own, that of all."""
        state = self.batches.state()
        if self.batches.divided:
            state = data.merge_states(hosts.gather(state))
        return base64.b64encode(state).decode()


def _begin(trainer, batches, model_dir, initial_checkpoint_path, train_steps) -> tuple[TrainState, int]:
    last = checkpoint.latest(model_dir)
    if last is not None:
        step = checkpoint.step_of(last)
        if step > train_steps:
            raise ValueError(f"train_steps={train_steps}, but {last} has {step} already: expected at least as many")
        checkpoint.check_same_model(last, trainer.config)
        batches.restore(base64.b64decode(checkpoint.read_run(last)["data"]))
        state = checkpoint.restore(last, trainer.abstract_state())
        say(f"goes on from {last}")
        return state, step
    if initial_checkpoint_path is not None:
        found = checkpoint.find(initial_checkpoint_path)
        trained, fixed = checkpoint.initial_params(found, trainer.mesh, trainer.config, trainer.seed)
        say(f"starts from {checkpoint.check_initial(found, trainer.config)}")
        return trainer.init_from(trained, fixed), 0
    say(f"starts from new parameters, seed {trainer.seed}")
    return trainer.init(), 0


class _Evaluation:
    """Loss, accuracy and perplexity of validation tasks given the right targets before, each with its own log."""

    def __init__(self, trainer, tasks, source, eval_steps, model_dir, after_step):
        self._trainer, self._source, self._eval_steps = trainer, source, eval_steps
        self._step = trainer.eval_step()
        folder = f"{model_dir}/{TRAINING_EVAL}"
        self._writers = {task: ScalarWriter(f"{folder}/{_folder_name(task)}", after_step) for task in tasks}

    def __call__(self, state: TrainState, step: int) -> dict[str, dict[str, float]]:
        results = {}
        for task, writer in self._writers.items():
            batches = itertools.islice(data.eval_batches(task, split=VALIDATION, **self._source), self._eval_steps)
            sums = [self._step(state, sharding.place_batch(self._trainer.mesh, batch)) for batch, _ in batches]
            results[task] = summarize(jax.device_get(sums))
            writer.write(step, results[task])
            say(f"step {step}  {task}:", *(f" {name} {value}" for name, value in shown(results[task]).items()))
        return results

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for writer in self._writers.values():
            writer.close()


def _validation_tasks(mixture_or_task_name: str) -> list[str]:
    provider = data.get_mixture_or_task(mixture_or_task_name)
    found = [task for task in seqio.get_subtasks(provider) if VALIDATION in task.splits]
    if not found:
        say(f"{mixture_or_task_name} has no {VALIDATION} split: no evaluation")
    missing = {
        task.name: how
        for task in found
        if not data.is_cached(task, VALIDATION) and (how := data.how_to_get(task, VALIDATION)) is not None
    }
    for name, how in missing.items():
        say(f"no evaluation on {name}: {how}")
    return [task.name for task in found if task.name not in missing]


def _folder_name(task: str) -> str:
    return re.sub(r"[^\w.+-]", "_", task)[:200]  # file systems take 255


def _write_model_info(model_dir: str, trainer: Trainer) -> None:
    text = model_info(trainer.mesh, trainer.declared_state())
    try:
        folder = epath.Path(model_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            (folder / MODEL_INFO).write_text(text)
    except (OSError, TypeError) as error:
        raise ValueError(f"model_dir: expected a folder that can be written, got {model_dir!r}: {error}") from error


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"mixture_or_task_module: cannot import {module!r}: {error}") from error


def _check_counts(optional: bool = False, **counts: Any) -> None:
    for name, value in counts.items():
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not whole and not (optional and value is None):
            also = ", or None" if optional else ""
            raise ValueError(f"{name}: expected a whole number >= 1{also}, got {value!r}")


def _check_types(model: Any, optimizer: Any) -> None:
    if not isinstance(model, ModelConfig):
        raise ValueError(f"model: expected a configuration such as t5_small(attention='R+V'), got {model!r}")
    if not isinstance(optimizer, (Adafactor, AdamW)):
        raise ValueError(f"optimizer: expected Adafactor(...) or AdamW(...), got {optimizer!r}")
