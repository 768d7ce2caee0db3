"""The hand-written derivative of softmax attention: against plain JAX in float64, forwards, backwards, twice, and batched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.ops.softmax import MASKED, softmax_product

B, H, Q, K, D = 3, 2, 4, 5, 3
TOLERANCE = 5e-6  # of an array's norm, in float32; an error of a formula is above 1e-2


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), jnp.float32)


def plain(logits, bias, allowed, values):
    """The same by jax.nn.softmax."""
    logits = bias if logits is None else logits if bias is None else logits + bias
    if allowed is not None:
        logits = jnp.where(allowed, logits, MASKED)
    weights = jax.nn.softmax(logits, axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.broadcast_to(weights, (len(values), *weights.shape[1:])), values)


def in_float64(function, *args):
    """What a function of arrays gives in float64."""
    with jax.enable_x64(True):
        return jax.device_get(function(*jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), args)))


def assert_near(found, wanted, tolerance=TOLERANCE):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.shape == other.shape
        assert np.linalg.norm(np.asarray(one, np.float64) - other) <= tolerance * np.linalg.norm(other)


def no_row_empty(*shape):
    allowed = np.random.default_rng(7).random(shape) < 0.6
    allowed[..., 0] = True
    return jnp.asarray(allowed)


CASES = {
    "logits": (draw(B, H, Q, K), None, None),
    "bias of the batch": (None, draw(1, H, Q, K), None),
    "bias of a head": (draw(B, H, Q, K), draw(1, 1, Q, K), None),
    "bias of the keys": (draw(B, H, Q, K), draw(B, 1, 1, K), None),
    "both": (draw(B, H, Q, K), draw(1, H, Q, K), no_row_empty(B, 1, 1, K)),
    "masks of each sequence": (None, draw(1, H, Q, K), no_row_empty(B, 1, Q, K)),
    "logits and mask of the batch": (draw(1, H, Q, K), None, no_row_empty(1, 1, Q, K)),
    "large": (30 * draw(B, H, Q, K), 30 * draw(1, H, Q, K, seed=1), no_row_empty(B, 1, 1, K)),
}


def as_functions(case):
    """(ours, plain) as functions of the arrays that are differentiated, and these: logits and bias as given, values."""
    logits, bias, allowed = CASES[case]
    given = [x for x in (logits, bias) if x is not None] + [draw(B, K, H, D, seed=2)]

    def of(function):
        def call(*args):
            rest = list(args)
            terms = [None if x is None else rest.pop(0) for x in (logits, bias)]
            return function(*terms, allowed, rest.pop())

        return call

    return of(softmax_product), of(plain), given


def gradients(function, given):
    out, pull = jax.vjp(function, *given)
    return out, pull(draw(*out.shape, seed=3).astype(out.dtype))


def forwards(function, given):
    return jax.jvp(function, tuple(given), tuple(draw(*x.shape, seed=4).astype(x.dtype) for x in given))


def twice(function, given):
    """The derivative of the gradients in a direction."""
    return forwards(lambda *given: gradients(function, given)[1], given)[1]


@pytest.mark.parametrize("derivative", [gradients, forwards, twice])
@pytest.mark.parametrize("case", CASES)
def test_it_is_plain_softmax(case, derivative):
    ours, expected, given = as_functions(case)
    found = jax.jit(lambda *given: derivative(ours, given))(*given)
    assert_near(found, in_float64(lambda *given: derivative(expected, given), *given))


def test_batched_scanned_and_made_again():
    """vmap (parts of a batch), scan (layers) and remat together give what a loop gives."""
    logits, allowed = draw(B, H, K, K), no_row_empty(B, 1, 1, K)  # as many queries as keys: outputs are the next values
    values, biases = jnp.stack([draw(B, K, H, D), draw(B, K, H, D, seed=1)]), draw(2, 1, H, K, K)

    def scanned(values, biases):
        step = jax.checkpoint(lambda x, bias: (softmax_product(logits, bias, allowed, x), None))
        return jnp.sum(jax.lax.scan(step, values, biases)[0][:, 0] ** 2)

    def looped(values, biases):
        for bias in biases:
            values = plain(jnp.asarray(logits, values.dtype), bias, allowed, values)
        return jnp.sum(values[:, 0] ** 2)

    found = jax.jit(jax.vmap(jax.grad(scanned, argnums=(0, 1)), in_axes=(0, None)))(values, biases)
    for i, part in enumerate(values):
        wanted = in_float64(jax.grad(looped, argnums=(0, 1)), part, biases)
        assert_near([gradient[i] for gradient in found], wanted)


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
    logits, bias, allowed = CASES["both"]
    values = draw(B, K, H, D)

    def by_values_of(values):
        def loss(logits, bias, values):
            return jnp.sum(softmax_product(logits, bias, allowed, values).astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1, 2))(logits, bias, values)

    for wide, narrow in zip(by_values_of(values), by_values_of(values.astype(jnp.bfloat16)), strict=True):
        # Weights, values and outputs are rounded to 2^-9 of themselves, and a gradient is a sum of some tens of them.
        assert np.linalg.norm(np.asarray(wide - narrow.astype(jnp.float32))) <= 2**-6 * np.linalg.norm(wide)


def test_a_row_with_one_key_has_no_gradient_at_all():
    """Not even that of rounding: Adafactor would make steps of its size out of it."""
    logits, bias, values = draw(B, H, Q, K), draw(1, H, Q, K), draw(B, K, H, D)
    first = jnp.arange(K)[None, None, None] == 0
    for dtype in (jnp.float32, jnp.bfloat16):

        def loss(logits, bias):
            out = softmax_product(logits, bias, first, values.astype(dtype))
            return jnp.sum(out.astype(jnp.float32) * draw(B, Q, H, D, seed=3))

        for gradient in jax.jit(jax.grad(loss, argnums=(0, 1)))(logits, bias):
            assert not gradient.any()
