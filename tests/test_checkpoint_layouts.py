"""One state in any layout and dtype: scanned and one-by-one layers, float32 and bfloat16, on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_checkpoint import SIZES, assert_equal_states

from synthesizer_jax.models import classifier_tiny, lm_tiny, parameters, t5_tiny
from synthesizer_jax.sharding import MeshShape, Rules, named_leaves
from synthesizer_jax.training import checkpoint, layouts, restoring
from synthesizer_jax.training.checkpoint import CheckpointWriter
from synthesizer_jax.training.optimizer import Adafactor, AdamW, Constant
from synthesizer_jax.training.step import Trainer

STACKED = t5_tiny("fixedR+V", max_length=12, **SIZES)
ONE_BY_ONE = dataclasses.replace(STACKED, scan_layers=False)
OPTIMIZERS = {"Adafactor": Adafactor(Constant(1e-2), min_size_to_factor=8), "AdamW": AdamW(Constant())}
MESHES = {
    "one device": MeshShape().build(jax.devices()[:1]),
    "eight": MeshShape(data=2, fsdp=2, model=2).build(jax.devices()[:8]),
}


def make(config, optimizer="Adafactor", mesh="one device", **changes):
    return Trainer(dataclasses.replace(config, **changes), OPTIMIZERS[optimizer], MESHES[mesh])


def filled(trainer):
    """A state of whole numbers that bfloat16 holds, no two of them alike in neighbouring arrays or layers."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: rng.integers(-128, 128, leaf.shape).astype(np.float32).astype(leaf.dtype),
        trainer.abstract_state(),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(config, optimizer) -> (the state, its model_dir)."""
    made = {}

    def get(config, optimizer):
        key = (config.scan_layers, optimizer)
        if key not in made:
            folder, trainer = tmp_path_factory.mktemp("model"), make(config, optimizer, "eight")
            state = filled(trainer)
            placed = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, trainer.abstract_state()))
            with CheckpointWriter(str(folder)) as writer:
                writer.save(7, placed, config, {})
            made[key] = state, folder
        return made[key]

    return get


def by_hand(state, like):
    """The numbers of a state in the structure of `like`, found layer by layer: no code of layouts.py."""
    values = dict(named_leaves(state))

    def find(name):
        if name in values:
            return values[name]
        before, _, after = name.partition("/layers/")
        index, _, rest = after.partition("/")
        if index.isdigit():
            return values[f"{before}/layers/{rest}"][int(index)]
        return np.stack([values[f"{before}/layers/{layer}/{after}"] for layer in range(2)])

    return {name: find(name) for name, _ in named_leaves(like)}


def assert_restored(restored, state, target):
    expected, wanted = by_hand(state, target), dict(named_leaves(target))
    found = dict(named_leaves(restored))
    assert list(found) == list(expected)
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name].astype(array.dtype), err_msg=name)
        assert array.dtype == wanted[name].dtype, name
        assert array.sharding.is_equivalent_to(wanted[name].sharding, array.ndim), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("config,other", [(STACKED, ONE_BY_ONE), (ONE_BY_ONE, STACKED)], ids=["apart", "stacked"])
def test_a_state_of_the_other_layout(saved, capfd, config, other, mesh, optimizer):
    state, folder = saved(config, optimizer)
    target = make(other, optimizer, mesh).abstract_state()
    restored = checkpoint.restore(checkpoint.find(folder), target)
    assert_restored(restored, state, target)
    how = "taken apart" if config.scan_layers else "stacked"
    assert f"the layers of checkpoint_7 are {how}: " in capfd.readouterr().err
    checkpoint.check_same_model(checkpoint.find(folder), other)


def test_no_device_reads_more_than_its_part(saved, monkeypatch):
    """Fully sharded kernels stay so: what is read for another layout or dtype has no larger shards than what is wanted."""
    _, folder = saved(STACKED, "Adafactor")
    read, original = [], restoring._read
    monkeypatch.setattr(restoring, "_read", lambda c, arrays: read.append(dict(arrays)) or original(c, arrays))
    monkeypatch.setattr(restoring, "AT_ONCE", 10_000)
    target = make(ONE_BY_ONE, mesh="eight", param_dtype="bfloat16").abstract_state()
    checkpoint.restore(checkpoint.find(folder), target)
    name = "params/encoder/layers/mlp/wi"
    (leaf,) = [arrays[name] for arrays in read if name in arrays]
    assert leaf.sharding.shard_shape(leaf.shape) == (2, 8, 16) and leaf.shape == (2, 16, 32)
    sizes = [sum(leaf.size * leaf.dtype.itemsize for leaf in arrays.values()) for arrays in read[1:]]
    assert len(sizes) > 3 and all(
        size <= 10_000 or len(arrays) == 1 for size, arrays in zip(sizes, read[1:], strict=True)
    )


def test_a_run_goes_on_in_the_other_layout_as_if_it_had_always_been_in_it(tmp_path):
    """Initial values are the same in both layouts, so a step after a change must be the step of a run without one."""
    stacked = lm_tiny("R+V", max_length=12, dropout_rate=0.0, **SIZES)
    before, always = make(stacked), make(stacked, scan_layers=False)
    batch = {
        "decoder_target_tokens": np.arange(96, dtype=np.int32).reshape(8, 12) % 30 + 1,
        "decoder_input_tokens": np.full((8, 12), 5, np.int32),
        "decoder_loss_weights": np.ones((8, 12), np.int32),
    }
    with CheckpointWriter(str(tmp_path)) as writer:
        writer.save(0, before.init(), before.config, {})
    resumed = checkpoint.restore(checkpoint.find(tmp_path), always.abstract_state())
    step = always.train_step()
    one, _ = step(resumed, batch)
    other, _ = step(always.init(), batch)
    assert_equal_states(one, other)
    with CheckpointWriter(str(tmp_path)) as writer:
        writer.save(1, one, always.config, {})
    there = checkpoint.restore(checkpoint.find(tmp_path), before.abstract_state())
    with CheckpointWriter(str(tmp_path)) as writer:
        writer.save(2, there, before.config, {})
    assert_equal_states(checkpoint.restore(checkpoint.find(tmp_path), always.abstract_state()), other)


@pytest.mark.parametrize("then,now", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_parameters_and_moments_of_another_dtype(tmp_path, capfd, then, now):
    before, after = make(STACKED, "AdamW", param_dtype=then), make(ONE_BY_ONE, "AdamW", "eight", param_dtype=now)
    before = dataclasses.replace(before, optimizer=AdamW(Constant(), moment_dtype=then))
    after = dataclasses.replace(after, optimizer=AdamW(Constant(), moment_dtype=now))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: (rng.normal(size=leaf.shape) * 100).astype(leaf.dtype), before.abstract_state())
    with CheckpointWriter(str(tmp_path)) as writer:
        writer.save(7, state, before.config, {})
    target = after.abstract_state()
    restored = checkpoint.restore(checkpoint.find(tmp_path), target)
    assert_restored(restored, state, target)
    assert f"arrays of checkpoint_7 are {then} and become {now}" in capfd.readouterr().err
    config, params, _ = checkpoint.restore_params(tmp_path, config=after.config)
    assert config == after.config and params["embedding"]["embedding"].dtype == jnp.dtype(now)
    moments = {str(leaf.dtype) for name, leaf in named_leaves(restored.opt_state) if "/mu/" in name}
    assert moments == {now}
    assert restored.step.dtype == jnp.int32 and int(restored.step) == int(state.step)


def test_parameters_alone_and_an_encoder_from_the_other_layout(saved):
    state, folder = saved(STACKED, "Adafactor")
    _, params, fixed = checkpoint.restore_params(folder, MESHES["eight"], ONE_BY_ONE)
    expected = by_hand({"params": state.params, "fixed": state.fixed}, {"params": params, "fixed": fixed})
    assert_equal_states(dict(named_leaves({"params": params, "fixed": fixed})), expected)
    classifier = classifier_tiny(3, "fixedR+V", max_length=12, scan_layers=False, **SIZES)
    trained, _ = checkpoint.initial_params(folder, MESHES["one device"], classifier, seed=0)
    wi = trained["encoder"]["layers"]["1"]["mlp"]["wi"]
    np.testing.assert_array_equal(wi, state.params["encoder"]["layers"]["mlp"]["wi"][1])


def test_training_begins_from_a_checkpoint_by_rules_of_ones_own(saved):
    """Heads that do not divide over eight devices stay whole: what is read is split as the run's rules say."""
    _, folder = saved(STACKED, "Adafactor")
    mesh, rules = MeshShape(data=1, model=8).build(jax.devices()[:8]), Rules({"heads": None})
    for config in (STACKED, classifier_tiny(3, "fixedR+V", max_length=12, **SIZES)):
        trained, _ = checkpoint.initial_params(folder, mesh, config, seed=0, rules=rules)
        assert trained["embedding"]["embedding"].sharding.spec[0] == "model"
        assert "model" not in trained["encoder"]["layers"]["attention"]["value"].sharding.spec


