"""Encoder-decoders: what must make no difference, dropout, gradients, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from variants import MAX_LENGTH, MIXERS

import synthesizer_jax as sj
from synthesizer_jax.models import parameters
from synthesizer_jax.nn.attention import as_mixer
from synthesizer_jax.nn.layers import RMSNorm

SIZES = {"vocab_size": 17, "features": 8, "mlp_features": 12, "heads": 2, "head_dim": 4, "encoder_layers": 2}
QUICK = functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
TOLERANCE = 1e-5  # of logits up to 3, through 4 layers, summed in another order

SCORES = dict(MIXERS)
# The forms of scores that differ in a model: low-rank, shared bias, fixed, with positions of its own for each row; and
# mixers: with caches of another form, or in the encoder alone and with parameters that its layers share.
MODELS = {
    "V": ("relu", True),
    "R": ("gated-gelu", False),
    "fixedR": ("relu", True),
    "R+V": ("relu", True),
    "D+V authors'": ("gated-gelu", False),
    "FD+V": ("relu", True),
    "Transformer-XL": ("relu", True),
    "token mixing MLP": ("gated-gelu", False),
    "Linformer layerwise": ("relu", True),
}


def configure(name="R+V", activation="relu", tied=True, **overrides):
    spec = SCORES[name]
    fields = SIZES | {"decoder_layers": 2, "mlp_activation": activation, "tied_embedding": tied} | overrides
    in_decoder = SCORES["R+V"] if as_mixer(spec).decoder_error() else spec
    return sj.EncoderDecoderConfig(encoder_attention=spec, decoder_attention=in_decoder, **fields)


models = pytest.mark.parametrize("config", [configure(n, *v) for n, v in MODELS.items()], ids=list(MODELS))

ENCODER_TOKENS = np.array([[3, 5, 2, 9, 16, 0, 0], [7, 1, 4, 4, 8, 2, 3]], np.int32)
DECODER_TOKENS = np.array([[0, 6, 2, 13, 1, 0], [0, 4, 15, 2, 2, 9]], np.int32)


def tokens():
    return jnp.asarray(ENCODER_TOKENS), jnp.asarray(DECODER_TOKENS)


@functools.cache
def initial(config):
    """Drawn (trained, fixed) parameters, nothing at a symmetric start. By numpy: no compilation."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        return jnp.asarray(rng.standard_normal(leaf.shape) / 2, jnp.float32)

    return jax.tree.map(draw, parameters.abstract(config))


def stacked(tree):
    """An unscanned tree in the layout of a scanned one."""
    if not isinstance(tree, dict):
        return tree
    if sorted(tree) == ["0", "1"]:
        return jax.tree.map(lambda *layers: jnp.stack(layers), tree["0"], tree["1"])
    return {name: stacked(child) for name, child in tree.items()}


def unstacked(tree):
    """The reverse."""
    if not isinstance(tree, dict):
        return tree
    split = tree.pop("layers") if "layers" in (tree := dict(tree)) else None
    layers = {} if split is None else {"layers": {str(i): jax.tree.map(lambda x, i=i: x[i], split) for i in (0, 1)}}
    return {name: unstacked(child) for name, child in tree.items()} | layers


