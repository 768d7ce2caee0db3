"""Training on 8 devices, however they are arranged, is training on one: initial values, 20 steps, real shardings."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from synthesizer_jax import activations, sharding
from synthesizer_jax.analysis.collectives import collectives
from synthesizer_jax.analysis.hlo import Module
from synthesizer_jax.analysis.traffic import executed
from synthesizer_jax.models import t5_tiny
from synthesizer_jax.sharding import MeshShape, Rules, named_leaves, place_batch
from synthesizer_jax.training.optimizer import Adafactor, AdamW, Constant
from synthesizer_jax.training.step import Trainer

ROWS, LENGTH, TARGETS, VOCAB, STEPS = 8, 16, 8, 64, 20
MESHES = {
    "8x1": MeshShape(),
    "4x2": MeshShape(model=2),
    "2x4": MeshShape(model=4),
    "1x8": MeshShape(model=8),
    "fsdp 8": MeshShape(fsdp=8),
    "fsdp 4, model 2": MeshShape(fsdp=4, model=2),
    "data 2, fsdp 2, model 2": MeshShape(data=2, fsdp=2, model=2),
}


# Adafactor and Adam divide a gradient by its size, which makes whole steps of what is 0 but for rounding. With this epsilon
# a step is at most as far off as the gradient, so that equal gradients are equal parameters.
SMOOTH = AdamW(Constant(1e-3), epsilon=1e-3)
ADAFACTOR = Adafactor(Constant(1e-3), min_size_to_factor=8)


def trainer(attention, shape, devices=8, optimizer=SMOOTH, **settings):
    config = t5_tiny(
        attention,
        max_length=LENGTH,
        features=16,
        mlp_features=32,
        heads=8,
        head_dim=4,
        vocab_size=VOCAB,
        encoder_layers=1,
        decoder_layers=1,
        dropout_rate=0.1,
    )
    return Trainer(config, optimizer, shape.build(jax.devices()[:devices]), **settings)


def batch(step):
    rng = np.random.default_rng(step)
    inputs = rng.integers(2, VOCAB, (ROWS, LENGTH), dtype=np.int32)
    targets = rng.integers(2, VOCAB, (ROWS, TARGETS), dtype=np.int32)
    inputs[::2, 11:], targets[1::2, 5:] = 0, 0
    return {
        "encoder_input_tokens": inputs,
        "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
        "decoder_target_tokens": targets,
        "decoder_loss_weights": (targets > 0).astype(np.int32),
    }


def run(made):
    """(initial state, losses per target, final state), on the host, after the shardings were looked at."""
    state, step = made.init(), made.train_step()
    check_shardings(made, state)
    first, losses = jax.device_get(state), []
    for number in range(STEPS):
        state, metrics = step(state, place_batch(made.mesh, batch(number)))
        losses.append(float(metrics["loss"] / metrics["weight"]))
    check_shardings(made, state)
    return first, losses, jax.device_get(state)


def check_shardings(made, state):
    for (name, array), (_, wanted) in zip(named_leaves(state), named_leaves(made.abstract_state()), strict=True):
        assert array.sharding.is_equivalent_to(wanted.sharding, array.ndim), name


@functools.cache
def on_one_device(attention, optimizer=SMOOTH):
    return run(trainer(attention, MeshShape(), devices=1, optimizer=optimizer))


# Every mesh with R+V, every other form of scores on the mesh that splits most.
ALL_AXES = "data 2, fsdp 2, model 2"
QUICK = [("R+V", ALL_AXES)]
CASES = (
    [("R+V", mesh) for mesh in MESHES] + [(attention, ALL_AXES) for attention in ("V", "R", "FR+V")] + [("D", "fsdp 8")]
)
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=", ".join(case)) for case in CASES]


@pytest.mark.parametrize("attention,mesh", CASES)
def test_twenty_steps_on_eight_devices_are_those_on_one(attention, mesh):
    start, losses, end = on_one_device(attention)
    start8, losses8, end8 = run(trainer(attention, MESHES[mesh]))
    for (name, one), (_, other) in zip(named_leaves(start), named_leaves(start8), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)
    np.testing.assert_allclose(losses8, losses, rtol=1e-5)
    for (name, one), (_, other) in zip(named_leaves(end.params), named_leaves(end8.params), strict=True):
        assert np.linalg.norm(other - one) <= 1e-5 * np.linalg.norm(one), name


@pytest.mark.slow
def test_adafactor_keeps_its_statistics_in_parts():
    """No device holds more than its part of parameters and of what the optimizer keeps, and 20 steps have the same loss."""
    made = trainer("R+V", MESHES[ALL_AXES], optimizer=ADAFACTOR)
    _, losses, _ = run(made)
    np.testing.assert_allclose(losses, on_one_device("R+V", ADAFACTOR)[1], rtol=1e-5)
    state = made.init()
    shards = {name: array.addressable_shards[0].data.shape for name, array in named_leaves(state)}
    layer = "params/encoder/layers/attention"
    assert shards[f"{layer}/value"] == (1, 8, 4, 4)  # [layers, e / fsdp, h / model, d]
    assert shards[f"{layer}/scores/random/R"] == (1, 4, 8, 16)  # [layers, h / model, n / fsdp, n]
    assert shards["params/embedding/embedding"] == (32, 8)
    statistics = {name: shape for name, shape in shards.items() if "v_row" in name or "v_col" in name}
    assert statistics[next(n for n in statistics if "v_row" in n and n.endswith("embedding/embedding"))] == (8,)
    assert statistics[next(n for n in statistics if "v_col" in n and n.endswith("embedding/embedding"))] == (32,)


@pytest.mark.parametrize("shape", [MeshShape(data=2, fsdp=4), MeshShape(data=2, fsdp=2, model=2)], ids=str)
def test_activations_of_the_whole_batch_are_on_no_device(shape, capfd):
    """Nothing is gathered over the data axis, and the partitioner finds a way for every array."""
    made = trainer("R+V", shape)
    rows = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch(0).items()}
    module = Module.parse(made.train_step().lower(made.abstract_state(), rows).compile().as_text())
    found = collectives(module, executed(module), dict(made.mesh.shape))
    assert {one.kind for one in found if "fsdp" in one.axes} >= {"all-gather", "all-reduce", "all-to-all"}
    assert not [one for one in found if one.kind == "all-gather" and "data" in one.axes]
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


def test_rules_of_ones_own():
    """The table and single parameters can be split in another way, and the optimizer's statistics follow."""
    shape = MeshShape(data=2, fsdp=2, model=2)
    by_key = {"heads": None, "synth_query": None, "synth_key": "model"}
    rules = Rules({"mlp": None}, {"decoder/.*/scores/random/R": by_key})
    made = trainer("R+V", shape, rules=rules)
    specs = {name: tuple(leaf.sharding.spec) for name, leaf in named_leaves(made.abstract_state())}
    assert specs["params/decoder/layers/attention/scores/random/R"] == (None, None, None, "model")
    assert specs["params/encoder/layers/attention/scores/random/R"] == (None, "model", "fsdp", None)
    assert specs["params/encoder/layers/mlp/wi"] == (None, "fsdp", None)
    kept = [
        spec
        for name, spec in specs.items()
        if name.startswith("opt_state") and name.endswith("/R") and "decoder" in name
    ]
    assert (None, None, "model") in kept or (None, None, None, "model") in kept
    _, losses, _ = on_one_device("R+V")
    state, metrics = made.train_step()(made.init(), place_batch(made.mesh, batch(0)))
    check_shardings(made, state)
    np.testing.assert_allclose(metrics["loss"] / metrics["weight"], losses[0], rtol=1e-5)