def test_layers_that_are_not_alike_are_not_stacked(tmp_path):
    """Of a checkpoint whose layers have other shapes, the lists tell, after the fields."""
    unlike = {f"encoder/layers/{layer}/x": np.zeros(3 + layer, np.float32) for layer in range(2)}
    with CheckpointWriter(str(tmp_path)) as writer:
        writer.save(1, restoring.nested(unlike), STACKED, {})
    device = MESHES["one device"].devices.flat[0]
    target = {"encoder": {"layers": {"x": jax.device_put(np.zeros((2, 3), np.float32), device)}}}
    with pytest.raises(
        ValueError, match="(?s)missing .*:\n    encoder/layers/x\n  unexpected .*:\n    encoder/layers/0/x"
    ):
        checkpoint.restore(checkpoint.find(tmp_path), jax.tree.map(shaped, target))


def shaped(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


@pytest.mark.parametrize(
    "change,field,array",
    [
        ({"heads": 2}, "heads: 4 in the checkpoint, 2 now", "attention/out: (2, 4, 8, 16) in the checkpoint, (2, 2, 8, 16) wanted"),
        (
            {f"{stack}_attention": t5_tiny("fixedR+V", max_length=20).encoder_attention for stack in ("encoder", "decoder")},
            "encoder_attention: ",
            "fixed/encoder/layers/attention/scores/random/R: (2, 4, 12, 12) in the checkpoint, (2, 4, 20, 20) wanted",
        ),
        ({"encoder_layers": 3, "scan_layers": False}, "encoder_layers: 2 in the checkpoint, 3 now", "  params/encoder/layers/2/mlp/wi"),
        ({"mlp_activation": "gated-gelu"}, "mlp_activation: relu in the checkpoint, gated-gelu now", "mlp/"),
    ],
)  # fmt: skip
def test_another_model_is_refused_with_its_fields_and_then_the_arrays(saved, change, field, array):
    _, folder = saved(STACKED, "Adafactor")
    other = dataclasses.replace(STACKED, **change)
    for refused in (
        lambda: checkpoint.restore_params(folder, MESHES["one device"], other),
        lambda: checkpoint.initial_params(folder, MESHES["one device"], other, seed=0),
    ):
        with pytest.raises(ValueError, match="checkpoint_7 holds another model:\n") as error:
            refused()
        text = str(error.value)
        assert 0 < text.index(field) < text.index(array)


def test_whole_numbers_and_floats_are_not_taken_for_one_another(tmp_path):
    with CheckpointWriter(str(tmp_path)) as writer:
        writer.save(1, {"x": np.zeros(3, np.int32)}, STACKED, {})
    target = {"x": shaped(jax.device_put(np.zeros(3, np.float32), jax.devices()[0]))}
    with pytest.raises(ValueError, match="x: int32 in the checkpoint, float32 wanted"):
        checkpoint.restore(checkpoint.find(tmp_path), target)


def test_names_of_layers():
    """Of arrays that stand alone, of both layouts, and of what only looks like one."""
    shape = jax.ShapeDtypeStruct((2, 3), np.float32)
    saved = dict.fromkeys(
        ["embedding", "decoder/layers/mlp/wi", "mu/layers/0/b", "mu/layers/1/b", "my_layers/0/c"], shape
    )
    wanted = ["embedding", "decoder/layers/0/mlp/wi", "decoder/layers/1/mlp/wi", "mu/layers/b", "my_layers/c"]
    found = {part.wanted: part for part in layouts.parts(saved, wanted)}
    assert found["decoder/layers/0/mlp/wi", "decoder/layers/1/mlp/wi"].how == "taken apart"
    assert found[("mu/layers/b",)].saved == ("mu/layers/0/b", "mu/layers/1/b")
    assert found[("my_layers/0/c",)].how == "as it is" and found[("embedding",)].how == "as it is"


def test_every_array_of_a_layer_has_a_counterpart():
    """For all that a model has, whatever its attention: names and shapes of one layout become those of the other."""
    trees = [
        dict(named_leaves(parameters.abstract(dataclasses.replace(STACKED, scan_layers=scan))))
        for scan in (True, False)
    ]
    for saved, wanted in (trees, reversed(trees)):
        assert restoring.mismatches(saved, wanted) == ""
