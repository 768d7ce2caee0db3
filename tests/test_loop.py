"""Training end to end on the quickstart's text: resume to the bit after SIGKILL, fine-tuning, logs, bad arguments."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from test_checkpoint_damage import take_state

from synthesizer_jax import data
from synthesizer_jax.models import t5_tiny
from synthesizer_jax.sharding import MeshShape, named_leaves
from synthesizer_jax.training import checkpoint
from synthesizer_jax.training.logging import NotFinite, read_lines
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.optimizer import Adafactor, Constant

TASK = "quickstart_span_corruption"
SIZES = {"features": 16, "mlp_features": 32, "heads": 2, "head_dim": 8, "vocab_size": 2048}
MODEL = t5_tiny("R", max_length=32, dropout_rate=0.0, **SIZES)


class OneDevice(MeshShape):
    """Compiles in half the time; test_train_step.py has all devices."""

    def build(self, devices=None):
        return super().build(jax.devices()[:1])


def arguments(model_dir, **changes):
    given = {
        "model": MODEL,
        "optimizer": Adafactor(Constant(1e-2), min_size_to_factor=8),
        "mixture_or_task_name": TASK,
        "mixture_or_task_module": "synthesizer_jax.tasks.quickstart",
        "task_feature_lengths": {"inputs": 32, "targets": 16},
        "batch_size": 8,
        "train_steps": 4,
        "model_dir": str(model_dir),
        "log_period": 1,
        "checkpoint_period": 3,
        "eval_period": 4,
        "eval_steps": 2,
        "mesh": OneDevice(),
    }
    return given | changes


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Runs of the same program share its compilation, which is most of their time."""
    folder = str(tmp_path_factory.mktemp("compiled"))
    settings = {"jax_compilation_cache_dir": folder, "jax_persistent_cache_min_compile_time_secs": 0.5}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield folder
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return folder, train(**arguments(folder))


def entries(folder, *names):
    """The values of the log that do not depend on the clock."""
    lines = read_lines(pathlib.Path(folder, *names) / "metrics.jsonl")
    return [{name: value for name, value in line.items() if "timing" not in name} for line in lines]


def test_what_a_run_leaves(trained):
    folder, result = trained
    assert result.step == 4 and result.checkpoint == f"{folder}/checkpoint_4"
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint_3",
        "checkpoint_4",
        "model-info.txt",
        "train",
        "training_eval",
    ]
    log = entries(folder, "train")
    assert [entry["step"] for entry in log] == [1, 2, 3, 4]
    expected = {"loss", "accuracy", "z_loss", "learning_rate", "gradient_norm"}
    assert set(log[0]) == {"step"} | expected | {"non_padding_fraction/encoder", "non_padding_fraction/decoder"}
    assert log[-1] == {"step": 4} | result.metrics
    assert entries(folder, "training_eval", TASK) == [{"step": 4} | result.evaluations[TASK]]
    assert log[3]["loss"] < log[0]["loss"]
    assert abs(result.evaluations[TASK]["loss"] - log[3]["loss"]) < 0.5
    assert checkpoint.read_config(result.checkpoint) == MODEL
    for (name, a), (_, b) in zip(
        named_leaves(result.state),
        named_leaves(checkpoint.restore(result.checkpoint, jax.tree.map(shaped, result.state))),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b, err_msg=name)