@pytest.mark.parametrize(
    "arguments,text",
    [
        (({"head": "model"},), r"Rules.axes: unknown logical axis 'head'; known: batch, vocab"),
        (
            ({"heads": "modell"},),
            r"Rules.axes\['heads'\]: unknown mesh axis 'modell'; known: data, fsdp, model, or None",
        ),
        (({"batch": None},), r"Rules.axes: the batch is split over data and fsdp in any case; leave 'batch' out"),
        (([],), r"Rules.axes: expected logical axis -> mesh axis, such as .*, got \[\]"),
        (({}, {"(": {}}), r"Rules.parameters: '\(' is no regular expression"),
        (({}, {".*/R": {"head": None}}), r"Rules.parameters\['\.\*/R'\]: unknown logical axis 'head'"),
    ],
)
def test_wrong_rules(arguments, text):
    with pytest.raises(ValueError, match=text):
        Rules(*arguments)


def test_rules_for_no_parameter():
    made = trainer("V", MeshShape(), rules=Rules(parameters={"encoder/R": {"heads": None}}))
    with pytest.raises(
        ValueError,
        match="Rules.parameters: 'encoder/R' matches no parameter; paths are such as decoder/final_norm/scale",
    ):
        made.abstract_state()


def test_an_axis_that_does_not_divide_says_how_to_leave_it_whole():
    with pytest.raises(ValueError, match=r"axis 'synth_query' of size 12 does not divide over fsdp=8; .*Rules\(axes="):
        Trainer(
            t5_tiny("R", max_length=12, features=16, mlp_features=32, heads=8, head_dim=4, vocab_size=VOCAB),
            Adafactor(Constant(1e-3)),
            MeshShape(fsdp=8).build(jax.devices()[:8]),
        ).abstract_state()


@dataclasses.dataclass(frozen=True)
class SliceDevice:
    """What meshes are told of a device of a TPU slice."""

    id: int
    slice_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"
    process_index: int = 0


def test_slices_are_crossed_by_the_outer_part_of_the_data_axis_alone():
    devices = [SliceDevice(i, i // 4) for i in range(8)]
    mesh = MeshShape(fsdp=2).build(devices)  # as many slices as the devices have
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert mesh.devices.shape == (4, 2, 1)
    np.testing.assert_array_equal(slices[:2], 0)
    np.testing.assert_array_equal(slices[2:], 1)
    with pytest.raises(ValueError, match="data=1 does not divide over 2 slices: fsdp and model stay within a slice"):
        MeshShape(fsdp=8).build(devices)
    with pytest.raises(ValueError, match="MeshShape.slices: expected 2, as the devices are in 2 slices, got 4"):
        MeshShape(slices=4).build(devices)


def test_outside_of_a_training_step_nothing_is_placed():
    x = jax.numpy.ones((4, 4))
    assert activations.constrain(x, ("batch", None)) is x
    assert activations.gather(x, ("embed", "heads"), "any/path") is x
    assert activations.shards("vocab") == 1
    with sharding.on(MeshShape(model=2).build(jax.devices()[:8])):
        assert activations.shards("vocab") == 2
        placed = jax.jit(lambda x: activations.constrain(x, ("batch", None)))(x)
    assert placed.addressable_shards[0].data.shape == (1, 4)
