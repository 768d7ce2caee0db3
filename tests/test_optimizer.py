"""Adafactor against a slow float64 one, scanned against unscanned, merged heads, the state's axes, the schedules."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthesizer_jax import sharding
from synthesizer_jax.models.parameters import Declared
from synthesizer_jax.training.optimizer import Adafactor, AdamW, Constant, InverseSqrt, declare_state

STEPS = 4


def declare(shape, axes, dtype=jnp.float32):
    return Declared(shape, jnp.dtype(dtype), axes)


DECLARED = {
    "embedding": declare((40, 20), ("vocab", "embed")),
    "scale": declare((20,), ("embed",)),
    "query": declare((20, 4, 6), ("embed", "heads", "kv")),
    "out": declare((4, 6, 20), ("heads", "kv", "embed")),
    "w2": declare((4, 6, 24), ("heads", "rank", "synth_key")),
    "R": declare((4, 24, 24), ("heads", "synth_query", "synth_key")),
    "alpha": declare((2, 4), ("parts", "heads")),
}
JOINED = {"query": (20, 24), "out": (24, 20), "w2": (24, 24)}  # the shapes that T5 gives these kernels


def values(declared, seed, scale=1.0):
    def draw(path, leaf):
        rng = np.random.default_rng([seed, *sharding.path_name(path).encode()])
        return (scale * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, declared)


def run(optimizer, declared, params, gradients):
    transformation = optimizer.build(declared)
    state = transformation.init(params)

    @jax.jit
    def step(params, state, gradients):
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for gradient in gradients:
        params, state = step(params, state, gradient)
    return params, state


def assert_equal_up_to_rounding(a, b):
    """Relative to the largest entry: updates are added to parameters: small sums carry the rounding of large terms."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * np.max(np.abs(x))), a, b)


def slow_adafactor(param, gradients, rate, minimum=16, clipping=1.0):
    """The paper's algorithms 4 and 5 with T5's settings, by entry, in float64; factored over the two largest axes."""
    param = np.asarray(param, np.float64)
    order = sorted(range(param.ndim), key=lambda axis: param.shape[axis])
    factored = param.ndim > 1 and param.shape[order[-2]] >= minimum
    v = np.zeros(param.shape)
    rows, columns = {}, {}  # means over the largest axis, over the second largest, by the index without that axis
    for t, gradient in enumerate(gradients, 1):
        decay = 1 - t**-0.8
        squared = np.asarray(gradient, np.float64) ** 2 + 1e-30
        if factored:
            second, largest = order[-2:]
            v = np.zeros(param.shape)
            for target, axis in ((rows, largest), (columns, second)):
                mean = squared.mean(axis)
                for index in np.ndindex(mean.shape):
                    target[index] = decay * target.get(index, 0.0) + (1 - decay) * mean[index]
            for index in np.ndindex(param.shape):
                row, column = index[:largest] + index[largest + 1 :], index[:second] + index[second + 1 :]
                position = second - (largest < second)
                same = [rows[row[:position] + (i,) + row[position + 1 :]] for i in range(param.shape[second])]
                v[index] = rows[row] * columns[column] / np.mean(same)
        else:
            v = decay * v + (1 - decay) * squared
        update = np.asarray(gradient, np.float64) / np.sqrt(v)
        update /= max(1.0, np.sqrt(np.mean(update**2)) / clipping)
        param = param - rate(t - 1) * max(1e-3, np.sqrt(np.mean(param**2))) * update
    return param


@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.parametrize("scale", [1.0, 0.0])  # 0: parameters that start at zero move by the minimum scale
def test_adafactor_equals_the_slow_one(name, scale):
    declared = {name: DECLARED[name]}
    params, gradients = values(declared, 0, scale), [values(declared, 1 + i, 3.0**i) for i in range(STEPS)]
    optimizer = Adafactor(InverseSqrt(warmup=2), min_size_to_factor=16)
    result, _ = run(optimizer, declared, params, gradients)
    joined = JOINED.get(name, DECLARED[name].shape)
    expected = slow_adafactor(
        params[name].reshape(joined), [g[name].reshape(joined) for g in gradients], lambda step: max(step, 2) ** -0.5
    )
    size = max(1.0, np.abs(expected).max())  # a small entry is the difference of larger ones, which round by their size
    np.testing.assert_allclose(np.asarray(result[name]).reshape(joined), expected, rtol=2e-5, atol=1e-6 * size)


