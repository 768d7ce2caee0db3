"""Training from beginning to end: data, steps, logs, evaluation, checkpoints, and going on where a run stopped."""

import base64
import contextlib
import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from synthesizer_jax import data, sharding
from synthesizer_jax.models.batch import ENCODER_ONLY
from synthesizer_jax.models.config import ModelConfig
from synthesizer_jax.sharding import MeshShape, Rules
from synthesizer_jax.training import checkpoint, hosts, throughput, watchdog
from synthesizer_jax.training.logging import TrainingLog, model_info, say
from synthesizer_jax.training.optimizer import Adafactor, AdamW, Optimizer
from synthesizer_jax.training.preemption import Notice, Stopped
from synthesizer_jax.training.profiling import Profile, check_steps
from synthesizer_jax.training.step import Trainer, TrainState
from synthesizer_jax.training.validation import Evaluation
from synthesizer_jax.training.watchdog import Watchdog

TRAIN, MODEL_INFO = "train", "model-info.txt"  # in model_dir
DATA, EVALUATE, METRICS = "data", "evaluate", "metrics"  # what a checkpoint has besides: see _Run


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
    keep_period: int | None = None,
    log_period: int = 100,
    eval_period: int | None = 1000,
    eval_steps: int | None = 20,
    mesh: MeshShape | None = None,
    rules: Rules | None = None,
    microbatches: int = 1,
    loss_chunks: int = 1,
    watchdog_seconds: float | None = 300,
    profile_steps: tuple[int, int] | None = None,
    peak_flops_per_device: float | None = None,
    notes: Mapping[str, str] | None = None,
) -> TrainResult:
    """Trains a model, or goes on training it: a model_dir that holds a checkpoint is resumed, exactly.

    A resumed run has the parameters, optimizer state, step and position in the data of the last checkpoint that is whole;
    damaged ones after it are told, and moved aside. Any other run begins at step 0, from the parameters of
    `initial_checkpoint_path` (fine-tuning) or from new ones.

    Args:
      model: of any kind; must agree with a checkpoint that is read, but for checkpoint.FREE_FIELDS.
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
      keep: how many checkpoints stay, the last ones; None: all.
      keep_period: those at multiples of so many steps stay besides, as long as it is given; None: none.
      log_period: steps between entries of the log.
      eval_period: steps between evaluations of loss and accuracy (of a language model perplexity, too) on the
        validation splits; one more at the end.
        None: none at all.
      eval_steps: batches of each task in an evaluation; None: all examples.
      mesh: how the devices are arranged; None: all of them share the batch.
      rules: where arrays are split over the mesh in another way than sharding.RULES says.
      microbatches: parts of a batch that are gone through one after the other, for less memory. The update is that of the
        whole batch: gradients are weighed by real targets.
      loss_chunks: parts of the vocabulary that the loss is computed in; above 1 there are never logits of a whole batch,
        for one more product with the softmax's matrix.
      watchdog_seconds: how long a step may wait, for data, devices, a checkpoint or a batch of an evaluation, before each
        process that waits says so; None: never.
      profile_steps: (a, b): the steps from a to before b are traced to model_dir/profile.
      peak_flops_per_device: FLOP/s, for timing/model_flops_utilization; None: as throughput.PEAK_FLOPS has it, where it
        has the device.
      notes: file name -> text, written to model_dir when the run is accepted, as model-info.txt is; the command line's
        config.gin. A run that is refused changes nothing there.

    SIGTERM or Ctrl-C: the step that runs is finished and saved, then Stopped is raised, which ends the process; see
    preemption.py. Of several processes, whichever gets the signal, all stop at the same step.

    Raises: ValueError before the first step where an argument is wrong; FileNotFoundError, with what to do, where data is
      missing; NotFinite when training diverges; Stopped after a signal.
    """
    hosts.check_same({name: value for name, value in locals().items() if name != "notes"})
    _check_counts(train_steps=train_steps, checkpoint_period=checkpoint_period, log_period=log_period)
    _check_counts(optional=True, eval_period=eval_period, eval_steps=eval_steps)
    _check_types(model, optimizer)
    check_steps(profile_steps, train_steps)
    throughput.check_peak(peak_flops_per_device)
    watchdog.check_seconds(watchdog_seconds)
    devices = (mesh or MeshShape()).build()
    if mixture_or_task_module is not None:
        _import(mixture_or_task_module)
    data.check_packing(model.batch, pack)
    data.check_shards(batch_size, data_shards)
    data.check_model(mixture_or_task_name, model)
    data.check_lengths(task_feature_lengths, model.batch)
    in_parts = {"microbatches": microbatches, "loss_chunks": loss_chunks, "rules": rules or Rules()}
    trainer = Trainer(model, optimizer, devices, random_seed, z_loss, label_smoothing, **in_parts)
    trainer.check_batch_size(batch_size)
    trainer.abstract_state()  # what does not fit the mesh is refused before data is read
    for cut in data.cut_examples(
        mixture_or_task_name, task_feature_lengths, use_cached_tasks=use_cached_tasks, seed=random_seed
    ):
        say(cut)
    _make_folder(model_dir)
    say(sharding.described(devices))
    say(data.describe_split(mixture_or_task_name, TRAIN, use_cached_tasks))

    source = {"task_feature_lengths": task_feature_lengths, "batch_size": batch_size, "keys": model.batch}
    source |= {"use_cached_tasks": use_cached_tasks, "shard": hosts.batch_shard(devices)}
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(Watchdog(watchdog_seconds))
        order = {"seed": random_seed, "pack": pack, "shards": data_shards}
        batches = stack.enter_context(data.TrainBatches(mixture_or_task_name, **order, **source))
        writer = stack.enter_context(checkpoint.CheckpointWriter(model_dir, keep, keep_period))
        state, step, left = _begin(trainer, batches, writer, model_dir, initial_checkpoint_path, train_steps)
        info = model_info(trainer.mesh, trainer.declared_state(), trainer.rules)
        _write_notes(model_dir, {**(notes or {}), MODEL_INFO: info})
        log = TrainingLog(
            f"{model_dir}/{TRAIN}",
            step,
            train_steps,
            targets="examples" if model.batch == ENCODER_ONLY else "target_tokens",
            pending=left.get(METRICS, ()),
            full_use=throughput.full_use(model, task_feature_lengths, batch_size, devices, peak_flops_per_device),
            on_wait=lambda step: watch.waits(step, watchdog.DEVICES),
        )
        evaluates = left.get(EVALUATE, False)
        tasks = mixture_or_task_name if eval_period is not None else None
        evaluation = Evaluation(trainer, tasks, source, eval_steps, model_dir, step - 1 if evaluates else step)
        for part in (log, evaluation, profile := Profile(profile_steps, model_dir, step), notice := Notice()):
            stack.enter_context(part)
        periods = (checkpoint_period, log_period, eval_period)
        run = _Run(trainer, batches, writer, log, evaluation, profile, notice, watch, *periods)
        return run.to(train_steps, state, step, model_dir, evaluates)


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run is stopped after any step as if it had not been: its checkpoint has the metrics that no entry of the log holds
    yet, and whether an evaluation was due that was not made."""

    trainer: Trainer
    batches: data.TrainBatches
    writer: checkpoint.CheckpointWriter
    log: TrainingLog
    evaluation: Evaluation
    profile: Profile
    notice: Notice
    watch: Watchdog
    checkpoint_period: int
    log_period: int
    eval_period: int | None

    def to(self, train_steps: int, state: TrainState, step: int, model_dir: str, evaluates: bool) -> TrainResult:
        train_step = self.trainer.train_step()
        metrics, evaluations = {}, self._evaluate(state, step) if evaluates else {}
        stops = evaluations is None
        batch = self._next_batch(step + 1) if step < train_steps and not stops else None
        waits_for = watchdog.COMPILATION
        while step < train_steps and not stops:
            step += 1
            self.watch.waits(step, waits_for)
            with self.profile.step(step):
                state, sums = train_step(state, batch)
            waits_for = watchdog.DEVICES
            self.notice.listen()
            stops = self.notice.reached()

            def due(period, last=step == train_steps, step=step):
                return period is not None and (last or step % period == 0)

            # The devices have begun; until their results are needed below, the next batch is read and brought to them.
            # A checkpoint has the place before it.
            evaluates = due(self.eval_period)
            saves = stops or due(self.checkpoint_period)
            position = self._position(step) if saves or evaluates else None
            batch = self._next_batch(step + 1) if step < train_steps and not stops else None
            self.log.add(sums)
            self.profile.after(step, sums)
            self.writer.check()

            # A log entry ends at each checkpoint, and all that belongs to a step is told before it is saved. So a
            # resumed run tells what one that never stopped would have, and nothing that is not finite is ever saved.
            if due(self.log_period) or due(self.checkpoint_period):
                metrics = self.log.flush()
            if evaluates and not stops:
                made = self._evaluate(state, step)
                evaluations, stops = made or evaluations, made is None
                self.log.restart_clock()
            if saves or stops:
                self.watch.waits(step, watchdog.CHECKPOINT)
                left = {DATA: position, EVALUATE: stops and evaluates, METRICS: self.log.pending()}
                self.writer.save(step, state, self.trainer.config, left)
                self.log.restart_clock()
        self.watch.waits(step, watchdog.CHECKPOINT)
        self.writer.wait()
        saved = f"{model_dir}/{checkpoint.PREFIX}_{step}"
        if stops and (step < train_steps or evaluates):
            stopped = Stopped(step, saved, self.notice.number)
            say(stopped)
            raise stopped
        return TrainResult(step, metrics, evaluations, saved, state)

    def _evaluate(self, state: TrainState, step: int) -> dict[str, dict[str, float]] | None:
        def goes_on():
            self.watch.waits(step, watchdog.EVALUATION)
            return not self.notice.reached()

        self.watch.waits(step, watchdog.EVALUATION)
        return self.evaluation(state, step, goes_on)

    def _next_batch(self, step: int) -> dict[str, jax.Array]:
        self.watch.waits(step, watchdog.DATA)
        return sharding.place_batch(self.trainer.mesh, next(self.batches))

    def _position(self, step: int) -> str:
        """In the data; where hosts have streams of their own, that of all."""
        self.watch.waits(step, watchdog.DATA)
        state = self.batches.state()
        if self.batches.divided:
            state = data.merge_states(hosts.gather(state))
        return base64.b64encode(state).decode()


def _begin(
    trainer, batches, writer, model_dir, initial_checkpoint_path, train_steps
) -> tuple[TrainState, int, dict[str, Any]]:
    """The state, its step, and what a stopped run left to do: see _Run."""
    if checkpoint.exists(model_dir):
        last, state = checkpoint.use(model_dir, lambda last: _resumed(trainer, batches, last, train_steps))
        step = checkpoint.step_of(last)
        writer.set_aside_after(step)
        say(f"goes on from {last}")
        return state, step, checkpoint.read_run(last)
    if initial_checkpoint_path is not None:

        def read(found):
            return checkpoint.initial_params(found, trainer.mesh, trainer.config, trainer.seed, trainer.rules)

        found, (trained, fixed) = checkpoint.use(initial_checkpoint_path, read)
        say(f"starts from {checkpoint.check_initial(found, trainer.config)}")
        return trainer.init_from(trained, fixed), 0, {}
    say(f"starts from new parameters, seed {trainer.seed}")
    return trainer.init(), 0, {}


def position(found: epath.Path) -> bytes:
    """Where a checkpoint's run stood in its data: a state of TrainBatches."""
    return base64.b64decode(checkpoint.read_run(found)[DATA])


def _resumed(trainer, batches, last, train_steps) -> TrainState:
    step = checkpoint.step_of(last)
    if step > train_steps:
        raise ValueError(f"train_steps={train_steps}, but {last} has {step} already: expected at least as many")
    checkpoint.check_same_model(last, trainer.config)
    batches.restore(position(last))
    return checkpoint.restore(last, trainer.abstract_state())


def _make_folder(model_dir: str) -> None:
    with _needs_folder(model_dir):
        epath.Path(model_dir).mkdir(parents=True, exist_ok=True)


def _write_notes(model_dir: str, notes: Mapping[str, str]) -> None:
    with _needs_folder(model_dir):
        for name, text in notes.items() if jax.process_index() == 0 else ():
            (epath.Path(model_dir) / name).write_text(text)


@contextlib.contextmanager
def _needs_folder(model_dir):
    try:
        yield
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
