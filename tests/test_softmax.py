"""The hand-written derivative of softmax attention: against plain JAX in float64, forwards, backwards, twice, and batched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from synthesizer_jax.ops.softmax import MASKED, product, softmax_product

B, H, Q, K, D = 3, 2, 4, 5, 3


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape))


def plain(logits, bias, allowed, values):
    """The same by jax.nn.softmax."""
    logits = bias if logits is None else logits if bias is None else logits + bias
    if allowed is not None:
        logits = jnp.where(allowed, logits, MASKED)
    return product(jax.nn.softmax(logits, axis=-1), values)


def no_row_empty(*shape):
    return jnp.asarray(np.random.default_rng(7).random(shape) < 0.6).at[..., 0].set(True)


CASES = {
    "logits": (draw(B, H, Q, K), None, None),
    "bias of the batch": (None, draw(1, H, Q, K), None),
    "bias of a head": (draw(B, H, Q, K), draw(1, 1, Q, K), None),
    "bias of the keys": (draw(B, H, Q, K), draw(B, 1, 1, K), None),
    "both": (draw(B, H, Q, K), draw(1, H, Q, K), no_row_empty(B, 1, 1, K)),
    "masks of each sequence": (None, draw(1, H, Q, K), no_row_empty(B, 1, Q, K)),
    "logits and mask of the batch": (draw(1, H, Q, K), None, no_row_empty(1, 1, Q, K)),
    "large": (1e3 * draw(B, H, Q, K), 1e3 * draw(1, H, Q, K, seed=1), no_row_empty(B, 1, 1, K)),
}
parametrize_cases = pytest.mark.parametrize("case", CASES)


def as_functions(case):
    """(ours, plain) of what is differentiated: logits, bias (where there are any) and values."""
    logits, bias, allowed = CASES[case]
    given = [x for x in (logits, bias) if x is not None] + [draw(B, K, H, D, seed=2)]

    def of(function):
        def call(*args):
            rest = iter(args)
            terms = [None if x is None else next(rest) for x in (logits, bias)]
            return function(*terms, allowed, next(rest))

        return call

    return of(softmax_product), of(plain), given


@parametrize_cases
def test_values_and_gradients_are_those_of_plain_softmax(case):
    ours, expected, given = as_functions(case)
    out, pull = jax.vjp(ours, *given)
    expected_out, expected_pull = jax.vjp(expected, *given)
    cotangent = draw(*out.shape, seed=3)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(pull(cotangent), expected_pull(cotangent), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@parametrize_cases
def test_forward_mode_is_that_of_plain_softmax(case):
    ours, expected, given = as_functions(case)
    tangents = [draw(*x.shape, seed=4) for x in given]
    for found, wanted in zip(jax.jvp(ours, given, tangents), jax.jvp(expected, given, tangents), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", ["both", "masks of each sequence"])
def test_second_derivatives(case):
    ours, _, given = as_functions(case)
    check_grads(ours, given, order=2, atol=1e-4, rtol=1e-4)  # against finite differences


def test_batched_scanned_and_made_again():
    """vmap (parts of a batch), scan (layers) and remat together give what a loop gives."""
    logits, bias, allowed = CASES["both"]
    values = draw(B, K, H, D)
    step = jax.checkpoint(lambda x, bias: (softmax_product(logits, bias, allowed, x), None))

    def layers(function):
        def loss(values, biases):
            return jnp.sum(jax.lax.scan(function, values, biases)[0][..., :1, :, :] ** 2)

        return loss

    square = dict(q=K)  # as many queries as keys, so that outputs are the next layer's values
    logits, allowed = draw(B, H, square["q"], K), allowed
    biases = draw(2, 1, H, square["q"], K)
    found = jax.vmap(jax.grad(layers(step), argnums=(0, 1)), in_axes=(0, None))(jnp.stack([values, 2 * values]), biases)

    def by_hand(values):
        for bias in biases:
            values = plain(logits, bias, allowed, values)
        return values

    def loss(values, biases):
        for bias in biases:
            values = plain(logits, bias, allowed, values)
        return jnp.sum(values[..., :1, :, :] ** 2)

    for i, scale in enumerate((1, 2)):
        for a, b in zip(jax.grad(loss, argnums=(0, 1))(scale * values, biases), found, strict=True):
            np.testing.assert_allclose(b[i], a, rtol=1e-10, atol=1e-12)


def test_what_is_masked_has_no_gradient_whatever_stands_there():
    logits, bias, allowed = CASES["both"]
    logits = jnp.where(allowed, logits, jnp.nan)
    values = draw(B, K, H, D)
    by_logits, by_bias = jax.grad(lambda a, b: jnp.sum(softmax_product(a, b, allowed, values) ** 2), argnums=(0, 1))(
        logits, bias
    )
    assert np.isfinite(by_logits).all() and np.isfinite(by_bias).all()
    assert (np.broadcast_to(allowed, by_logits.shape) | (by_logits == 0)).all()


def test_bfloat16_is_near_float32():
    logits, bias, allowed = (x if x.dtype == bool else x.astype(jnp.float32) for x in CASES["both"])
    values = draw(B, K, H, D).astype(jnp.float32)

    def gradients(values):
        def loss(logits, bias, values):
            return jnp.sum(softmax_product(logits, bias, allowed, values).astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1, 2))(logits, bias, values)

    for wide, narrow in zip(gradients(values), gradients(values.astype(jnp.bfloat16)), strict=True):
        # Weights, values and outputs are rounded to 2^-9 of themselves, and a gradient is a sum of some tens of them.
        assert np.linalg.norm(np.asarray(wide - narrow.astype(jnp.float32))) <= 2**-6 * np.linalg.norm(wide)
