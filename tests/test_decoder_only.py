"""Language models: the decoder without an encoder, causality, packing, step-by-step decoding, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from variants import MAX_LENGTH, VARIANTS

import synthesizer_jax as sj
from synthesizer_jax.axes import EMBED, Param, ones
from synthesizer_jax.decoding import greedy
from synthesizer_jax.models import parameters

QUICK = functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
TOLERANCE = 1e-5  # of logits up to 3, through 2 layers, summed in another order
VOCAB = 17
TOKENS = np.array([[0, 6, 2, 13, 1, 0], [0, 4, 15, 2, 2, 9]], np.int32)


@dataclasses.dataclass(frozen=True)
class Layer(sj.Mixer):
    """Attention times a gain that the layers of a stack share."""

    attention: sj.MultiHead

    def params(self, dims):
        return self.attention.params(dims)

    def __call__(self, params, x, x_kv=None, around=None):
        return self.attention(params, x, x_kv, around) * around.shared["gain"].astype(x.dtype)

    def weights(self, params, x, x_kv=None, around=None):
        return self.attention.weights(params, x, x_kv, around)

    def init_cache(self, *arguments):
        return self.attention.init_cache(*arguments)

    def step(self, params, x, cache, around=None):
        y, cache = self.attention.step(params, x, cache, around)
        return y * around.shared["gain"].astype(x.dtype), cache


@dataclasses.dataclass(frozen=True)
class Alternating(Layer):
    """Dot products and Random in turn, whose caches differ in shape."""

    attention: sj.MultiHead = sj.MultiHead(sj.DotProduct())

    def stack_params(self, dims):
        return {"gain": Param((dims.features,), (EMBED,), ones)}

    def of_layer(self, layer, depth):
        return Layer(sj.MultiHead((sj.DotProduct(), sj.Random(MAX_LENGTH))[layer % 2]))


SCORES = dict(VARIANTS)
# The forms that differ in a model: (mixer, activation, tied embedding, scanned layers).
MODELS = {
    "V": (SCORES["V"], "relu", True, True),
    "R": (SCORES["R"], "gated-gelu", False, True),
    "fixedR": (SCORES["fixedR"], "relu", True, False),
    "R+V strided": (sj.MultiHead(SCORES["R+V"], keys=sj.Sparse(2, stride=4)), "relu", True, True),
    "token mixing": (sj.TokenMixing(MAX_LENGTH), "relu", True, True),
    "alternating": (Alternating(), "relu", True, False),
}


def configure(name="V", **overrides):
    mixer, activation, tied, scan = MODELS[name]
    sizes = {"vocab_size": VOCAB, "features": 8, "mlp_features": 12, "heads": 2, "head_dim": 4, "decoder_layers": 2}
    fields = {"mlp_activation": activation, "tied_embedding": tied, "scan_layers": scan, "decoder_attention": mixer}
    return sj.DecoderOnlyConfig(**sizes | fields | overrides)


models = pytest.mark.parametrize("config", [configure(name) for name in MODELS], ids=list(MODELS))


@functools.cache
def initial(config):
    """Drawn (trained, fixed) parameters, nothing at a symmetric start. By numpy: no compilation."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) / 2, jnp.float32), parameters.abstract(config)
    )


def close(actual, expected):
    assert oracle.relative_error(actual, expected, floor=0.1) < TOLERANCE


@models
def test_it_is_a_decoder_whose_cross_attention_says_nothing(config):
    """EncoderDecoder, tested elsewhere, with an output projection of 0 in cross-attention."""
    shared = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    whole = sj.EncoderDecoderConfig(**shared, encoder_layers=1, encoder_attention=sj.DotProduct())
    trained, fixed = initial(config)
    other = [tree.get("encoder", {}) for tree in initial(whole)]
    scan = config.scan_layers
    layers = [trained["decoder"]["layers"]] if scan else trained["decoder"]["layers"].values()
    drawn = initial(whole)[0]["decoder"]["layers"]
    drawn = [drawn] if scan else drawn.values()
    crossed = [
        mine | {name: jax.tree.map(jnp.zeros_like, theirs[name]) for name in theirs if name.startswith("cross")}
        for mine, theirs in zip(layers, drawn, strict=True)
    ]
    decoder = trained["decoder"] | {"layers": crossed[0] if scan else dict(zip("01", crossed, strict=True))}
    both = trained | {"decoder": decoder, "encoder": other[0]}
    tokens = jnp.asarray(TOKENS)

    @QUICK
    def forward(trained, fixed, both):
        alone = parameters.bind(config, trained, fixed)(tokens)
        return alone, parameters.bind(whole, both, fixed)(jnp.full((2, 3), 5), tokens)

    close(*forward(trained, fixed, both))


