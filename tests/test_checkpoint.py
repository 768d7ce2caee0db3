"""Checkpoints: equal values over meshes, strictness, atomicity, what is kept, and every path that is none."""

import dataclasses
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.models import t5_tiny
from synthesizer_jax.sharding import MeshShape, named_leaves
from synthesizer_jax.training import checkpoint
from synthesizer_jax.training.checkpoint import CheckpointWriter
from synthesizer_jax.training.optimizer import Adafactor, AdamW, Constant
from synthesizer_jax.training.step import Trainer

SIZES = {"features": 16, "mlp_features": 32, "heads": 4, "head_dim": 8, "vocab_size": 32}
CONFIG = t5_tiny("fixedR+V", max_length=12, **SIZES)
RUN = {"data": "abc", "settings": {"batch_size": 8}}


def make(config=CONFIG, shape=None, optimizer=None):
    mesh = MeshShape().build(jax.devices()[:1]) if shape is None else shape.build(jax.devices()[:8])
    return Trainer(config, optimizer or Adafactor(Constant(1e-2), min_size_to_factor=8), mesh)


@pytest.fixture(scope="module")
def trained():
    """A state whose every entry is another number, and its trainer."""
    made = make()
    numbers = iter(range(10**6))
    fill = lambda leaf: (np.arange(leaf.size) + next(numbers)).reshape(leaf.shape).astype(leaf.dtype)  # noqa: E731
    return made, jax.device_put(jax.tree.map(fill, made.abstract_state()), made.mesh.devices.flat[0])


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("model"))
    with CheckpointWriter(folder) as writer:
        writer.save(7, trained[1], CONFIG, RUN)
    return folder


def assert_equal_states(a, b):
    for (name, one), (other_name, other) in zip(named_leaves(a), named_leaves(b), strict=True):
        assert name == other_name
        np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.parametrize("shape", [None, MeshShape(data=2, fsdp=2, model=2), MeshShape(model=4)])
@pytest.mark.parametrize("optimizer", [None, AdamW(Constant())])
def test_a_state_is_restored_to_todays_shardings(trained, saved, shape, optimizer, tmp_path):
    if optimizer is not None:
        made = make(optimizer=optimizer)
        state = jax.tree.map(lambda leaf: np.full(leaf.shape, 3, leaf.dtype), made.abstract_state())
        with CheckpointWriter(str(tmp_path)) as writer:
            writer.save(7, state, CONFIG, RUN)
        folder = tmp_path
    else:
        state, folder = trained[1], saved
    target = make(shape=shape, optimizer=optimizer).abstract_state()
    restored = checkpoint.restore(checkpoint.latest(folder), target)
    assert_equal_states(restored, state)
    for (name, leaf), (_, wanted) in zip(named_leaves(restored), named_leaves(target), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim) and leaf.dtype == wanted.dtype, name


def test_a_sharded_state_is_saved_whole(trained, tmp_path):
    made = make(shape=MeshShape(data=2, fsdp=2, model=2))
    placed = jax.tree.map(lambda leaf: leaf.sharding, made.abstract_state())
    state = jax.device_put(trained[1], placed)
    with CheckpointWriter(str(tmp_path)) as writer:
        writer.save(0, state, CONFIG, RUN)
    assert_equal_states(checkpoint.restore(checkpoint.latest(tmp_path), make().abstract_state()), state)


def test_config_and_run_lie_beside_the_state(saved):
    path = checkpoint.find(saved)
    assert checkpoint.step_of(path) == 7
    assert checkpoint.read_config(path) == CONFIG
    assert checkpoint.read_run(path) == RUN


@pytest.mark.parametrize("name", ["", "checkpoint_7"])
def test_parameters_alone(trained, saved, name):
    config, params, fixed = checkpoint.restore_params(
        os.path.join(saved, name), MeshShape(model=2).build(jax.devices()[:8])
    )
    assert config == CONFIG
    assert_equal_states(params, trained[1].params)
    assert_equal_states(fixed, trained[1].fixed)
    assert params["embedding"]["embedding"].addressable_shards[0].data.shape == (16, 16)


def test_parameters_alone_for_another_dtype_and_dropout(trained, saved):
    wanted = dataclasses.replace(CONFIG, dropout_rate=0.5, dtype="bfloat16", remat="full")
    config, params, _ = checkpoint.restore_params(saved, config=wanted)
    assert config == wanted
    assert_equal_states(params, trained[1].params)


def test_saving_is_not_disturbed_by_donated_updates(tmp_path):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    big = jnp.zeros(4_000_000)
    with CheckpointWriter(str(tmp_path), keep=None) as writer:
        for i in range(4):
            writer.save(i, {"big": big}, CONFIG, RUN)
            for _ in range(5):
                big = step(big)
    for i in range(4):
        target = {"big": jax.ShapeDtypeStruct(big.shape, big.dtype, sharding=big.sharding)}
        np.testing.assert_array_equal(checkpoint.restore(tmp_path / f"checkpoint_{i}", target)["big"], 5.0 * i)


