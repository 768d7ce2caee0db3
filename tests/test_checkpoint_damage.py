"""Damaged checkpoints: recognised, named, passed over for the last whole one, moved aside, and never deleted."""

import functools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from synthesizer_jax.models import t5_tiny
from synthesizer_jax.sharding import MeshShape, named_leaves
from synthesizer_jax.training import checkpoint, integrity, restoring
from synthesizer_jax.training.checkpoint import CheckpointWriter
from synthesizer_jax.training.integrity import Damaged
from synthesizer_jax.training.optimizer import Adafactor, Constant
from synthesizer_jax.training.step import Trainer

CONFIG = t5_tiny("fixedR+V", max_length=12, features=16, mlp_features=32, heads=4, head_dim=8, vocab_size=32)


@functools.cache
def make_trainer():
    return Trainer(CONFIG, Adafactor(Constant(1e-2), min_size_to_factor=8), MeshShape().build(jax.devices()[:1]))


@pytest.fixture(scope="module")
def trainer():
    return make_trainer()


def filled(trainer, value):
    """A state of random bits, which compression leaves as they are."""
    rng = np.random.default_rng(value)
    fill = lambda leaf: rng.integers(0, 2**32, leaf.shape, np.uint32).view(leaf.dtype)  # noqa: E731
    return jax.tree.map(fill, trainer.abstract_state())


def write_two(trainer, folder):
    with CheckpointWriter(str(folder)) as writer:
        for step in (10, 20):
            writer.save(step, filled(trainer, step), CONFIG, {"step": step})
    return folder