def loss_and_gradients(config, trained, fixed, dropout_key=None):
    """(logits, gradient) of a fixed combination of all logits."""
    cotangent = jnp.asarray(np.random.default_rng(5).standard_normal((2, 6, config.vocab_size)), jnp.float32)

    def loss(trained):
        logits = parameters.bind(config, trained, fixed)(*tokens(), dropout_key=dropout_key)
        return jnp.sum(logits * cotangent), logits

    (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
    return logits, gradients


run = QUICK(loss_and_gradients, static_argnums=0)


def close(actual, expected, tolerance=TOLERANCE):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert oracle.relative_error(a, e, floor=0.1) < tolerance, jax.tree_util.keystr(path)


# Equivalences


DROPOUT = configure("R+V", "gated-gelu", tied=False, dropout_rate=0.5, mlp_features=64)
KEY = jax.random.key(4)


def unscanned(config):
    return dataclasses.replace(config, scan_layers=False)


def test_scanned_equals_unscanned():
    """The same initial values; the same logits, dropout and gradients."""
    inits = (QUICK(lambda key, c=c: parameters.init(c, key))(KEY) for c in (DROPOUT, unscanned(DROPOUT)))
    (one, _), (many, _) = inits
    jax.tree.map(np.testing.assert_array_equal, one, stacked(many))
    trained, fixed = initial(DROPOUT)
    logits, gradients = run(unscanned(DROPOUT), unstacked(trained), unstacked(fixed), KEY)
    close((logits, stacked(gradients)), run(DROPOUT, trained, fixed, KEY))


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(DROPOUT, remat="full"),
        dataclasses.replace(DROPOUT, remat="dots"),
        unscanned(dataclasses.replace(DROPOUT, remat="full")),
    ],
    ids=["full", "dots", "unscanned"],
)
def test_remat_changes_nothing(config):
    trained, fixed = initial(DROPOUT)
    expected = run(DROPOUT, trained, fixed, KEY)
    if config.scan_layers:
        close(run(config, trained, fixed, KEY), expected)
    else:
        logits, gradients = run(config, unstacked(trained), unstacked(fixed), KEY)
        close((logits, stacked(gradients)), expected)
    for c, recomputes in ((config, True), (dataclasses.replace(config, remat="none"), False)):
        program = jax.make_jaxpr(functools.partial(loss_and_gradients, c))(*initial(c), KEY)
        assert (" remat" in str(program) or " checkpoint[" in str(program)) == recomputes


@models
def test_packed_equals_separate_and_decoding_equals_the_full_forward(config):
    trained, fixed = initial(config)
    packed = {
        "encoder_input_tokens": [[3, 5, 2, 7, 1, 4, 4, 0]],
        "encoder_segment_ids": [[1, 1, 1, 2, 2, 2, 2, 0]],
        "encoder_positions": [[0, 1, 2, 0, 1, 2, 3, 0]],
        "decoder_input_tokens": [[0, 6, 0, 4, 15, 0]],
        "decoder_segment_ids": [[1, 1, 2, 2, 2, 0]],
        "decoder_positions": [[0, 1, 0, 1, 2, 0]],
    }
    packed = {name: jnp.asarray(ids, jnp.int32) for name, ids in packed.items()}

    @QUICK
    def everything(trained, fixed, packed):
        model = parameters.bind(config, trained, fixed)
        inputs, targets = packed["encoder_input_tokens"], packed["decoder_input_tokens"]
        separate = model(inputs[:, :3], targets[:, :2]), model(inputs[:, 3:7], targets[:, 2:5])
        encoder, decoder = tokens()
        steps = {}
        for name, sizes in (("steps", (1,) * 6), ("prefill", (4, 1, 1))):
            cache, outs, start = model.init_cache(encoder, 8), [], 0
            for size in sizes:
                logits, cache = model.decode_step(decoder[:, start : start + size], cache)
                outs.append(logits)
                start += size
            steps[name] = jnp.concatenate(outs, axis=1)
        return model(**packed), separate, model(encoder, decoder), steps

    logits, (first, second), full, steps = everything(trained, fixed, packed)
    close(logits[:, :2], first)
    close(logits[:, 2:5], second)
    close(steps["steps"], full)
    close(steps["prefill"], full)


@models
def test_causality_padding_and_no_recompilation(config):
    trained, fixed = initial(config)
    forward = QUICK(lambda trained, fixed, encoder, decoder: parameters.bind(config, trained, fixed)(encoder, decoder))
    encoder, decoder = tokens()
    before = forward(trained, fixed, encoder, decoder)
    for t in range(1, 6):
        after = forward(trained, fixed, encoder, decoder.at[:, t].set(11))
        np.testing.assert_array_equal(before[:, :t], after[:, :t])
        assert np.all(np.any(before[:, t] != after[:, t], axis=-1))
    assert forward._cache_size() == 1
    # More padding changes no logit: the numbers are summed in another order, no more.
    close(forward(trained, fixed, jnp.pad(encoder, ((0, 0), (0, 3))), decoder), before)
    # Every input token is seen, and padding by nobody.
    changed = np.any(before != forward(trained, fixed, encoder.at[:, 4].set(11), decoder), axis=(1, 2))
    assert changed.all()