def test_the_last_ones_are_kept(tmp_path):
    with CheckpointWriter(str(tmp_path), keep=2) as writer:
        for step in (3, 10, 20, 100):
            writer.save(step, {"x": jnp.zeros(3)}, CONFIG, RUN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_100", "checkpoint_20"]
    assert checkpoint.latest(tmp_path).name == "checkpoint_100"


def test_those_at_multiples_of_a_period_are_kept_besides(tmp_path):
    for steps in (range(1, 5), range(5, 12)):  # one run, and its resume
        with CheckpointWriter(str(tmp_path), keep=1, keep_period=3) as writer:
            for step in steps:
                writer.save(step, {"x": jnp.zeros(3)}, CONFIG, RUN)
    assert sorted(map(checkpoint.step_of, tmp_path.iterdir())) == [3, 6, 9, 11]


def test_what_is_deleted_leaves_by_a_rename(tmp_path, monkeypatch):
    """A run killed while it deletes must not leave half a checkpoint under a checkpoint's name."""
    monkeypatch.setattr(CheckpointWriter, "_empty_trash", lambda self: None)
    with CheckpointWriter(str(tmp_path), keep=1) as writer:
        for step in (1, 2):
            writer.save(step, {"x": jnp.zeros(3)}, CONFIG, RUN)
    (moved,) = (tmp_path / checkpoint.TRASH).iterdir()
    assert checkpoint.read_run(moved) == RUN
    monkeypatch.undo()
    with CheckpointWriter(str(tmp_path)):
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_2"]


def test_the_trash_is_emptied_while_nothing_is_written(tmp_path, monkeypatch):
    """Orbax moves old checkpoints there from its own thread."""
    writing, empty = [], CheckpointWriter._empty_trash
    monkeypatch.setattr(
        CheckpointWriter,
        "_empty_trash",
        lambda self: (writing.append(self._manager.is_saving_in_progress()), empty(self)),
    )
    with CheckpointWriter(str(tmp_path), keep=1) as writer:
        for step in range(4):
            writer.save(step, {"x": jnp.full(4_000_000, float(step))}, CONFIG, RUN)
            writing.append(None)
            assert writer._manager.is_saving_in_progress()
    assert writing == [False, False, None, False, None, False, None, False, None, False]


def test_what_a_killed_run_left_unfinished_is_removed(tmp_path):
    (tmp_path / "checkpoint_5.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    with CheckpointWriter(str(tmp_path)) as writer:
        writer.save(6, {"x": jnp.zeros(3)}, CONFIG, RUN)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_6"]


def test_mismatches_are_listed_in_three_groups(saved):
    other = t5_tiny("R+D", max_length=20, **SIZES | {"mlp_features": 48})
    with pytest.raises(ValueError) as error:
        checkpoint.restore(checkpoint.find(saved), make(other).abstract_state())
    text = str(error.value)
    missing, rest = text.split("  unexpected in the checkpoint:\n")
    unexpected, different = rest.split("  of different shape:\n")
    assert "checkpoint_7 does not fit" in missing and "missing in the checkpoint:\n" in missing
    assert "    params/encoder/layers/attention/scores/dense/w1\n" in missing
    assert "    params/encoder/layers/attention/scores/dot_product/query\n" in unexpected
    assert "    fixed/encoder/layers/attention/scores/random/R\n" in unexpected
    assert "params/encoder/layers/mlp/wi: (2, 16, 32) in the checkpoint, (2, 16, 48) wanted" in different


def test_another_model_is_refused_field_by_field(saved):
    wanted = dataclasses.replace(CONFIG, heads=2, dropout_rate=0.3, mlp_activation="gated-gelu")
    with pytest.raises(ValueError) as error:
        checkpoint.restore_params(saved, config=wanted)
    assert "heads: 4 in the checkpoint, 2 now" in str(error.value)
    assert "mlp_activation: relu in the checkpoint, gated-gelu now" in str(error.value)
    assert "dropout" not in str(error.value)


def test_paths_that_are_no_checkpoint(tmp_path, saved):
    with pytest.raises(ValueError, match="nowhere' does not exist"):
        checkpoint.find(str(tmp_path / "nowhere"))
    with pytest.raises(
        ValueError, match=r"is neither a checkpoint .* nor a model_dir that holds one: no checkpoint_<step>"
    ):
        checkpoint.find(str(tmp_path))
    (tmp_path / "checkpoint_5.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(ValueError, match="only unfinished or damaged ones: checkpoint_5.orbax-checkpoint-tmp"):
        checkpoint.find(str(tmp_path))
    with pytest.raises(ValueError, match="is neither a checkpoint"):
        checkpoint.find(os.path.join(saved, "checkpoint_7", "state"))


@pytest.mark.parametrize("keep", [0, -1, "3"])
def test_wrong_keep(tmp_path, keep):
    with pytest.raises(ValueError, match="keep: expected a number of checkpoints >= 1, or None for all, got"):
        CheckpointWriter(str(tmp_path), keep=keep)
    with pytest.raises(ValueError, match="keep_period: expected a number of steps >= 1, or None, got"):
        CheckpointWriter(str(tmp_path), keep_period=keep)


WRITER = """
    import sys, time, jax.numpy as jnp
    from synthesizer_jax.models import t5_tiny
    from synthesizer_jax.training.checkpoint import CheckpointWriter

    with CheckpointWriter(sys.argv[1], keep=2) as writer:
        for step in range(int(sys.argv[2]), 1000):
            state = {f"x{i}": jnp.full((300, 300), float(step)) for i in range(20)}
            writer.save(step, state, t5_tiny(), {"step": step})
            print(step, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path):
    rng = np.random.default_rng()  # another moment each time the tests run
    target = {f"x{i}": jax.ShapeDtypeStruct((300, 300), jnp.float32, sharding=jnp.zeros(1).sharding) for i in range(20)}
    step = -1
    for _ in range(3):
        script = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path / "model"), str(step + 1)]
        with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(2 + rng.integers(3)):
                process.stdout.readline()
            try:
                process.wait(rng.uniform(0, 0.1))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        names = [path.name for path in (tmp_path / "model").iterdir()]
        for name in names:
            number = checkpoint.step_of(name)
            if number is not None:
                restored = checkpoint.restore(tmp_path / "model" / name, target)
                assert all(np.all(x == number) for x in restored.values())
                assert checkpoint.read_run(tmp_path / "model" / name) == {"step": number}
        step = checkpoint.step_of(checkpoint.latest(tmp_path / "model")) + 1
        with CheckpointWriter(str(tmp_path / "model"), keep=2) as writer:  # cleans up and goes on
            writer.save(step, {name: jnp.full((300, 300), float(step)) for name in target}, CONFIG, {"step": step})
        assert not [path.name for path in (tmp_path / "model").iterdir() if "tmp" in path.name]


def test_a_full_disk_is_told_at_the_next_step_and_what_was_there_stays(tmp_path, caplog):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    text = f"model_dir: checkpoint_2 could not be written to {tmp_path}: File too large; .* checkpoint is checkpoint_1; make"
    with CheckpointWriter(str(tmp_path), keep=1) as writer:
        writer.save(1, {"x": jnp.zeros(3)}, CONFIG, RUN)
        writer.wait()
        writer.check()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))  # as good as a full disk
            writer.save(2, {"x": np.random.default_rng(0).normal(size=500_000)}, CONFIG, RUN)
            while writer._manager.is_saving_in_progress():
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        with pytest.raises(OSError, match=text):
            writer.check()
    assert not caplog.records  # pages of tracebacks
    assert checkpoint.find(tmp_path).name == "checkpoint_1"
    with CheckpointWriter(str(tmp_path), keep=1) as writer:  # room was made
        writer.save(2, {"x": jnp.zeros(3)}, CONFIG, RUN)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_2"]


def test_a_folder_that_cannot_be_written_any_more_is_told_at_once(tmp_path):
    folder, before = tmp_path / "run", threading.enumerate()
    text = (
        f"model_dir: checkpoint_2 could not be written to {folder}: Not a directory: .*; there is no whole checkpoint; "
    )
    with pytest.raises(OSError, match=text):
        with CheckpointWriter(str(folder)) as writer:
            writer.save(1, {"x": jnp.zeros(3)}, CONFIG, RUN)
            writer.wait()
            shutil.rmtree(folder)
            folder.write_text("in the way")  # permissions would not keep root from writing
            writer.save(2, {"x": jnp.zeros(3)}, CONFIG, RUN)
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in left:
        thread.join(5)
    assert not any(thread.is_alive() for thread in left)  # the process would wait for them


def test_the_checks_are_part_of_the_write(tmp_path, monkeypatch):
    """A checkpoint whose checks.json cannot be written does not appear."""
    with pytest.raises(
        OSError, match="checkpoint_1 could not be written to .*: No space left on device; there is no whole"
    ):
        with CheckpointWriter(str(tmp_path)) as writer:

            def full(*_):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            monkeypatch.setattr(checkpoint.integrity, "write", full)
            writer.save(1, {"x": jnp.zeros(3)}, CONFIG, RUN)
    assert checkpoint.latest(tmp_path) is None and not checkpoint.exists(tmp_path)