def test_clipping_acts():
    declared = {"R": DECLARED["R"]}
    params, gradients = values(declared, 0), [values(declared, 1, 1e-3), values(declared, 2, 1e3)]
    results = [
        run(Adafactor(Constant(1e-2), clipping=c, min_size_to_factor=16), declared, params, gradients)[0]["R"]
        for c in (1.0, 1e9)
    ]
    expected = slow_adafactor(params["R"], [g["R"] for g in gradients], lambda step: 1e-2)
    np.testing.assert_allclose(results[0], expected, rtol=2e-5, atol=1e-6)
    assert np.max(np.abs(results[0] - results[1])) > 1e-3


@pytest.mark.parametrize(
    "optimizer",
    [
        Adafactor(InverseSqrt(warmup=2), min_size_to_factor=16),
        AdamW(Constant(1e-2), weight_decay=0.1, max_gradient_norm=None),
    ],
)
def test_scanned_parameters_train_as_unscanned_ones(optimizer):
    layers = 3
    single = {f"layer_{i}": DECLARED for i in range(layers)}
    stacked = jax.tree.map(lambda leaf: declare((layers, *leaf.shape), ("layers", *leaf.axes)), DECLARED)

    def stack(tree):
        return jax.tree.map(lambda *leaves: np.stack(leaves), *(tree[f"layer_{i}"] for i in range(layers)))

    params, gradients = values(single, 0), [values(single, 1 + i) for i in range(STEPS)]
    params["layer_1"] = jax.tree.map(lambda x: x * np.float32(30), params["layer_1"])  # layers of different scale
    gradients[2]["layer_2"] = jax.tree.map(
        lambda x: x * np.float32(100), gradients[2]["layer_2"]
    )  # one layer is clipped
    alone, _ = run(optimizer, single, params, gradients)
    together, _ = run(optimizer, stacked, stack(params), [stack(g) for g in gradients])
    assert_equal_up_to_rounding(stack(alone), together)


def test_second_moments_are_factored_over_merged_heads():
    declared = {
        "query": declare((2, 512, 8, 64), ("layers", "embed", "heads", "kv")),
        "out": declare((2, 8, 64, 512), ("layers", "heads", "kv", "embed")),
        "R": declare((8, 512, 512), ("heads", "synth_query", "synth_key")),
        "R1": declare((8, 512, 8), ("heads", "synth_query", "rank")),
    }
    state = declare_state(Adafactor().build(declared), declared)[0]
    assert state.v_row["query"].shape == (2, 512) and state.v_col["query"].shape == (2, 512)
    assert state.v["query"].shape == (2, 1)
    assert state.v_row["R"].shape == (8, 512) and state.v["R"].shape == (1,)
    assert state.v["R1"].shape == (8, 512, 8)
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(state)]
    assert sum(sizes) < 0.02 * sum(math.prod(leaf.shape) for leaf in declared.values())


def test_statistics_are_split_like_their_parameter():
    declared = {
        "layers": {
            "query": declare((2, 16, 4, 8), ("layers", "embed", "heads", "kv")),
            "out": declare((2, 4, 8, 16), ("layers", "heads", "kv", "embed")),
            "scale": declare((2, 16), ("layers", "embed")),
        },
        "embedding": declare((64, 16), ("vocab", "embed")),
        "R": declare((4, 24, 24), ("heads", "synth_query", "synth_key")),
        "b1": declare((4, 3), ("heads", "rank")),
    }
    state = declare_state(Adafactor(min_size_to_factor=16).build(declared), declared)[0]
    assert state.count.axes == ()
    assert state.v_row["embedding"].axes == ("embed",) and state.v_col["embedding"].axes == ("vocab",)
    assert (state.v_row["embedding"].shape, state.v_col["embedding"].shape) == ((16,), (64,))
    assert state.v_row["layers"]["query"].axes == ("layers", "embed")
    assert state.v_col["layers"]["query"].axes == ("layers", "heads")
    assert state.v_row["layers"]["out"].axes == ("layers", "embed") and state.v_col["layers"]["out"].shape == (2, 32)
    assert state.v_row["R"].axes == ("heads", "synth_query")
    assert state.v["layers"]["scale"].axes == ("layers", "embed")
    assert state.v_row["layers"]["scale"].axes == ("layers", None)
    assert state.v["b1"].axes == ("heads",)
    mesh = sharding.MeshShape(fsdp=4, model=2).build(jax.devices()[:8])
    placed = sharding.parameter_shardings(mesh, state)
    assert placed.v_col["layers"]["query"].shard_shape((2, 32)) == (2, 16)
    adam = declare_state(AdamW(Constant()).build(declared), declared)
    moments = [leaf for leaf in jax.tree.leaves(adam) if leaf.shape == (2, 16, 4, 8)]
    assert len(moments) == 2 and all(leaf.axes == ("layers", "embed", "heads", "kv") for leaf in moments)


