"""What every variant must do, whatever its scores: one tuple of variants drives all of it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from variants import MAX_LENGTH, MIXERS, parametrized

import synthesizer_jax as sj
from synthesizer_jax.axes import Param
from synthesizer_jax.nn.attention import as_mixer
from synthesizer_jax.scores import Spec

FEATURES, HEADS, HEAD_DIM = 6, 2, 4
BATCH, LENGTH = 2, 7
TOLERANCE = 2e-6  # two orders of summation of the same float32 numbers, outputs of size 1

parametrize_variants = parametrized(MIXERS)
parametrize_causal = parametrized([(name, spec) for name, spec in MIXERS if not as_mixer(spec).decoder_error()])

KEY_MASK = np.array([[True] * 4 + [False] * 3, [True, False, True, True, False, True, False]])
FIRST, SECOND = 3, 4  # lengths of two segments, packed into one row


def draw(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def positive_where_needed(spec, array):
    """Sums of a linear kernel's scores are far from 0 where all numbers are positive, as a kernel smoother needs it."""
    signed = as_mixer(spec).scores.weighting_error() if isinstance(spec, Spec) else None
    return jnp.abs(array) if signed else array


def tokens(spec, shape, seed=0):
    return positive_where_needed(spec, draw(shape, seed))


def make_layer(spec):
    return sj.Attention(spec, FEATURES, HEADS, HEAD_DIM, rngs=nnx.Rngs(0))


@dataclasses.dataclass(frozen=True)
class InStack:
    """A layer that is given what the layers of its stack share."""

    layer: sj.Attention
    shared: dict

    def __call__(self, *args, **named):
        return self.layer(*args, shared=self.shared, **named)

    def step(self, *args):
        return self.layer.step(*args, shared=self.shared)

    def init_cache(self, *args):
        return self.layer.init_cache(*args)