@models
def test_packed_equals_separate_and_decoding_equals_the_full_forward(config):
    trained, fixed = initial(config)
    packed = {
        "decoder_input_tokens": [[0, 6, 0, 4, 15, 0]],
        "decoder_segment_ids": [[1, 1, 2, 2, 2, 0]],
        "decoder_positions": [[0, 1, 0, 1, 2, 0]],
    }
    packed = {name: jnp.asarray(ids, jnp.int32) for name, ids in packed.items()}
    tokens = jnp.asarray(TOKENS)

    @QUICK
    def everything(trained, fixed):
        model = parameters.bind(config, trained, fixed)
        row = packed["decoder_input_tokens"]
        steps = {}
        for name, sizes in (("steps", (1,) * 6), ("prefill", (4, 1, 1))):
            cache, outs, start = model.init_cache(2, 8), [], 0
            for size in sizes:
                logits, cache = model.decode_step(tokens[:, start : start + size], cache)
                outs.append(logits)
                start += size
            steps[name] = jnp.concatenate(outs, axis=1)
        return model(**packed), (model(row[:, :2]), model(row[:, 2:5])), model(tokens), steps

    logits, (first, second), full, steps = everything(trained, fixed)
    assert logits.shape == (1, 6, VOCAB) and logits.dtype == jnp.float32
    close(logits[:, :2], first)
    close(logits[:, 2:5], second)
    close(steps["steps"], full)
    close(steps["prefill"], full)


@models
def test_causality_and_no_recompilation(config):
    """What stands after a token, padding included, changes not a bit before it."""
    trained, fixed = initial(config)
    forward = QUICK(lambda trained, fixed, tokens: parameters.bind(config, trained, fixed)(tokens))
    before = forward(trained, fixed, jnp.asarray(TOKENS))
    for t in range(1, 6):
        after = forward(trained, fixed, jnp.asarray(TOKENS).at[:, t].set(11))
        np.testing.assert_array_equal(before[:, :t], after[:, :t])
        assert np.all(np.any(before[:, t] != after[:, t], axis=-1))
    assert forward._cache_size() == 1


def test_scanned_equals_unscanned():
    """The same initial values; the same logits with dropout."""
    config = configure("R", dropout_rate=0.5)
    other = dataclasses.replace(config, scan_layers=False)
    key, tokens = jax.random.key(4), jnp.asarray(TOKENS)

    @QUICK
    def both(key):
        scanned, unscanned = parameters.init(config, key), parameters.init(other, key)
        logits = [parameters.bind(c, *p)(tokens, dropout_key=key) for c, p in ((config, scanned), (other, unscanned))]
        return scanned[0]["decoder"]["layers"], unscanned[0]["decoder"]["layers"], logits

    stacked, layers, logits = both(key)
    jax.tree.map(lambda one, *many: np.testing.assert_array_equal(one, many), stacked, layers["0"], layers["1"])
    close(*logits)


@pytest.mark.parametrize("name", ["V", "R", "token mixing", "alternating"])
def test_every_trained_parameter_has_a_gradient(name):
    config = configure(name)
    trained, fixed = initial(config)
    cotangent = jnp.asarray(np.random.default_rng(5).standard_normal((2, 6, VOCAB)), jnp.float32)

    def loss(trained):
        return jnp.sum(parameters.bind(config, trained, fixed)(jnp.asarray(TOKENS)) * cotangent)

    for path, gradient in jax.tree.leaves_with_path(QUICK(jax.grad(loss))(trained)):
        assert np.any(gradient), jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", ["V", "R"])  # tied, and with a head of its own
def test_logits_are_float32_also_in_bfloat16(name):
    config = configure(name)

    @functools.partial(QUICK, static_argnums=0)
    def forward(config, trained, fixed):
        return parameters.bind(config, trained, fixed)(jnp.asarray(TOKENS))

    half = forward(dataclasses.replace(config, dtype="bfloat16"), *initial(config))
    assert half.dtype == jnp.float32
    assert oracle.relative_error(half, forward(config, *initial(config))) < 0.1


