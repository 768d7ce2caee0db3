"""Classifiers: the encoder-decoder's encoder with a pooled head, padding, gradients, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from variants import MAX_LENGTH, VARIANTS

import synthesizer_jax as sj
from synthesizer_jax.models import parameters

QUICK = functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
TOLERANCE = 1e-5  # of logits up to 3, through 2 layers, summed in another order
CLASSES = 3
TOKENS = np.array([[3, 5, 2, 9, 16, 0, 0], [7, 1, 4, 4, 8, 2, 3]], np.int32)

SCORES = dict(VARIANTS)
MODELS = {  # (mixer, activation, pooling)
    "V": (SCORES["V"], "relu", "mean"),
    "fixedR+V": (sj.synthesizer("fixedR+V", MAX_LENGTH), "gated-gelu", "first"),
    "FR+V": (SCORES["FR+V"], "relu", "mean"),
    "Linformer layerwise": (sj.Linformer(MAX_LENGTH, rank=3, sharing="layerwise"), "relu", "first"),
}
SIZES = {"vocab_size": 17, "features": 8, "mlp_features": 12, "heads": 2, "head_dim": 4, "encoder_layers": 2}


def configure(name="V", **overrides):
    mixer, activation, pooling = MODELS[name]
    fields = {"mlp_activation": activation, "pooling": pooling, "encoder_attention": mixer, "num_classes": CLASSES}
    return sj.EncoderOnlyConfig(**SIZES | fields | overrides)


models = pytest.mark.parametrize("config", [configure(name) for name in MODELS], ids=list(MODELS))


@functools.cache
def initial(config):
    """Drawn (trained, fixed) parameters, nothing at a symmetric start. By numpy: no compilation."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) / 2, jnp.float32), parameters.abstract(config)
    )


def apply(config, *arguments, **keywords):
    return QUICK(lambda trained, fixed: parameters.bind(config, trained, fixed)(*arguments, **keywords))(
        *initial(config)
    )


@models
def test_logits_are_the_head_of_the_encoder_decoders_encoder(config):
    """EncoderDecoder.encode, tested elsewhere; pooling and head by loops in float64."""
    shared = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in ("num_classes", "pooling")
    }
    decoder = {"decoder_layers": 1, "decoder_attention": sj.DotProduct(), "tied_embedding": True}
    whole = sj.EncoderDecoderConfig(**shared, **decoder)
    (trained, fixed), (others, other_fixed) = initial(config), initial(whole)
    with_encoder = others | {name: trained[name] for name in ("embedding", "encoder")}

    @QUICK
    def run(trained, fixed, with_encoder, other_fixed):
        model = parameters.bind(whole, with_encoder, other_fixed | fixed)
        return parameters.bind(config, trained, fixed)(jnp.asarray(TOKENS)), model.encode(jnp.asarray(TOKENS))

    logits, encoded = run(trained, fixed, with_encoder, other_fixed)
    assert logits.shape == (2, CLASSES) and logits.dtype == jnp.float32
    kernel, bias = (np.asarray(trained["classifier"][name], np.float64) for name in ("kernel", "bias"))
    for row, tokens, vectors in zip(logits, TOKENS, np.asarray(encoded, np.float64), strict=True):
        real = [vector for token, vector in zip(tokens, vectors, strict=True) if token]
        pooled = real[0] if config.pooling == "first" else sum(real) / len(real)
        assert oracle.relative_error(row, pooled @ kernel + bias, floor=0.1) < TOLERANCE


@models
def test_padding_makes_no_difference_and_every_token_does(config):
    trained, fixed = initial(config)
    forward = QUICK(lambda trained, fixed, tokens: parameters.bind(config, trained, fixed)(tokens))
    tokens = jnp.asarray(TOKENS)
    before = forward(trained, fixed, tokens)
    assert oracle.relative_error(forward(trained, fixed, jnp.pad(tokens, ((0, 0), (0, 4)))), before, 0.1) < TOLERANCE
    for t in range(5):
        assert np.all(np.any(before != forward(trained, fixed, tokens.at[:, t].set(11)), axis=-1)), t
    alone = forward(trained, fixed, tokens[:1])
    assert oracle.relative_error(alone, before[:1], 0.1) < TOLERANCE  # other rows are not seen