def test_sharded_updates_equal_unsharded_ones():
    declared = {
        "layers": {"query": declare((2, 16, 4, 8), ("layers", "embed", "heads", "kv"))},
        "R": declare((4, 24, 24), ("heads", "synth_query", "synth_key")),
    }
    params, gradients = values(declared, 0), [values(declared, 1 + i) for i in range(STEPS)]
    optimizer = Adafactor(min_size_to_factor=16)
    expected, _ = run(optimizer, declared, params, gradients)
    placed = sharding.parameter_shardings(sharding.MeshShape(fsdp=4, model=2).build(jax.devices()[:8]), declared)
    result, _ = run(optimizer, declared, jax.device_put(params, placed), [jax.device_put(g, placed) for g in gradients])
    assert_equal_up_to_rounding(expected, result)


def test_bfloat16_parameters_have_float32_statistics():
    declared = {"w": declare((32, 32), ("embed", "mlp"), jnp.bfloat16)}
    transformation = Adafactor(min_size_to_factor=16).build(declared)
    params = {"w": jnp.ones((32, 32), jnp.bfloat16)}
    state = transformation.init(params)
    updates, state = transformation.update(params, state, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("int32"), jnp.dtype("float32")}
    assert updates["w"].dtype == jnp.float32


def test_adamw_equals_the_slow_one():
    declared = {"w": declare((3, 4), ("embed", "mlp")), "scale": declare((4,), ("mlp",))}
    params, gradients = values(declared, 0), [values(declared, 1 + i) for i in range(STEPS)]
    result, _ = run(AdamW(Constant(1e-2), weight_decay=0.1, max_gradient_norm=2.0), declared, params, gradients)
    for name, decay in (("w", 0.1), ("scale", 0.0)):
        p, m, v = params[name].astype(np.float64), 0.0, 0.0
        for t, gradient in enumerate(gradients, 1):
            norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in gradient.values()))
            g = gradient[name] * min(1.0, 2.0 / norm)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            p = p - 1e-2 * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) + decay * p)
        assert_equal_up_to_rounding(p, result[name])


@pytest.mark.parametrize(
    "schedule,rates",
    [
        (InverseSqrt(), {0: 0.01, 1: 0.01, 10_000: 0.01, 40_000: 0.005}),
        (InverseSqrt(warmup=100, linear_warmup=100), {0: 0.001, 49: 0.05, 99: 0.1, 400: 0.05}),
        (InverseSqrt(warmup=4, scale=3.0), {0: 1.5, 9: 1.0}),
        (Constant(), {0: 1e-3, 10**6: 1e-3}),
        (Constant(1.0, linear_warmup=4), {0: 0.25, 3: 1.0, 4: 1.0}),
    ],
)
def test_schedules(schedule, rates):
    for step, rate in rates.items():
        value = jax.jit(schedule)(jnp.int32(step))
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, rate, rtol=1e-6)


@pytest.mark.parametrize(
    "make,text",
    [
        (lambda: Adafactor(1e-3), r"Adafactor.learning_rate: expected a schedule such as Constant\(0.001\)"),
        (lambda: AdamW("constant"), r"AdamW.learning_rate: expected a schedule"),
        (lambda: Adafactor(clipping=0.0), "Adafactor.clipping: expected a number > 0, got 0.0"),
        (lambda: Adafactor(decay_exponent=1.5), r"Adafactor.decay_exponent: expected a number in \(0, 1\], got 1.5"),
        (lambda: AdamW(Constant(), b2=1.0), r"AdamW.b2: expected a number in \[0, 1\), got 1.0"),
        (
            lambda: AdamW(Constant(), max_gradient_norm=-1.0),
            "AdamW.max_gradient_norm: expected a number > 0 or None, got -1.0",
        ),
        (lambda: InverseSqrt(warmup=0), "InverseSqrt.warmup: expected a number >= 1 steps, got 0"),
        (lambda: InverseSqrt(linear_warmup=-1), "InverseSqrt.linear_warmup: expected a number >= 0 steps, got -1"),
        (lambda: Constant(float("inf")), "Constant.value: expected a number > 0, got inf"),
    ],
)
def test_wrong_settings(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_optimizers_are_values():
    assert Adafactor() == Adafactor(InverseSqrt(10_000)) and len({Adafactor(), Adafactor(), AdamW(Constant())}) == 2
    for a, b in itertools.combinations([Adafactor(), Adafactor(clipping=2.0), Adafactor(Constant())], 2):
        assert a != b