@pytest.mark.parametrize("name", ["R+V strided", "alternating"])
def test_greedy_decoding_goes_on_from_prompts_of_any_length(name):
    """Against the full forward pass at each position."""
    config = configure(name)
    trained, fixed = initial(config)
    prompt = np.array([[6, 2, 13, 0, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0, 0, 0], [0] * 8], np.int32)
    eos = 1

    @QUICK
    def decode(trained, fixed):
        model = parameters.bind(config, trained, fixed)
        cheaper = {"prompt": jnp.asarray(prompt), "grow": model.grow_cache, "read": model.prefill}
        plain = greedy(model.decode_step, model.init_cache(3, 8), batch=3, max_length=8, eos_id=eos, vocab_size=15)
        said = greedy(
            model.decode_step, model.init_cache(3, 1), batch=3, max_length=8, eos_id=eos, vocab_size=15, **cheaper
        )
        return said, plain

    forward = QUICK(lambda tokens: parameters.bind(config, trained, fixed)(tokens))
    said = np.zeros((3, 9), np.int32)
    for t in range(8):
        chosen = np.asarray(forward(jnp.asarray(said[:, :-1])))[:, t, :15].argmax(axis=-1)
        ended = (said == eos).any(axis=1)
        said[:, t + 1] = np.where(ended, 0, np.where(prompt[:, t] > 0, prompt[:, t], chosen))
    continued, plain = decode(trained, fixed)
    np.testing.assert_array_equal(continued, said[:, 1:])
    np.testing.assert_array_equal(plain[0], said[2, 1:])
    assert len(set(map(tuple, said))) == 3


def test_attention_weights_are_causal_and_sum_to_1():
    config = configure("R")
    weights = QUICK(
        lambda trained, fixed: parameters.bind(config, trained, fixed).attention_weights(jnp.asarray(TOKENS))
    )(*initial(config))
    assert weights.shape == (2, 2, 2, 6, 6)  # layers, b, h, q, k
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)
    assert not np.triu(weights, k=1).any()


def test_pure_view_and_paths():
    """Checkpoints hold these paths: a change breaks everyone's."""
    config = configure("fixedR")
    trained, fixed = initial(config)
    model = parameters.bind(config, trained, fixed)
    assert isinstance(model, sj.DecoderOnly)
    jax.tree.map(np.testing.assert_array_equal, parameters.split(model), (trained, fixed))
    assert sorted(trained) == ["decoder", "embedding"] and sorted(fixed) == ["decoder"]
    assert sorted(trained["decoder"]) == ["final_norm", "layers", "relative_bias"]
    assert sorted(trained["decoder"]["layers"]["0"]) == ["attention", "attention_norm", "mlp", "mlp_norm"]
    untied = parameters.abstract(configure("R"))[0]
    assert untied["lm_head"].shape == (8, VOCAB) and untied["lm_head"].axes == ("embed", "vocab")
    assert parameters.abstract(configure("alternating"))[0]["decoder"]["shared"]["gain"].shape == (8,)


# What is refused


def trace(config, function):
    def build():
        return function(parameters.bind(config, *parameters.init(config, jax.random.key(0))))

    return jax.eval_shape(build)


def test_wrong_inputs_are_refused():
    config, ids = configure("R"), jnp.ones((2, 4), jnp.int32)
    assert trace(config, lambda model: model(jnp.zeros((2, MAX_LENGTH), jnp.int32))).shape == (2, MAX_LENGTH, VOCAB)
    for function, text in (
        (lambda m: m(jnp.zeros((2, MAX_LENGTH + 1), jnp.int32)), "Random: query length 13 is more than max_length=12"),
        (lambda m: m(ids, decoder_segment_ids=ids), "^decoder_positions: expected beside segment ids"),
        (lambda m: m.init_cache(2, MAX_LENGTH + 1), "length: expected at most max_length=12 of the scores, got 13"),
    ):
        with pytest.raises(ValueError, match=text):
            trace(config, function)


@pytest.mark.parametrize("mixer", [sj.Linformer(MAX_LENGTH), sj.TokenMixing(MAX_LENGTH, hidden=10)])
def test_mixers_that_look_ahead_are_refused(mixer):
    with pytest.raises(ValueError, match=f"^decoder_attention: {mixer.decoder_error()[:20]}"):
        configure("V", decoder_attention=mixer)