@functools.cache
def layer_of(spec):
    """(graph, state): a layer with drawn parameters, its mixtures' weights away from their equal start."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make_layer(spec)))
    return graph, jax.tree.map(functools.partial(positive_where_needed, spec), drawn((state, declared_shared(spec))))


def declared_shared(spec):
    declared = as_mixer(spec).stack_params(sj.Dims(FEATURES, HEADS, HEAD_DIM))
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), declared, is_leaf=is_param)


def drawn(abstract):
    flat, structure = jax.tree.flatten(abstract)
    return structure.unflatten([draw(leaf.shape, 1 + i) / 2 for i, leaf in enumerate(flat)])


def is_param(leaf):
    return isinstance(leaf, Param)


def merge(graph, state):
    return InStack(nnx.merge(graph, state[0]), state[1])


@functools.cache
def forward_of(spec):
    """Jitted (state, x) -> outputs under the masks of an encoder, and of decoders without and with padding."""
    graph, _ = layer_of(spec)

    @functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
    def forward(state, x):
        layer = merge(graph, state)
        out = {"encoder": layer(x, key_mask=KEY_MASK_ARRAY)}
        if as_mixer(spec).decoder_error() is None:
            out["decoder"] = layer(x, causal=True)
            out["padded_decoder"] = layer(x, key_mask=KEY_MASK_ARRAY, causal=True)
        return out

    return forward


KEY_MASK_ARRAY = jnp.asarray(KEY_MASK)


@parametrize_causal
def test_causality(spec):
    """Changing token t leaves outputs before t bit-equal, and changes output t."""
    forward, (_, state), x = forward_of(spec), layer_of(spec), tokens(spec, (BATCH, LENGTH, FEATURES))
    before = forward(state, x)
    for t in range(LENGTH):
        after = forward(state, x.at[:, t].add(1.0))
        for case in ("decoder", "padded_decoder"):
            np.testing.assert_array_equal(before[case][:, :t], after[case][:, :t])
        assert np.all(np.any(before["decoder"][:, t] != after["decoder"][:, t], axis=-1))


@parametrize_variants
def test_padding_content_is_irrelevant(spec):
    """Outputs at real tokens are bit-equal whatever stands in the padding."""
    forward, (_, state), x = forward_of(spec), layer_of(spec), tokens(spec, (BATCH, LENGTH, FEATURES))
    before = forward(state, x)
    after = forward(state, jnp.where(KEY_MASK_ARRAY[..., None], x, 1e3 * draw(x.shape, 9)))
    for case in set(before) - {"decoder"}:
        np.testing.assert_array_equal(np.asarray(before[case])[KEY_MASK], np.asarray(after[case])[KEY_MASK])


@parametrize_variants
def test_second_call_does_not_recompile(spec):
    forward, (_, state) = forward_of(spec), layer_of(spec)
    for seed in (0, 1):
        forward(jax.tree.map(lambda a, seed=seed: a + seed, state), tokens(spec, (BATCH, LENGTH, FEATURES), seed))
    assert forward._cache_size() == 1
    assert layer_of(spec)[0] == nnx.split(nnx.eval_shape(lambda: make_layer(spec)))[0], "equal layers, equal programs"
    assert hash(layer_of(spec)[0]) == hash(nnx.split(nnx.eval_shape(lambda: make_layer(spec)))[0])


@parametrize_variants
def test_packed_equals_separate_and_steps_equal_the_full_forward(spec):
    graph, state = layer_of(spec)
    first, second = tokens(spec, (1, FIRST, FEATURES), 2), tokens(spec, (1, SECOND, FEATURES), 3)

    @functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
    def run(state, first, second):
        layer = merge(graph, state)
        padding = jnp.full((1, 1, FEATURES), 5.0)
        row = jnp.concatenate([first, second, padding], axis=1)
        segments = jnp.array([[1] * FIRST + [2] * SECOND + [0]], jnp.int32)
        positions = jnp.array([[*range(FIRST), *range(SECOND), 0]], jnp.int32)
        # Another row beside it, so that positions differ in the batch.
        row, segments = jnp.concatenate([row, row]), jnp.concatenate([segments, jnp.ones_like(segments)])
        positions = jnp.concatenate([positions, jnp.arange(FIRST + SECOND + 1, dtype=jnp.int32)[None]])
        out = {}
        can_decode = as_mixer(spec).decoder_error() is None
        for causal in (False, True) if can_decode else (False,):
            y = layer(row, causal=causal, q_segments=segments, q_positions=positions)
            kind = "decoder" if causal else "encoder"
            out[kind] = {
                "packed": (y[:1, :FIRST], y[:1, FIRST : FIRST + SECOND]),
                "separate": (layer(first, causal=causal), layer(second, causal=causal)),
            }
        if not can_decode:
            return out
        x = jnp.concatenate([second, second[:, ::-1]])
        out["full"] = layer(x, causal=True)
        out["steps"] = decode(layer, x, (1,) * SECOND)
        out["prefill"] = decode(layer, x, (2, 1, 1))
        return out

    out = run(state, first, second)
    for kind in {"encoder", "decoder"} & set(out):
        for packed, separate in zip(out[kind]["packed"], out[kind]["separate"], strict=True):
            np.testing.assert_allclose(packed, separate, rtol=0, atol=TOLERANCE * size_of(separate))
    for kind in {"steps", "prefill"} & set(out):
        np.testing.assert_allclose(out[kind], out["full"], rtol=0, atol=TOLERANCE * size_of(out["full"]))


def size_of(outputs):
    """1, or what TOLERANCE is to be multiplied by where outputs are larger (up to 8 here) and round as much more."""
    return max(1.0, float(np.abs(outputs).max()))


def decode(layer, x, sizes):
    """Outputs of steps of these sizes, in a cache that is longer than the sequence."""
    cache, outs, start = layer.init_cache(x.shape[0], x.shape[1] + 2), [], 0
    for size in sizes:
        y, cache = layer.step(x[:, start : start + size], cache)
        outs.append(y)
        start += size
    return jnp.concatenate(outs, axis=1)


@parametrize_variants
def test_what_is_trained_has_a_gradient_and_what_is_fixed_has_none(spec):
    graph, state = layer_of(spec)
    x, cotangent = draw((1, MAX_LENGTH, FEATURES)), draw((1, MAX_LENGTH, FEATURES), 5)

    @functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
    def gradient(state, x):
        return jax.grad(lambda state: jnp.sum(merge(graph, state)(x) * cotangent))(state)

    own, shared = gradient(state, x)
    declared = as_mixer(spec).params(sj.Dims(FEATURES, HEADS, HEAD_DIM))
    for path, variable in nnx.to_flat_state(own):
        found = np.asarray(variable[...])
        param = functools.reduce(lambda node, name: node[name], path, declared)
        assert isinstance(variable, nnx.Param if param.trained else sj.Fixed), path
        assert np.any(found) == param.trained, path
        if path[-1] == "R" and param.trained and isinstance(spec, Spec):
            assert np.all(found), "all n x n entries are used at full length"
    assert all(np.any(found) for found in jax.tree.leaves(shared))


@parametrize_variants
def test_bfloat16_is_close_to_float32(spec):
    graph, state = layer_of(spec)
    x = tokens(spec, (BATCH, LENGTH, FEATURES))

    @functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
    def run(state, x):
        layer = merge(graph, state)
        causal = as_mixer(spec).decoder_error() is None
        return tuple(layer(x.astype(t), key_mask=KEY_MASK_ARRAY, causal=causal) for t in (jnp.float32, jnp.bfloat16))

    full, half = run(state, x)
    assert half.dtype == jnp.bfloat16
    # Four products in a row, each rounded to 2^-9 of its size: a few times 1 %. A wrong term costs more than 20 %.
    assert oracle.relative_error(half, full) < 5e-2


def trace(spec, call, *lengths):
    """Shapes of call(layer, x, ...) with inputs of these lengths; nothing is computed."""
    inputs = [jax.ShapeDtypeStruct((1, length, FEATURES), jnp.float32) for length in lengths]

    def run(shared, *inputs):
        return call(InStack(make_layer(spec), shared), *inputs)

    return jax.eval_shape(run, declared_shared(spec), *inputs)


@parametrize_variants
def test_lengths_above_the_maximum_are_refused(spec):
    n = as_mixer(spec).longest()
    if n is None:
        pytest.skip("any length")
    assert trace(spec, lambda layer, x: layer(x), n).shape == (1, n, FEATURES)
    with pytest.raises(ValueError, match=rf"length {n + 1} is more than max_length={n}"):
        trace(spec, lambda layer, x: layer(x), n + 1)
    if as_mixer(spec).decoder_error() is None:
        with pytest.raises(ValueError, match=rf"length: expected at most max_length={n} of the scores, got {n + 1}"):
            trace(spec, lambda layer: layer.init_cache(1, n + 1))


@parametrize_variants
def test_cross_attention_is_refused_by_name_or_works(spec):
    error = as_mixer(spec).cross_attention_error()
    if error is None:
        assert trace(spec, lambda layer, x, other: layer(x, other), 4, 6).shape == (1, 4, FEATURES)
    else:
        with pytest.raises(ValueError, match=f"^x_kv: {re.escape(error)}"):
            trace(spec, lambda layer, x, other: layer(x, other), 4, 6)
        assert "use " in error, "says what to do"


@parametrize_variants
def test_causality_is_refused_by_name_where_it_cannot_be(spec):
    error = as_mixer(spec).decoder_error()
    if error is None:
        pytest.skip("can be causal")
    with pytest.raises(ValueError, match=f"^causal: {re.escape(error)}"):
        trace(spec, lambda layer, x: layer(x, causal=True), 4)
    with pytest.raises(ValueError, match=re.escape(error)):
        trace(spec, lambda layer: layer.init_cache(1, 4))


@parametrize_variants
def test_segments_without_positions_are_refused_where_the_mixer_is_indexed_by_them(spec):
    """Else a packed row would silently be indexed by slot."""

    def call(layer, x):
        return layer(x, q_segments=jnp.ones((1, 4), jnp.int32))

    if as_mixer(spec).reads_positions():
        with pytest.raises(ValueError, match="q_positions: expected the positions within the segments"):
            trace(spec, call, 4)
    else:
        assert trace(spec, call, 4).shape == (1, 4, FEATURES)


@pytest.mark.parametrize("name", ["R", "R+V"])
def test_layer_dropout(name):
    """The key decides: the same key draws the same, another key otherwise, no key nothing."""
    layer = sj.Attention(sj.synthesizer(name, MAX_LENGTH), 6, 2, 4, rngs=nnx.Rngs(0), dropout_rate=0.5)
    graph, state = nnx.split(layer)
    call = jax.jit(lambda state, x, key: nnx.merge(graph, state)(x, dropout_key=key))
    x = draw((BATCH, LENGTH, FEATURES))
    first, again, other = (call(state, x, jax.random.key(seed)) for seed in (0, 0, 1))
    none = call(state, x, None)
    np.testing.assert_array_equal(first, again)
    assert np.all(np.any(first != other, axis=-1))
    assert np.all(np.any(first != none, axis=-1))


def test_dropout_rates_are_checked():
    for rate in (1.0, -0.1, 1.5):
        with pytest.raises(ValueError, match=rf"dropout_rate: expected a rate from 0 to below 1, got {rate}"):
            sj.Attention(sj.DotProduct(), 6, 2, 4, rngs=nnx.Rngs(0), dropout_rate=rate)