def test_dropout_masks_differ_by_layer_and_step():
    """The MLP's hidden units that a layer dropped are the rows of wo without gradient."""
    trained, fixed = initial(DROPOUT)

    def dropped(key):
        _, gradients = run(DROPOUT, trained, fixed, key)
        masks = [gradients[stack]["layers"]["mlp"]["wo"] for stack in ("encoder", "decoder")]
        return np.concatenate([~np.any(mask, axis=-1) for mask in masks])  # [4 layers, m]: dropped in both sequences

    first, other = dropped(KEY), dropped(jax.random.key(1))
    assert 0.15 < first.mean() < 0.35  # 0.25 +- 0.03 of 256 draws
    assert len({mask.tobytes() for mask in first}) == 4
    np.testing.assert_array_equal(first, dropped(KEY))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("name", "activation"), [("R", "relu"), ("nested", "gated-gelu"), ("fixedR", "relu")])
def test_every_trained_parameter_has_a_gradient_also_in_bfloat16(name, activation):
    config = configure(name, activation, tied=activation == "relu")
    trained, fixed = initial(config)
    logits, gradients = run(config, trained, fixed)
    for path, gradient in jax.tree.leaves_with_path(gradients):
        assert np.any(gradient), jax.tree_util.keystr(path)
    assert bool(fixed) == (name == "fixedR")
    if name == "fixedR":
        return
    half_logits, half_gradients = run(dataclasses.replace(config, dtype="bfloat16"), trained, fixed)
    assert half_logits.dtype == jnp.float32
    assert oracle.relative_error(half_logits, logits) < 0.1
    # Every parameter's gradient points the same way: the cosine of a gradient with a wrong term is far from 1.
    for (path, a), b in zip(jax.tree.leaves_with_path(half_gradients), jax.tree.leaves(gradients), strict=True):
        cosine = np.vdot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b))
        assert cosine > 0.97, (jax.tree_util.keystr(path), cosine)


def test_ids_outside_the_vocabulary_give_nan():
    """JAX would clamp or wrap them and read another token's vector."""
    config = configure("V")
    trained, fixed = initial(config)
    encoder, decoder = tokens()
    forward = QUICK(lambda decoder: parameters.bind(config, trained, fixed)(encoder, decoder))
    for bad in (17, -1):
        assert np.isnan(forward(decoder.at[0, 2].set(bad))[0, 2]).all()


def test_pure_view_of_a_model():
    """split takes an NNX model apart, bind puts it together."""
    config = configure("fixedR")
    trained, fixed = initial(config)
    model = parameters.bind(config, trained, fixed)
    assert isinstance(model, sj.EncoderDecoder)
    jax.tree.map(np.testing.assert_array_equal, parameters.split(model), (trained, fixed))
    assert sj.count_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(trained))
    assert list(fixed["encoder"]["layers"]["attention"]["scores"]) == ["R"]


# What is refused


def abstract_logits(config, encoder_length, decoder_length, **more):
    def build(encoder, decoder):
        trained, fixed = parameters.init(config, jax.random.key(0))
        return parameters.bind(config, trained, fixed)(encoder, decoder, **more)

    shapes = [jax.ShapeDtypeStruct((2, length), jnp.int32) for length in (encoder_length, decoder_length)]
    return jax.eval_shape(build, *shapes)