@pytest.fixture(scope="module")
def made(trainer, tmp_path_factory):
    return write_two(trainer, tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def made_of_large_files(trainer, tmp_path_factory):
    """As if every file were too large for a CRC: only sizes and fingerprints tell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integrity, "SMALL", 0)
        return write_two(trainer, tmp_path_factory.mktemp("large"))


@pytest.fixture
def two(made, tmp_path):
    """A model_dir with checkpoint_10 and checkpoint_20, to be spoiled."""
    return shutil.copytree(made, tmp_path / "run")


@pytest.fixture
def two_large(made_of_large_files, tmp_path):
    return shutil.copytree(made_of_large_files, tmp_path / "run")


def place_of_data(folder):
    """The file, and the place in it, where a row of the embedding is."""
    row = filled(make_trainer(), checkpoint.step_of(folder)).params["embedding"]["embedding"][7].tobytes()
    (found,) = [path for path in folder.glob("state/ocdbt.process_0/d/*") if row in path.read_bytes()]
    return found, found.read_bytes().index(row)


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def flip_head(path, place):
    """Of the frame of compressed data before a place."""
    flip(path, path.read_bytes().rindex(b"\x28\xb5\x2f\xfd", 0, place))


def cut(path, place):
    path.write_bytes(path.read_bytes()[:place])


def rename_in_checks(folder, name):
    path = folder / "checks.json"
    path.write_text(path.read_text().replace(name, name.upper(), 1))


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


SEEN_AT_ONCE = {
    "metadata gone": (lambda c: (c / "state/_METADATA").unlink(), "state/_METADATA is missing"),
    "manifest gone": (lambda c: (c / "state/manifest.ocdbt").unlink(), "state/manifest.ocdbt is missing"),
    "data gone": (lambda c: place_of_data(c)[0].unlink(), r"state/ocdbt.process_0/d/\w+ is missing"),
    "data cut": (lambda c: cut(*place_of_data(c)), r"state/.*/\w+ has \d+ bytes, where \d+ were written"),
    "data changed": (lambda c: flip(*place_of_data(c)), r"state/.*/\w+ has other bytes than were written"),
    "configuration changed": (lambda c: flip(c / "model/metadata", 50), "model/metadata has other bytes than"),
    "empty folder": (empty, "it has no state/, model/, run/"),
    "no model": (lambda c: shutil.rmtree(c / "model"), "it has no model/"),
    "no run": (lambda c: shutil.rmtree(c / "run"), "it has no run/"),
    "no run's file": (lambda c: (c / "run/metadata").unlink(), "run/metadata is missing"),
    "checks no JSON": (lambda c: flip(c / "checks.json", 0), "checks.json is not what was written"),
    "checks of nothing": (lambda c: (c / "checks.json").write_text("[]"), "checks.json is not what was written"),
    "checks changed": (lambda c: rename_in_checks(c, "fingerprint"), "checks.json is not what was written"),
}


@pytest.mark.parametrize("name", SEEN_AT_ONCE)
def test_damage_that_shows_at_once(trainer, two, capfd, name):
    spoil, reason = SEEN_AT_ONCE[name]
    spoil(two / "checkpoint_20")
    assert checkpoint.find(two) == checkpoint.latest(two) == two / "checkpoint_10"
    assert len(checkpoint.damaged(two)) == 1
    check_passed_over(trainer, two, capfd, reason)
    with pytest.raises(Damaged, match=f"checkpoint_20 is damaged: {reason}"):
        checkpoint.find(two / "checkpoint_20")


def check_passed_over(trainer, two, capfd, reason):
    before = sorted(path.name for path in two.iterdir())
    _, params, fixed = checkpoint.restore_params(two, trainer.mesh)
    assert_equal_trees(params, filled(trainer, 10).params)
    assert_equal_trees(fixed, filled(trainer, 10).fixed)
    said = capfd.readouterr().err
    assert re.search(f"checkpoint_20 is damaged: {reason}.*; checkpoint_10 is taken instead", said), said
    with pytest.raises(Damaged, match=f"checkpoint_20 is damaged: {reason}.*; give another one, or .*run for the last"):
        checkpoint.restore_params(two / "checkpoint_20", trainer.mesh)
    assert sorted(path.name for path in two.iterdir()) == before


def assert_equal_trees(a, b):
    for (name, one), (other_name, other) in zip(named_leaves(a), named_leaves(b), strict=True):
        assert name == other_name
        np.testing.assert_array_equal(one, other, err_msg=name)


def take_state(folder, other):
    """Files and all; so only the fingerprints tell."""
    shutil.rmtree(folder / "state")
    shutil.copytree(other / "state", folder / "state")
    own, others = integrity.read_checks(folder), integrity.read_checks(other)
    files = {name: entry for name, entry in own["files"].items() if not name.startswith("state/")}
    files |= {name: entry for name, entry in others["files"].items() if name.startswith("state/")}
    integrity.write_checks(folder, own["arrays"], files)


def without_checks(folder):
    (folder / "checks.json").unlink()


SEEN_WHEN_READ = {
    "a bit of an array": (
        lambda c: flip(*place_of_data(c)),
        r"other values than were saved in params/embedding/embedding",
    ),
    "compression's head": (lambda c: flip_head(*place_of_data(c)), ".*params.embedding.embedding/.*Unknown frame"),
    "arrays of another checkpoint": (
        lambda c: take_state(c, c.parent / "checkpoint_10"),
        "other values than were saved",
    ),
    "cut, of an earlier version": (lambda c: (without_checks(c), cut(*place_of_data(c))), ".*[Rr]ange"),
    "no metadata, of an earlier version": (
        lambda c: (without_checks(c), (c / "state/manifest.ocdbt").unlink()),
        ".*does not exist",
    ),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of reads that were given up
@pytest.mark.parametrize("name", SEEN_WHEN_READ)
def test_damage_that_shows_when_it_is_read(trainer, two_large, capfd, name):
    spoil, reason = SEEN_WHEN_READ[name]
    spoil(two_large / "checkpoint_20")
    check_passed_over(trainer, two_large, capfd, reason)
    with pytest.raises(Damaged):
        checkpoint.restore(two_large / "checkpoint_20", trainer.abstract_state())


def test_training_begins_with_the_parameters_of_the_last_whole_checkpoint(trainer, two_large):
    flip(*place_of_data(two_large / "checkpoint_20"))
    params, fixed = checkpoint.initial_params(two_large, trainer.mesh, CONFIG, seed=0)
    assert_equal_trees(params, filled(trainer, 10).params)
    assert_equal_trees(fixed, filled(trainer, 10).fixed)


def test_a_second_damaged_checkpoint_of_a_step_gets_a_name_of_its_own(two):
    empty(two / "checkpoint_20")
    (two / "checkpoint_20.damaged").mkdir()
    with CheckpointWriter(str(two)) as writer:
        writer.set_aside_after(10)
        writer.save(20, {"x": np.zeros(3)}, CONFIG, {})
    names = ["checkpoint_10", "checkpoint_20", "checkpoint_20.damaged", "checkpoint_20.damaged.1"]
    assert sorted(path.name for path in two.iterdir()) == names


def test_where_all_are_damaged_nothing_is_begun_anew(two):
    for step in (10, 20):
        (two / f"checkpoint_{step}/state/_METADATA").unlink()
    text = "every checkpoint in .*run is damaged; .*\n  checkpoint_20: state/_METADATA is missing\n  checkpoint_10: "
    with pytest.raises(ValueError, match=text):
        checkpoint.find(two)
    with pytest.raises(ValueError, match=text):
        checkpoint.use(two, lambda found: found)
    assert sorted(path.name for path in two.iterdir()) == ["checkpoint_10", "checkpoint_20"]


def test_what_is_no_damage_is_raised_as_it_is(two):
    def read(found):
        raise ValueError("another model")

    with pytest.raises(ValueError, match="^another model$"):
        checkpoint.use(two, read)


@pytest.mark.parametrize("error", [PermissionError("denied"), ValueError("UNAVAILABLE: later"), MemoryError()])
def test_a_file_system_that_may_recover_is_no_damage(trainer, two, monkeypatch, error):
    def fails(*args, **kwargs):
        raise Exception("while reading") from error

    monkeypatch.setattr(restoring.ocp.PyTreeCheckpointHandler, "restore", fails)
    with pytest.raises(Exception, match="while reading") as raised:
        checkpoint.restore_params(two, trainer.mesh)
    assert not isinstance(raised.value, Damaged)


def test_an_earlier_versions_checkpoint_is_restored_unchecked(trainer, two):
    without_checks(two / "checkpoint_20")
    restored = checkpoint.restore(checkpoint.find(two), trainer.abstract_state())
    assert_equal_trees(restored, filled(trainer, 20))
    (two / "checkpoint_20/run/metadata").write_text("{")
    assert checkpoint.damaged(two) == [f"{two}/checkpoint_20 is damaged: run/metadata is not JSON"]


@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(data=2, fsdp=2, model=2), MeshShape(model=4)])
def test_fingerprints_do_not_depend_on_where_an_array_is(shape, monkeypatch):
    mesh = shape.build()
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.normal(size=(8, 4, 6)).astype(np.float32),
        "b": rng.normal(size=(16,)).astype(jnp.bfloat16),
        "c": np.int32(7),
        "d": rng.integers(0, 2, (4, 8)).astype(np.bool_),
        "e": np.zeros((3, 0), np.float32),
    }
    specs = {"a": P("model", None, None), "b": P(("data", "fsdp")), "c": P(), "d": P(None, "model"), "e": P()}
    placed = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in arrays.items()}
    whole = integrity.fingerprints(arrays)
    assert integrity.fingerprints(placed) == whole
    assert integrity.fingerprints(jax.device_put(arrays, mesh.devices.flat[1])) == whole

    def as_on_accelerators(array):
        return integrity._on_devices(
            array, {shard.device for shard in array.addressable_shards if not shard.replica_id}
        )

    monkeypatch.setattr(integrity, "_begun", as_on_accelerators)
    assert integrity.fingerprints(placed) == whole
    assert integrity.fingerprints(jax.device_put(arrays, mesh.devices.flat[1])) == whole


def test_a_fingerprint_is_of_every_bit_and_its_place(monkeypatch):
    array = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    changed = [array, array[::-1], array.T, array.reshape(7, 5), -array, np.roll(array, 1, axis=1)]
    for bit in range(32):
        other = array.copy()
        other.view(np.uint32)[3, 4] ^= np.uint32(1 << bit)
        changed.append(other)
    taken = [integrity.fingerprints({"x": each})["x"] for each in changed]
    assert len(set(taken)) == len(changed) - 1 and taken[0] == taken[3]  # a shape is recorded beside it
    monkeypatch.setattr(integrity, "SMALL", 8)  # bytes at once
    assert integrity.fingerprints({"x": array})["x"] == taken[0]
