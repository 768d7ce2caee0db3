"""Meshes on 8 CPU devices, the rule table, and every way in which a model, a batch and a mesh can fail to fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from synthesizer_jax import axes, sharding
from synthesizer_jax.sharding import MeshShape


@dataclasses.dataclass(frozen=True)
class Leaf:
    shape: tuple
    axes: tuple


def test_one_device_is_the_smallest_mesh():
    mesh = MeshShape().build(jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "model": 1}


@pytest.mark.parametrize(
    "shape,sizes",
    [
        (MeshShape(), (8, 1, 1)),
        (MeshShape(model=2), (4, 1, 2)),
        (MeshShape(data=2, fsdp=2, model=2), (2, 2, 2)),
        (MeshShape(fsdp=8), (1, 8, 1)),
    ],
)
def test_meshes(shape, sizes):
    mesh = shape.build(jax.devices()[:8])
    assert tuple(mesh.shape.values()) == sizes
    assert mesh.axis_names == ("data", "fsdp", "model")
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    "shape,text",
    [
        (MeshShape(data=3, fsdp=1, model=2), r"data=3 x fsdp=1 x model=2 needs 6 devices, but there are 8"),
        (MeshShape(model=3), r"data=None x fsdp=1 x model=3 needs a multiple of 3 devices, but there are 8"),
        (MeshShape(model=16), r"needs a multiple of 16 devices, but there are 8"),
    ],
)
def test_a_wrong_product_names_both_numbers(shape, text):
    with pytest.raises(ValueError, match=text):
        shape.build(jax.devices()[:8])


@pytest.mark.parametrize("name,value", [("model", 0), ("fsdp", -1), ("data", 2.0), ("model", None), ("data", True)])
def test_wrong_axis_sizes(name, value):
    with pytest.raises(ValueError, match=f"MeshShape.{name}: expected a whole number >= 1, got {value}"):
        MeshShape(**{name: value})


def test_rules_cover_exactly_the_logical_axes():
    assert set(sharding.RULES) == set(axes.LOGICAL_AXES)


def test_shardings_follow_the_declared_axes():
    mesh = MeshShape(data=2, fsdp=2, model=2).build(jax.devices()[:8])
    declared = {
        "embedding": Leaf((32, 16), ("vocab", "embed")),
        "layers": {"query": Leaf((3, 16, 4, 8), ("layers", "embed", "heads", "kv"))},
        "R": Leaf((4, 10, 10), ("heads", "synth_query", "synth_key")),
        "scale": Leaf((16,), (None,)),
    }
    placed = sharding.parameter_shardings(mesh, declared)
    assert placed["embedding"].spec == PartitionSpec("model", "fsdp")
    assert placed["layers"]["query"].spec == PartitionSpec(None, "fsdp", "model", None)
    assert placed["R"].shard_shape((4, 10, 10)) == (2, 5, 10)
    assert placed["scale"].is_fully_replicated


def test_every_misfit_is_listed_with_name_size_and_axis():
    mesh = MeshShape(model=4).build(jax.devices()[:8])
    declared = {
        "layers": {"query": Leaf((16, 6, 8), ("embed", "heads", "kv"))},
        "odd": Leaf((4, 4), ("mlp", "heads")),
        "typo": Leaf((4,), ("head",)),
        "good": Leaf((4,), ("heads",)),
    }
    with pytest.raises(ValueError) as error:
        sharding.parameter_shardings(mesh, declared)
    text = str(error.value)
    assert "data=2 x fsdp=1 x model=4" in text
    assert "layers/query (16, 6, 8): axis 'heads' of size 6 does not divide over model=4" in text
    assert "odd (4, 4): axes 'mlp' and 'heads' are both split over 'model'" in text
    assert "typo (4,): axis 'head' is in no rule; known: batch, vocab" in text
    assert "good" not in text


@pytest.mark.parametrize(
    "batch_size,text",
    [
        (6, "batch_size=6 does not divide over data x fsdp = 2 x 2 = 4 devices: use a multiple such as 4"),
        (3, "use a multiple such as 4"),
        (0, "batch_size: expected a whole number >= 1, got 0"),
        (8.0, "batch_size: expected a whole number >= 1, got 8.0"),
    ],
)
def test_wrong_batch_sizes(batch_size, text):
    mesh = MeshShape(data=2, fsdp=2, model=2).build(jax.devices()[:8])
    with pytest.raises(ValueError, match=text):
        sharding.check_batch_size(mesh, batch_size)


def test_a_batch_is_split_over_data_and_fsdp():
    mesh = MeshShape(data=2, fsdp=2, model=2).build(jax.devices()[:8])
    rows = np.arange(24, dtype=np.int32).reshape(8, 3)
    placed = sharding.place_batch(mesh, {"encoder_input_tokens": rows})["encoder_input_tokens"]
    np.testing.assert_array_equal(placed, rows)
    assert placed.addressable_shards[0].data.shape == (2, 3)
    assert placed.sharding == sharding.batch_sharding(mesh)


def test_initial_values_do_not_depend_on_the_mesh():
    declared = {"w": Leaf((16, 8), ("embed", "heads"))}

    def init(key):
        return {"w": jax.random.normal(key, (16, 8), jnp.float32)}

    values = []
    for shape, devices in ((MeshShape(), 1), (MeshShape(), 8), (MeshShape(fsdp=2, model=4), 8)):
        mesh = shape.build(jax.devices()[:devices])
        placed = sharding.parameter_shardings(mesh, declared)
        value = jax.jit(init, out_shardings=placed)(jax.random.key(0))["w"]
        assert value.sharding.is_equivalent_to(placed["w"], 2)
        values.append(np.asarray(value))
    np.testing.assert_array_equal(values[0], values[1])
    np.testing.assert_array_equal(values[0], values[2])
