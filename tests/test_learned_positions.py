"""A trained table of positions, added to the embeddings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx

import synthesizer_jax as sj

SIZES = {"vocab_size": 17, "features": 8, "mlp_features": 12, "heads": 2, "head_dim": 4, "learned_positions": 7}
TOLERANCE = 1e-5  # logits of size 1 after two layers and a product over the features
FIRST, SECOND = [3, 4, 5], [6, 7, 8, 9]


def model_of(config, kind):
    """(graph, state) with drawn parameters."""
    graph, state = nnx.split(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))))
    flat, structure = jax.tree.flatten(state)
    draw = np.random.default_rng(0).standard_normal
    return graph, structure.unflatten([jnp.asarray(draw(leaf.shape) / 2, jnp.float32) for leaf in flat])


@functools.partial(jax.jit, static_argnums=0, compiler_options=oracle.QUICK_TO_COMPILE)
def encoder_decoder(graph, state):
    model = nnx.merge(graph, state)
    encoder = jnp.asarray([[*SECOND, 0, 0], [1, 2, 3, 4, 5, 6]], jnp.int32)
    decoder = jnp.asarray([[0, 3, 4, 5], [0, 9, 8, 7]], jnp.int32)
    cache, steps = model.init_cache(encoder, 7), []
    for tokens in (decoder[:, :2], decoder[:, 2:3], decoder[:, 3:]):
        logits, cache = model.decode_step(tokens, cache)
        steps.append(logits)
    packed = {
        "encoder_segment_ids": jnp.asarray([[1] * 3 + [2] * 4], jnp.int32),
        "encoder_positions": jnp.asarray([[0, 1, 2, 0, 1, 2, 3]], jnp.int32),
        "decoder_segment_ids": jnp.asarray([[1, 1, 2, 2]], jnp.int32),
        "decoder_positions": jnp.asarray([[0, 1, 0, 1]], jnp.int32),
    }
    row = model(jnp.asarray([FIRST + SECOND], jnp.int32), jnp.asarray([[0, 5, 0, 6]], jnp.int32), **packed)
    alone = [
        model(jnp.asarray([tokens], jnp.int32), jnp.asarray([[0, n]], jnp.int32))
        for tokens, n in ((FIRST, 5), (SECOND, 6))
    ]
    return model(encoder, decoder), jnp.concatenate(steps, axis=1), row, jnp.concatenate(alone, axis=1)


@pytest.mark.parametrize("attention", ["V", "LightConv[width=3]"])
def test_steps_equal_the_full_forward_and_packed_rows_their_examples(attention):
    graph, state = model_of(sj.t5_tiny(attention, **SIZES), sj.EncoderDecoder)
    full, steps, row, alone = encoder_decoder(graph, state)
    np.testing.assert_allclose(steps, full, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(row, alone, rtol=0, atol=TOLERANCE)
    state["position_embedding"][...] *= 0
    without = encoder_decoder(graph, state)[0]
    assert np.abs(np.asarray(full - without)).max() > 0.1, "they do something"


def test_a_language_model_decodes_with_its_positions():
    graph, state = model_of(sj.lm_tiny("V", **SIZES), sj.DecoderOnly)

    @functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
    def run(state):
        model, tokens = nnx.merge(graph, state), jnp.asarray([[0, 3, 4, 5, 6]], jnp.int32)
        cache, steps = model.init_cache(1, 7), []
        for part in (tokens[:, :3], tokens[:, 3:4], tokens[:, 4:]):
            logits, cache = model.decode_step(part, cache)
            steps.append(logits)
        return model(tokens), jnp.concatenate(steps, axis=1)

    full, steps = run(state)
    np.testing.assert_allclose(steps, full, rtol=0, atol=TOLERANCE)


def test_one_table_serves_encoder_and_decoder():
    for make in (sj.t5_tiny, sj.lm_tiny, functools.partial(sj.classifier_tiny, 3)):
        plain = {name: size for name, size in SIZES.items() if name != "learned_positions"}
        assert sj.count_parameters(make("V", **SIZES)) == sj.count_parameters(make("V", **plain)) + 7 * 8
    config = sj.t5_tiny("V", **SIZES)
    assert sj.config_from_json(sj.to_json(config)) == config


def test_longer_sequences_are_refused():
    config = sj.t5_tiny("V", **SIZES)
    tokens = [jax.ShapeDtypeStruct((1, length), jnp.int32) for length in (8, 4)]

    def trace(call, *inputs):
        return jax.eval_shape(lambda *inputs: call(sj.EncoderDecoder(config, rngs=nnx.Rngs(0)), *inputs), *inputs)

    for call in (lambda m, x, y: m(x, y), lambda m, x, y: m(y, x), lambda m, x, y: m.init_cache(y, 8)):
        with pytest.raises(ValueError, match="learned_positions: expected sequences of at most 7 tokens, got 8; build"):
            trace(call, *tokens)
    with pytest.raises(ValueError, match="learned_positions: expected a positive whole number, got 0"):
        sj.t5_tiny("V", learned_positions=0)
