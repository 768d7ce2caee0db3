"""The loss against float64 loops, finite differences, T5X's and HF's values, and what it keeps for the gradient."""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.training.loss import LossSums, cross_entropy

SHARED = pathlib.Path(os.environ.get("SYNTHESIZER_JAX_SHARED", "../shared")) / "goldens"
needs_goldens = pytest.mark.skipif(not SHARED.is_dir(), reason=f"reference values not found at {SHARED}")

SETTINGS = [(0.0, 0.0), (1e-2, 0.0), (0.0, 0.1), (1e-2, 0.1)]  # z_loss, label_smoothing


def example(seed=0, b=2, t=5, v=11, scale=3.0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(b, t, v), scale=scale).astype(np.float32)
    return logits, rng.integers(0, v, (b, t), dtype=np.int32), rng.integers(0, 2, (b, t), dtype=np.int32)


def slow(logits, targets, weights, z_loss, label_smoothing):
    """The same sums, one position at a time in float64."""
    total = z_total = correct = nats = 0.0
    vocab_size = logits.shape[-1]
    for position in np.ndindex(targets.shape):
        row, target = logits[position].astype(np.float64), targets[position]
        soft = np.full(vocab_size, label_smoothing / (vocab_size - 1))
        soft[target] = 1 - label_smoothing
        log_z = np.log(np.sum(np.exp(row - row.max()))) + row.max()
        entropy = -np.sum(soft[soft > 0] * np.log(soft[soft > 0]))
        z_part = z_loss * log_z**2
        total += weights[position] * (-np.sum(soft * (row - log_z)) - entropy + z_part)
        z_total += weights[position] * z_part
        correct += weights[position] * float(np.argmax(row) == target)
        nats += weights[position] * (log_z - row[target])
    return LossSums(total, z_total, correct, float(np.sum(weights)), nats)


@pytest.mark.parametrize("z_loss,label_smoothing", SETTINGS)
def test_equals_loops(z_loss, label_smoothing):
    logits, targets, weights = example()
    sums = jax.jit(lambda *a: cross_entropy(*a, z_loss=z_loss, label_smoothing=label_smoothing))(
        logits, targets, weights
    )
    np.testing.assert_allclose(sums, slow(logits, targets, weights, z_loss, label_smoothing), rtol=2e-6, atol=1e-6)
    assert sums.correct == slow(logits, targets, weights, 0, 0).correct


@pytest.mark.parametrize("z_loss,label_smoothing", SETTINGS)
@pytest.mark.parametrize("field", ["total", "z_loss", "nats"])
def test_gradient_equals_finite_differences(z_loss, label_smoothing, field):
    logits, targets, weights = example(seed=1, b=1, t=3, v=7)
    gradient = jax.grad(
        lambda x: getattr(cross_entropy(x, targets, weights, z_loss=z_loss, label_smoothing=label_smoothing), field)
    )(logits)
    expected, step = np.zeros(logits.shape), 1e-5
    for index in np.ndindex(logits.shape):
        values = []
        for sign in (1, -1):
            moved = logits.astype(np.float64)
            moved[index] += sign * step
            values.append(getattr(slow(moved, targets, weights, z_loss, label_smoothing), field))
        expected[index] = (values[0] - values[1]) / (2 * step)
    np.testing.assert_allclose(gradient, expected, atol=2e-6)


def test_gradient_by_weights_is_the_loss_of_each_position():
    logits, targets, _ = example()
    weights = np.full(targets.shape, 0.5, np.float32)
    gradient = jax.grad(lambda w: cross_entropy(logits, targets, w, z_loss=1e-2).total)(weights)
    one = np.zeros(targets.shape)
    one[1, 2] = 1
    np.testing.assert_allclose(gradient[1, 2], slow(logits, targets, one, 1e-2, 0).total, rtol=2e-6)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_perfect_prediction_has_loss_zero(label_smoothing):
    targets = np.array([[3, 0]], np.int32)
    soft = np.full((1, 2, 9), label_smoothing / 8)
    np.put_along_axis(soft, targets[..., None], 1 - label_smoothing, -1)
    logits = np.log(np.maximum(soft, 1e-30)).astype(np.float32)
    sums = cross_entropy(logits, targets, np.ones((1, 2), np.int32), label_smoothing=label_smoothing)
    np.testing.assert_allclose(sums.total, 0, atol=1e-6)


