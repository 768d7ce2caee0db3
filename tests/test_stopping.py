"""A run that is told to stop: when, with what exit code, and that it goes on as if it had not been."""

import itertools
import json
import os
import signal

import jax
import numpy as np
import pytest
from test_loop import arguments, compile_once, entries  # noqa: F401 (compile_once is a fixture)

from synthesizer_jax import data
from synthesizer_jax.models import t5_tiny
from synthesizer_jax.sharding import named_leaves
from synthesizer_jax.training import checkpoint, logging
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.preemption import Notice, Stopped
from synthesizer_jax.training.step import Trainer

TASK = "quickstart_negation"  # quick to read
SIZES = {"features": 16, "mlp_features": 32, "heads": 2, "head_dim": 8, "vocab_size": 2048}
MODEL = t5_tiny("R", max_length=32, dropout_rate=0.1, **SIZES, encoder_layers=1, decoder_layers=1)
PERIODS = {"train_steps": 12, "log_period": 5, "checkpoint_period": 4, "eval_period": 6, "eval_steps": 3}


@pytest.fixture(autouse=True)
def in_the_same_second(monkeypatch):
    """Only TensorBoard needs restarts to be a second apart."""
    monkeypatch.setattr(logging, "_wait_for_next_second", lambda: None)


def run(folder, **changes):
    return train(**arguments(folder, model=MODEL, mixture_or_task_name=TASK, pack=False, **PERIODS | changes))


def told(number):
    os.kill(os.getpid(), number)


def at_batch(patch, count, number, then=lambda: None):
    """The signal comes while the batch is read that is the `count`th of this start of the run."""

    class Told(data.TrainBatches):
        read = 0

        def __next__(self):
            self.read += 1
            if self.read == count:
                told(number)
                then()
            return super().__next__()

    patch.setattr(data, "TrainBatches", Told)


def in_evaluation(patch, batches, number=signal.SIGTERM, made=0):
    """The signal comes after so many batches of an evaluation, and so many evaluations."""
    real, begun = data.eval_batches, itertools.count()

    def told_between(*args, **kwargs):
        this = next(begun)
        for count, batch in enumerate(real(*args, **kwargs)):
            if (this, count) == (made, batches):
                told(number)
            yield batch

    patch.setattr(data, "eval_batches", told_between)


def in_a_save(patch):
    """The signal comes when a checkpoint has begun to be written."""
    real = checkpoint.CheckpointWriter.save

    def save(*args):
        real(*args)
        told(signal.SIGTERM)

    patch.setattr(checkpoint.CheckpointWriter, "save", save)


def test_a_run_stopped_again_and_again_ends_as_one_that_was_not(tmp_path, monkeypatch, capfd):
    """States to the bit, each entry of both logs once; by SIGTERM between batches, in evaluations and in a save, and by
    Ctrl-C. Steps between entries of the log, checkpoints and evaluations, and at them."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    whole = run(tmp_path / "whole")
    folder = tmp_path / "stopped"
    stops = (
        (3, 143, lambda patch: at_batch(patch, 3, signal.SIGTERM)),  # while step 2 runs
        (5, 143, in_a_save),  # of step 4
        (6, 143, lambda patch: in_evaluation(patch, 1)),
        (12, 130, lambda patch: in_evaluation(patch, 2, signal.SIGINT, made=1)),  # after the one left over from step 6
    )
    for step, code, how in stops:
        with monkeypatch.context() as patch, pytest.raises(Stopped) as stopped:
            how(patch)
            run(folder)
        assert (stopped.value.step, stopped.value.code) == (step, code)
        assert stopped.value.checkpoint == str(checkpoint.latest(folder)) == f"{folder}/checkpoint_{step}"
        name = {143: "SIGTERM", 130: "SIGINT"}[code]
        said = f"stopped at step {step} by {name}, saved as {folder}/checkpoint_{step}; the same command goes on"
        assert said in capfd.readouterr().err
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    again = run(folder)
    assert again.evaluations == whole.evaluations and again.step == 12
    for name in (("train",), ("training_eval", TASK)):
        assert entries(folder, *name) == entries(tmp_path / "whole", *name)
    assert [entry["step"] for entry in entries(folder, "train")] == [4, 5, 8, 10, 12]
    assert [entry["step"] for entry in entries(folder, "training_eval", TASK)] == [6, 12]
    for (name, a), (_, b) in zip(named_leaves(whole.state), named_leaves(again.state), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_a_second_ctrl_c_interrupts_at_once(tmp_path, monkeypatch):
    at_batch(monkeypatch, 2, signal.SIGINT, then=lambda: told(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert checkpoint.latest(tmp_path) is None


def test_from_the_first_step_on_a_signal_is_a_notice_and_in_the_last_there_is_nothing_left_to_stop(
    tmp_path, monkeypatch
):
    """While the step is compiled there is nothing to save, and the signal ends the process as ever."""
    made, found = Trainer.train_step, []

    def train_step(self):
        step = made(self)

        def looked_at(*args):
            found.append(signal.getsignal(signal.SIGTERM))
            return step(*args)

        return looked_at

    monkeypatch.setattr(Trainer, "train_step", train_step)
    at_batch(monkeypatch, 2, signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    assert run(tmp_path, train_steps=2, eval_period=None).step == 2
    assert found[0] == before != found[1]


def test_what_is_not_finite_is_not_saved_by_a_stop_either(tmp_path, monkeypatch):
    at_batch(monkeypatch, 3, signal.SIGTERM)
    broken = itertools.count()
    made = Trainer.train_step

    def train_step(self):
        step = made(self)

        def spoilt(state, batch):
            state, sums = step(state, batch)
            return state, sums | ({"loss": sums["loss"] * np.float32("nan")} if next(broken) == 1 else {})

        return spoilt

    monkeypatch.setattr(Trainer, "train_step", train_step)
    with pytest.raises(FloatingPointError, match="loss is nan at step 2"):
        run(tmp_path)
    assert checkpoint.latest(tmp_path) is None


def test_metrics_go_through_a_checkpoint_to_the_bit():
    values = np.random.default_rng(0).integers(0, 2**32, 1000, np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    again = np.asarray([np.float32(value) for value in json.loads(json.dumps([float(v) for v in values]))])
    assert again.tobytes() == values.tobytes()


def test_jaxs_protocol_is_asked_where_processes_are_several(monkeypatch):
    """Its numbers only grow, also from run to run, and once it has said yes it is not asked again."""
    asked, before = [], signal.getsignal(signal.SIGTERM)
    assert jax.config.jax_enable_preemption_service, "as it is by default"
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(
        "jax.experimental.multihost_utils.reached_preemption_sync_point",
        lambda number: asked.append(number) or len(asked) == 4,
    )
    with Notice() as one:
        assert [one.reached() for _ in range(3)] == [False] * 3
    with Notice() as other:
        other.listen()
        assert signal.getsignal(signal.SIGTERM) == before, "JAX's own handler stays"
        assert [other.reached() for _ in range(3)] == [True] * 3
    assert asked == list(range(asked[0], asked[0] + 4))