def shaped(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def test_more_steps_go_on_exactly(trained, tmp_path, capfd):
    folder, result = trained
    train(**arguments(tmp_path, train_steps=2, eval_period=None))
    assert not (tmp_path / "training_eval").exists()
    again = train(**arguments(tmp_path))
    assert f"goes on from {tmp_path}/checkpoint_2" in capfd.readouterr().err
    assert entries(tmp_path, "train") == entries(folder, "train")
    assert again.evaluations == result.evaluations
    done = train(**arguments(tmp_path))
    assert (done.step, done.metrics) == (4, {})
    with pytest.raises(ValueError, match="train_steps=3, but .*checkpoint_4 has 4 already: expected at least as many"):
        train(**arguments(tmp_path, train_steps=3))


def test_a_checkpoint_has_the_place_before_the_batch_that_was_read_ahead(trained, tmp_path):
    folder, result = trained
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint_4")
    again = train(**arguments(tmp_path / "run"))
    assert again.metrics == {name: value for name, value in entries(folder, "train")[3].items() if name != "step"}


def test_a_run_goes_on_from_the_last_whole_checkpoint(trained, tmp_path, capfd):
    """The damage shows only when arrays are read; then all is as if the damaged checkpoint had not been written yet."""
    folder, result = trained
    run = shutil.copytree(folder, tmp_path / "run")
    take_state(run / "checkpoint_4", run / "checkpoint_3")
    capfd.readouterr()
    again = train(**arguments(run))
    said = capfd.readouterr().err
    assert re.search("checkpoint_4 is damaged: other values than were saved in .*; checkpoint_3 is taken instead", said)
    assert "run/checkpoint_4 to checkpoint_4.damaged; remove it when you do not need it" in said
    assert f"goes on from {run}/checkpoint_3" in said
    for (name, a), (_, b) in zip(named_leaves(again.state), named_leaves(result.state), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert entries(run, "train") == entries(folder, "train")
    names = sorted(path.name for path in run.iterdir() if path.name.startswith("checkpoint"))
    assert names == ["checkpoint_3", "checkpoint_4", "checkpoint_4.damaged"]
    assert checkpoint.find(run).name == "checkpoint_4"


def test_a_run_stopped_in_an_evaluation_makes_it_again(tmp_path, monkeypatch):
    periods = {"checkpoint_period": 2, "eval_period": 2}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data, "eval_batches", interrupted)
        train(**arguments(tmp_path, **periods))
    train(**arguments(tmp_path, **periods))
    assert [entry["step"] for entry in entries(tmp_path, "training_eval", TASK)] == [2, 4]
    assert [entry["step"] for entry in entries(tmp_path, "train")] == [1, 2, 3, 4]


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt


def test_coarser_logs_hold_the_same_steps(trained, tmp_path):
    folder, _ = trained
    train(**arguments(tmp_path, log_period=2, eval_period=None))
    fine, coarse = entries(folder, "train"), entries(tmp_path, "train")
    assert [entry["step"] for entry in coarse] == [2, 3, 4]  # one at each checkpoint, too
    assert coarse[1:] == fine[2:]
    assert min(fine[0]["loss"], fine[1]["loss"]) <= coarse[0]["loss"] <= max(fine[0]["loss"], fine[1]["loss"])


def test_fine_tuning_starts_from_the_parameters_alone(trained, tmp_path, capfd):
    folder, result = trained
    changes = {"initial_checkpoint_path": str(folder), "mixture_or_task_name": "quickstart_finetune", "train_steps": 1}
    tuned = train(**arguments(tmp_path, **changes))
    assert f"starts from the parameters of {folder}/checkpoint_4" in capfd.readouterr().err
    assert tuned.step == 1 and set(tuned.evaluations) == {"quickstart_negation", "quickstart_number"}
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), tuned.state.params, result.state.params)
    assert 0 < max(jax.tree.leaves(moved)) < 0.5  # other draws would differ by more than 1
    assert int(tuned.state.opt_state[0].count) == 1


def test_what_is_not_finite_stops_and_is_not_saved(tmp_path, monkeypatch):
    class Broken(data.TrainBatches):
        count = 0

        def __next__(self):
            batch, self.count = super().__next__(), self.count + 1
            if self.count == 5:
                batch["decoder_target_tokens"][0, 0] = 10**6
            return batch

    monkeypatch.setattr(data, "TrainBatches", Broken)
    with pytest.raises(NotFinite, match="loss is nan at step 5: training stops"):
        train(**arguments(tmp_path, train_steps=9, log_period=100, eval_period=None))
    assert checkpoint.latest(tmp_path).name == "checkpoint_3"


def no_data(monkeypatch):
    """Arguments are checked before anything is read or compiled."""
    monkeypatch.setattr(data, "TrainBatches", lambda *args, **kwargs: pytest.fail("began to read"))