@pytest.mark.parametrize("name", ["V", "fixedR+V"])
def test_a_row_without_tokens_has_the_bias_of_the_head_and_finite_gradients(name):
    config = configure(name)
    trained, fixed = initial(config)
    tokens = jnp.asarray(TOKENS).at[1].set(0)

    @QUICK
    def run(trained):
        def loss(trained):
            logits = parameters.bind(config, trained, fixed)(tokens)
            return jnp.sum(jnp.square(logits)), logits

        return jax.grad(loss, has_aux=True)(trained)

    gradients, logits = run(trained)
    np.testing.assert_allclose(logits[1], trained["classifier"]["bias"], rtol=1e-6)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("name", ["fixedR+V", "FR+V", "Linformer layerwise"])
def test_every_trained_parameter_has_a_gradient(name):
    config = configure(name)
    trained, fixed = initial(config)
    cotangent = jnp.asarray(np.random.default_rng(5).standard_normal((2, CLASSES)), jnp.float32)

    def loss(trained):
        return jnp.sum(parameters.bind(config, trained, fixed)(jnp.asarray(TOKENS)) * cotangent)

    for path, gradient in jax.tree.leaves_with_path(QUICK(jax.grad(loss))(trained)):
        assert np.any(gradient), jax.tree_util.keystr(path)
    assert bool(fixed) == (name == "fixedR+V")


def test_logits_are_float32_also_in_bfloat16():
    config = configure("V")
    full = apply(config, jnp.asarray(TOKENS))
    half = QUICK(lambda *p: parameters.bind(dataclasses.replace(config, dtype="bfloat16"), *p)(jnp.asarray(TOKENS)))(
        *initial(config)
    )
    assert half.dtype == jnp.float32 and oracle.relative_error(half, full, 1.0) < 0.1


def test_scanned_equals_unscanned():
    """The same initial values; the same logits with dropout, which differ from those without."""
    config = configure("FR+V", dropout_rate=0.5)
    other = dataclasses.replace(config, scan_layers=False)
    key = jax.random.key(4)

    @QUICK
    def both(key):
        one, many = parameters.init(config, key), parameters.init(other, key)
        models = [parameters.bind(config, *one), parameters.bind(other, *many)]
        logits = [model(jnp.asarray(TOKENS), dropout_key=key) for model in models]
        return one[0]["encoder"]["layers"], many[0]["encoder"]["layers"], logits, models[0](jnp.asarray(TOKENS))

    stacked, layers, (scanned, unscanned), plain = both(key)
    jax.tree.map(lambda a, *b: np.testing.assert_array_equal(a, b), stacked, layers["0"], layers["1"])
    assert oracle.relative_error(scanned, unscanned, floor=0.1) < TOLERANCE
    assert oracle.relative_error(scanned, plain, floor=0.1) > 0.01


def test_attention_weights_ignore_padding_and_sum_to_1():
    config = configure("FR+V")
    weights = QUICK(lambda *p: parameters.bind(config, *p).attention_weights(jnp.asarray(TOKENS)))(*initial(config))
    assert weights.shape == (2, 2, 2, 7, 7)  # layers, b, h, q, k
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)
    assert not weights[:, 0, :, :, 5:].any()


def test_pure_view_and_paths():
    """Checkpoints hold these paths: a change breaks everyone's."""
    config = configure("Linformer layerwise")
    trained, fixed = initial(config)
    model = parameters.bind(config, trained, fixed)
    assert isinstance(model, sj.EncoderOnly)
    jax.tree.map(np.testing.assert_array_equal, parameters.split(model), (trained, fixed))
    assert sorted(trained) == ["classifier", "embedding", "encoder"]
    assert {name: leaf.shape for name, leaf in trained["classifier"].items()} == {
        "kernel": (8, CLASSES),
        "bias": (CLASSES,),
    }
    assert sorted(trained["encoder"]["shared"]) == ["E"]
    declared = parameters.abstract(config)[0]["classifier"]
    assert (declared["kernel"].axes, declared["bias"].axes) == (("embed", None), (None,))


def test_a_sequence_that_is_too_long_is_refused():
    config = configure("FR+V")
    with pytest.raises(ValueError, match="FactorizedRandom: query length 13 is more than max_length=12"):
        apply(config, jnp.ones((1, MAX_LENGTH + 1), jnp.int32))