def test_positions_without_weight_change_nothing():
    logits, targets, weights = example()
    clean = jax.value_and_grad(lambda x, t: cross_entropy(x, t, weights).total)(logits, targets)
    holes = weights == 0
    logits[holes], targets[holes] = 1e30, -100
    dirty = jax.value_and_grad(lambda x, t: cross_entropy(x, t, weights).total)(logits, targets)
    np.testing.assert_array_equal(clean[0], dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])


@pytest.mark.parametrize("target", [-1, 11])
def test_a_target_outside_the_vocabulary_is_not_hidden(target):
    logits, targets, weights = example()
    targets[0, 0], weights[0, 0] = target, 1
    assert np.isnan(cross_entropy(logits, targets, weights).total)


def test_large_logits_stay_finite():
    logits = np.array([[[3e4, -3e4, 0.0]]], np.float32)
    value, gradient = jax.value_and_grad(
        lambda x: cross_entropy(x, np.array([[1]], np.int32), np.ones((1, 1), np.int32)).total
    )(logits)
    np.testing.assert_allclose(value, 6e4)
    np.testing.assert_allclose(gradient, [[[1, -1, 0]]])


def test_bfloat16_logits_are_summed_in_float32():
    logits, targets, weights = example(t=50)
    logits = jnp.asarray(logits).astype(jnp.bfloat16)
    value, gradient = jax.value_and_grad(lambda x: cross_entropy(x, targets, weights, z_loss=1e-3).total)(logits)
    assert value.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    expected = slow(np.asarray(logits.astype(jnp.float32)), targets, weights, 1e-3, 0)
    np.testing.assert_allclose(value, expected.total, rtol=2e-6)


def test_nothing_with_a_vocabulary_axis_is_kept_but_the_logits():
    logits, targets, weights = example()
    _, pullback = jax.vjp(lambda x: cross_entropy(x, targets, weights, z_loss=1e-2, label_smoothing=0.1).total, logits)
    kept = [x for x in jax.tree.leaves(pullback) if getattr(x, "size", 0) >= logits.size]
    assert len(kept) == 1, [x.shape for x in kept]


@needs_goldens
@pytest.mark.parametrize("version", ["t5x_v1_0", "t5x_v1_1"])
@pytest.mark.parametrize(
    "name,z_loss,label_smoothing",
    [
        ("loss_plain", 0.0, 0.0),
        ("loss_z", 1e-2, 0.0),
        ("loss_smooth", 0.0, 0.1),
        ("loss_z_smooth", 1e-2, 0.1),
    ],
)
def test_t5x_values(version, name, z_loss, label_smoothing):
    golden = np.load(SHARED / version / "data.npz")
    targets = golden["decoder_target_tokens"]
    sums = cross_entropy(
        golden["logits"], targets, (targets > 0).astype(np.int32), z_loss=z_loss, label_smoothing=label_smoothing
    )
    np.testing.assert_allclose(sums.total, golden[f"{name}.total"], rtol=1e-5)
    np.testing.assert_allclose(sums.z_loss, golden[f"{name}.z_part"], rtol=1e-5)
    assert sums.weight == golden[f"{name}.weight_sum"]


@needs_goldens
@pytest.mark.parametrize("version", ["hf_t5_v1_0", "hf_t5_v1_1"])
def test_huggingface_value(version):
    golden = np.load(SHARED / version / "data.npz")
    labels = golden["labels"]
    sums = cross_entropy(golden["logits"], labels, (labels != -100).astype(np.int32))
    np.testing.assert_allclose(sums.total / sums.weight, golden["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    "settings,text",
    [
        ({"z_loss": -1.0}, "z_loss: expected a number >= 0"),
        ({"z_loss": float("nan")}, "z_loss: expected a number >= 0"),
        ({"label_smoothing": 1.0}, r"label_smoothing: expected a number in \[0, 1\)"),
    ],
)
def test_wrong_settings(settings, text):
    with pytest.raises(ValueError, match=text):
        cross_entropy(*example(), **settings)