@pytest.mark.parametrize(
    "change,text",
    [
        ({"train_steps": 0}, "train_steps: expected a whole number >= 1, got 0"),
        ({"train_steps": 1e6}, "train_steps: expected a whole number >= 1, got 1000000.0"),
        ({"log_period": 0}, "log_period: expected a whole number >= 1, got 0"),
        ({"checkpoint_period": None}, "checkpoint_period: expected a whole number >= 1, got None"),
        ({"eval_period": -1}, "eval_period: expected a whole number >= 1, or None, got -1"),
        ({"eval_steps": 0}, "eval_steps: expected a whole number >= 1, or None, got 0"),
        ({"batch_size": 12, "mesh": None}, "batch_size=12 does not divide over data x fsdp = 8 x 1 = 8 devices"),
        ({"mesh": MeshShape(model=3)}, "needs a multiple of 3 devices, but there are 8"),
        ({"mesh": MeshShape(model=4)}, "axis 'heads' of size 2 does not divide over model=4"),
        ({"model": "t5_tiny"}, r"model: expected a configuration such as t5_small\(attention='R\+V'\), got 't5_tiny'"),
        ({"optimizer": 1e-3}, r"optimizer: expected Adafactor\(...\) or AdamW\(...\), got 0.001"),
        ({"z_loss": -1.0}, "z_loss: expected a number >= 0"),
        ({"label_smoothing": 1.5}, "label_smoothing: expected a number in"),
        ({"mixture_or_task_name": "quickstart_span"}, "No Task or Mixture found with name 'quickstart_span'"),
        ({"mixture_or_task_module": "no.such.module"}, "mixture_or_task_module: cannot import 'no.such.module'"),
        ({"model": t5_tiny("R", max_length=32, **SIZES | {"vocab_size": 64})}, "the model has 64 rows"),
    ],
)
def test_wrong_arguments(tmp_path, monkeypatch, change, text):
    no_data(monkeypatch)
    with pytest.raises(ValueError, match=text):
        train(**arguments(tmp_path, **change))
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize(
    "change,text",
    [
        ({"keep": 0}, "keep: expected a number of checkpoints >= 1"),
        ({"initial_checkpoint_path": "/no/such/model"}, "checkpoint path '/no/such/model' does not exist"),
        ({"task_feature_lengths": {"inputs": 32}}, "task_feature_lengths"),
        ({"task_feature_lengths": {"inputs": 32, "targets": 64}, "initial_checkpoint_path": None}, "max_length"),
    ],
)
def test_wrong_arguments_found_a_little_later(tmp_path, change, text):
    with pytest.raises(ValueError, match=text):
        train(**arguments(tmp_path, **change))
    assert entries(tmp_path, "train") == []


def test_a_model_dir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="model_dir: expected a folder that can be written, got '.*file/run'"):
        train(**arguments(tmp_path / "file" / "run"))


@pytest.mark.parametrize(
    "change,text",
    [
        ({"model": t5_tiny("R", max_length=48, **SIZES)}, "encoder_attention: .*max_length.* in the checkpoint"),
        ({"batch_size": 16}, "batch_size 8 then, 16 now"),
        ({"random_seed": 1}, "seed 0 then, 1 now"),
        ({"mixture_or_task_name": "quickstart_finetune"}, "mixture_or_task_name"),
    ],
)
def test_a_run_is_not_resumed_as_another(trained, change, text):
    with pytest.raises(ValueError, match=text):
        train(**arguments(trained[0], train_steps=9, **change))
    assert checkpoint.latest(trained[0]).name == "checkpoint_4"


SCRIPT = """
import os, sys
os.environ["JAX_COMPILATION_CACHE_DIR"] = sys.argv[1]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"
sys.path.insert(0, sys.argv[2])
from test_loop import SIZES, arguments
from synthesizer_jax.models import t5_tiny
from synthesizer_jax.training.loop import train

model = t5_tiny("R", max_length=32, dropout_rate=0.1, **SIZES)
for folder in sys.argv[3:]:
    train(**arguments(folder, model=model, train_steps=30, checkpoint_period=4, eval_period=10))
"""


def start(cache, *folders):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device
    words = [sys.executable, "-c", SCRIPT, cache, str(pathlib.Path(__file__).parent), *map(str, folders)]
    return subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)


def finish(process):
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]


def test_a_run_killed_at_a_random_step_ends_as_one_that_was_not(tmp_path, compile_once):
    rng = np.random.default_rng()  # other steps each time the tests run
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    uninterrupted = start(compile_once, whole)
    step = rng.integers(2, 30)
    with start(compile_once, killed) as process:
        while process.poll() is None and len(entries(killed, "train")) < step:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
    finish(start(compile_once, killed))
    finish(uninterrupted)
    assert entries(killed, "train") == entries(whole, "train"), f"killed at {step}"
    assert [entry["step"] for entry in entries(whole, "train")] == list(range(1, 31))
    assert entries(killed, "training_eval", TASK) == entries(whole, "training_eval", TASK)
    assert len({entry["loss"] for entry in entries(whole, "train")}) == 30
    states = [
        checkpoint.restore_params(str(folder), MeshShape().build(jax.devices()[:1])) for folder in (whole, killed)
    ]
    for (name, a), (_, b) in zip(named_leaves(states[0][1]), named_leaves(states[1][1]), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert not [path.name for path in killed.iterdir() if "tmp" in path.name]