def test_wrong_inputs_are_refused():
    config = configure("R+V")
    assert abstract_logits(config, MAX_LENGTH, MAX_LENGTH).shape == (2, MAX_LENGTH, 17)
    for lengths in ((MAX_LENGTH + 1, 4), (4, MAX_LENGTH + 1)):
        with pytest.raises(
            ValueError, match=rf"Random: query length {MAX_LENGTH + 1} is more than max_length={MAX_LENGTH}"
        ):
            abstract_logits(config, *lengths)
    with pytest.raises(ValueError, match=r"encoder_segment_ids, decoder_segment_ids: expected both or neither"):
        abstract_logits(config, 4, 4, encoder_segment_ids=jnp.ones((2, 4), jnp.int32))
    one = jnp.ones((2, 4), jnp.int32)
    with pytest.raises(ValueError, match="encoder_positions and decoder_positions: expected beside segment ids"):
        abstract_logits(config, 4, 4, encoder_segment_ids=one, decoder_segment_ids=one)
    with pytest.raises(ValueError, match="^decoder_positions: expected beside segment ids"):
        abstract_logits(config, 4, 4, encoder_segment_ids=one, decoder_segment_ids=one, encoder_positions=one)

    def cache():
        trained, fixed = parameters.init(config, jax.random.key(0))
        return parameters.bind(config, trained, fixed).init_cache(jnp.asarray(ENCODER_TOKENS), MAX_LENGTH + 1)

    with pytest.raises(ValueError, match=rf"length: expected at most max_length={MAX_LENGTH} of the scores, got"):
        jax.eval_shape(cache)


# T5's other layers


def test_rms_norm_and_mlps_equal_the_oracle():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 5)).astype(np.float32)
    cotangent = rng.standard_normal((2, 3, 5)).astype(np.float32)
    scale = rng.standard_normal(5).astype(np.float32)
    relu = {"wi": (5, 7), "wo": (7, 5)}
    gated = {"wi_0": (5, 7), "wi_1": (5, 7), "wo": (7, 5)}
    cases = [
        (lambda: sj.RMSNorm(5, rngs=nnx.Rngs(0)), {"scale": scale}, lambda t: oracle.rms_norm(t["x"], t["scale"])),
        *(
            (
                lambda activation=activation: sj.MLP(5, 7, activation=activation, rngs=nnx.Rngs(0)),
                {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()},
                lambda t: oracle.mlp(t, t["x"]),
            )
            for activation, shapes in (("relu", relu), ("gated-gelu", gated))
        ),
    ]
    for make, params, function in cases:
        graph, state = nnx.split(nnx.eval_shape(make))

        def loss(params, x, graph=graph, state=state):
            filled = nnx.from_flat_state([(path, v.replace(params[path[0]])) for path, v in nnx.to_flat_state(state)])
            y = nnx.merge(graph, filled)(x)
            return jnp.sum(y * cotangent), y

        (_, y), (gradients, x_gradient) = QUICK(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
        expected, expected_gradients = oracle.gradients(function, params | {"x": x}, cotangent)
        assert oracle.relative_error(y, expected) < 1e-6
        assert oracle.worst(gradients | {"x": x_gradient}, expected_gradients, floor=1.0)[0] < 1e-5


def test_the_norm_has_the_derivatives_of_its_formula():
    """Forwards, backwards and twice, against plain JAX in float64."""
    x, move, cotangent = (jax.random.normal(jax.random.key(i), (2, 3, 8)) for i in range(3))
    layer = RMSNorm(8, rngs=nnx.Rngs(0))
    layer.scale[...] = jnp.linspace(0.5, 2, 8)

    def formula(x):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * layer.scale[...].astype(x.dtype)

    def derivatives(function, x, move, cotangent):
        def gradient(x):
            return jax.vjp(function, x)[1](cotangent)[0]

        return jax.jvp(function, (x,), (move,)), gradient(x), jax.jvp(gradient, (x,), (move,))[1]

    with jax.enable_x64(True):
        wanted = derivatives(formula, *(a.astype(jnp.float64) for a in (x, move, cotangent)))
    for found, exact in zip(*map(jax.tree.leaves, (derivatives(layer, x, move, cotangent), wanted)), strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)
