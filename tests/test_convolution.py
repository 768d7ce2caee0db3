"""Lightweight and dynamic convolution against slow loops; decoding, DropConnect, widths of layers, counts, errors."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_convolution
import pytest
from flax import nnx

import synthesizer_jax as sj
from synthesizer_jax.mixers import Surroundings
from synthesizer_jax.ops import convolution

FEATURES, LENGTH = 4, 6
TOLERANCE = 2e-6  # float32 rounding of sums of a dozen numbers of size 1; gradients over max(1, the largest)

KEY_MASK = np.array([[True] * 4 + [False] * 2, [False, True, True, False, True, True]])
SEGMENTS = np.array([[1, 1, 2, 2, 2, 0], [1, 2, 2, 2, 3, 3]], np.int32)

CASES = {
    "encoder": {},
    "encoder padded": {"key_mask": KEY_MASK},
    "decoder padded": {"key_mask": KEY_MASK, "causal": True},
    "encoder packed": {"segments": SEGMENTS},
    "decoder packed": {"segments": SEGMENTS, "causal": True},
}
SPECS = {
    "light": sj.LightweightConv(3, heads=2),
    "light, wider than the row": sj.LightweightConv(8, heads=4, glu=False, bias=True),
    "light renormalized": sj.LightweightConv(5, heads=2, renormalize=True),
    "light without softmax": sj.LightweightConv(4, heads=1, softmax=False, separable=True),
    "dynamic": sj.DynamicConv(3, heads=2),
    "dynamic, wider than the row": sj.DynamicConv(8, heads=4, bias=True, separable=True),
    "dynamic renormalized": sj.DynamicConv(4, heads=2, glu=False, renormalize=True),
    "dynamic without softmax": sj.DynamicConv(3, heads=1, softmax=False),
    "one tap": sj.DynamicConv(1, heads=2),
}
parametrize_specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def draw(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def params_of(spec, features=FEATURES):
    declared = spec.params(sj.Dims(features, 2, 4))
    return {name: draw(param.shape, 1 + i) / 2 for i, (name, param) in enumerate(sorted(declared.items()))}


def around_of(case, **more):
    segments = case.get("segments")
    return Surroundings(
        key_mask=None if "key_mask" not in case else jnp.asarray(case["key_mask"]),
        q_segments=None if segments is None else jnp.asarray(segments),
        causal=case.get("causal", False),
        **more,
    )


# By products, what is no row of variants.py, which test_mixers.py holds to these loops. Lightweight kernels go by products
# unless renormalising makes them differ from token to token.
ALGORITHMS = [(name, "products") for name in ("light, wider than the row", "dynamic without softmax", "one tap")] + [
    (name, "blocks") for name, spec in SPECS.items() if spec.renormalize or isinstance(spec, sj.DynamicConv)
]


@pytest.fixture(params=["products", "blocks"])
def algorithm(request, monkeypatch):
    """Both algorithms at sizes that loops can follow: blocks of 4 tokens, so that rows end inside one."""
    monkeypatch.setattr(convolution, "_WIDE_HEAD", 10**9 if request.param == "products" else 1)
    monkeypatch.setattr(convolution, "_BLOCK", 4)
    return request.param


@functools.cache
def expected(name):
    """By loops, for each case: (outputs, gradients of the parameters and of x)."""
    spec, cotangent = SPECS[name], draw((2, LENGTH, FEATURES), 7)
    inputs = {"params": params_of(spec), "x": draw((2, LENGTH, FEATURES))}
    return {
        case: oracle.gradients(
            lambda t, masks=masks: oracle_convolution.layer(spec, t["params"], t["x"], **masks), inputs, cotangent
        )
        for case, masks in CASES.items()
    }


@pytest.mark.parametrize(("name", "algorithm"), ALGORITHMS, indirect=["algorithm"])
def test_values_and_gradients_are_those_of_the_loops(name, algorithm):
    spec, cotangent = SPECS[name], jnp.asarray(draw((2, LENGTH, FEATURES), 7))

    def loss(params, x):
        ys = {case: spec(params, x, None, around_of(masks)) for case, masks in CASES.items()}
        return {case: jnp.sum(y * cotangent) for case, y in ys.items()}, ys

    @functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
    def run(params, x):
        _, pull, ys = jax.vjp(loss, params, x, has_aux=True)
        return {case: (ys[case], pull({c: jnp.float32(c == case) for c in CASES})) for case in CASES}

    found = run(jax.tree.map(jnp.asarray, params_of(spec)), jnp.asarray(draw((2, LENGTH, FEATURES))))
    for case, (y, gradients) in expected(name).items():
        np.testing.assert_allclose(found[case][0], y, rtol=0, atol=TOLERANCE, err_msg=case)
        own = dict(found[case][1][0]) | {"x": found[case][1][1]}
        for array, gradient in (gradients["params"] | {"x": gradients["x"]}).items():
            scale = max(1.0, np.abs(gradient).max())
            np.testing.assert_allclose(
                own[array] / scale, gradient / scale, rtol=0, atol=TOLERANCE, err_msg=f"{case}, {array}"
            )


@parametrize_specs
def test_weights_are_the_matrix_that_is_applied(spec):
    params, x = params_of(spec), draw((2, LENGTH, FEATURES))
    run = functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)(
        lambda params, x: {name: spec.weights(params, x, None, around_of(masks)) for name, masks in CASES.items()}
    )
    for name, found in run(jax.tree.map(jnp.asarray, params), jnp.asarray(x)).items():
        masks = CASES[name]
        assert found.dtype == jnp.float32
        by_loops = oracle_convolution.weights(spec, oracle.numbers(params), oracle.numbers(x), **masks)
        np.testing.assert_allclose(found, by_loops, rtol=0, atol=TOLERANCE, err_msg=name)


# Algorithms


@pytest.mark.parametrize(("width", "length"), [(1, 129), (9, 1), (9, 127), (9, 128), (9, 300), (140, 260)])
def test_blocks_equal_products_at_their_real_size(length, width):
    """Lengths around the block of 128 tokens, and a width that reaches beyond a block."""
    u, kernels = jnp.asarray(draw((1, length, 8))), jnp.asarray(draw((width, 1, length, 2), 1)) / width
    for causal in (False, True):
        left = convolution.taps_before(width, causal)
        np.testing.assert_allclose(
            convolution._blocks(u, kernels, left), convolution._products(u, kernels, None, left), rtol=0, atol=TOLERANCE
        )


def test_wide_heads_go_by_blocks_and_narrow_ones_by_products(monkeypatch):
    called = []
    for name in ("_blocks", "_products", "_soft_products"):
        monkeypatch.setattr(convolution, name, lambda u, *_, name=name: called.append(name) or u)
    u = jnp.zeros((1, 3, 64))
    for heads in (2, 4):
        convolution.convolve(u, jnp.zeros((3, 1, 1, heads)), True)
        convolution.convolve(u, jnp.zeros((3, 1, 3, heads)), True)
        convolution.convolve_normalised(u, jnp.zeros((3, 1, 3, heads)), True)
    assert called == ["_products", "_blocks", "_blocks", "_products", "_products", "_soft_products"]


@pytest.mark.parametrize("heads", [2, 64])
@pytest.mark.parametrize("kind", [sj.LightweightConv, sj.DynamicConv])
def test_no_matrix_of_all_pairs_is_built(kind, heads):
    """Forward and backward, no array of the program grows with the square of the length."""
    spec, features = kind(5, heads=heads), 64
    largest = {}
    for length in (1024, 2048):
        x = jax.ShapeDtypeStruct((2, length, features), jnp.float32)
        params = {
            name: jax.ShapeDtypeStruct(p.shape, jnp.float32) for name, p in spec.params(sj.Dims(features, 2, 4)).items()
        }
        program = jax.make_jaxpr(jax.grad(lambda params, x: jnp.sum(spec(params, x)), argnums=(0, 1)))(params, x)
        largest[length] = max(sizes(program.jaxpr))
    assert largest[2048] <= 2 * largest[1024]
    assert largest[2048] < 2 * heads * 2048**2 / 4


def sizes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (out.aval.size for out in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from sizes(inner)


def test_logits_far_apart_and_padding_that_is_not_finite():
    """Softmax in float32 of entries of +-200; inf and NaN in padding reach no real token."""
    x = jnp.asarray(draw((2, LENGTH, FEATURES))).at[0, 4:].set(jnp.nan).at[1, 0].set(jnp.inf)
    mask = jnp.asarray(KEY_MASK)
    for spec in (sj.LightweightConv(3, heads=2), sj.DynamicConv(3, heads=2)):
        params = {name: jnp.asarray(array) for name, array in params_of(spec).items()}
        name = "kernel" if "kernel" in params else "kernel_generator"
        params[name] = 200 * jnp.sign(params[name])
        for causal in (False, True):
            around = Surroundings(key_mask=mask, causal=causal)
            y = spec(params, x, None, around)
            clean = spec(params, jnp.where(mask[..., None], x, 0), None, around)
            np.testing.assert_array_equal(np.asarray(y)[KEY_MASK], np.asarray(clean)[KEY_MASK])
            assert np.all(np.isfinite(np.asarray(clean)))


def test_bfloat16_sums_in_float32(algorithm):
    """31 equal taps of 1/31: a bfloat16 running sum would be off by several per cent, one rounding by 2^-8."""
    u = jnp.asarray(np.abs(draw((1, 40, 2))) + 1, jnp.bfloat16)
    kernels = jnp.full((31, 1, 40, 1), 1 / 31)
    exact = convolution.convolve(u.astype(jnp.float32), kernels, False)
    # Blocks round the kernels too, as attention rounds its weights.
    bound = 2**-8 if algorithm == "products" else 2**-7
    y = convolution.convolve(u, kernels, False)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float32), exact, rtol=bound)


# Decoding


@parametrize_specs
def test_steps_equal_the_full_forward_with_padding_on_the_left(spec):
    params, x = jax.tree.map(jnp.asarray, params_of(spec)), jnp.asarray(draw((2, LENGTH, FEATURES)))
    mask = jnp.asarray([[False, False, True, True, True, True], [True] * LENGTH])
    room = jnp.pad(mask, ((0, 0), (0, 3)), constant_values=True)  # the cache is longer than the sequence

    @functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
    def run(params, x):
        def decode(sizes):
            cache, outs, start = spec.init_cache(params, FEATURES, 2, LENGTH + 3, jnp.float32), [], 0
            for size in sizes:
                shapes = jax.tree.map(jnp.shape, cache)
                y, cache = spec.step(params, x[:, start : start + size], cache, Surroundings(key_mask=room))
                assert jax.tree.map(jnp.shape, cache) == shapes
                outs.append(y)
                start += size
            return jnp.concatenate(outs, axis=1)

        full = spec(params, x, None, Surroundings(key_mask=mask, causal=True))
        return full, {sizes: decode(sizes) for sizes in ((1,) * LENGTH, (LENGTH,), (4, 1, 1), (1, 5))}

    full, decoded = run(params, x)
    for sizes, y in decoded.items():
        np.testing.assert_allclose(y, full, rtol=0, atol=TOLERANCE, err_msg=str(sizes))


def test_the_cache_holds_width_minus_one_tokens_whatever_the_length():
    spec = sj.DynamicConv(9, heads=2)
    shapes = {length: jax.tree.map(jnp.shape, spec.init_cache({}, 4, 2, length, jnp.bfloat16)) for length in (8, 4096)}
    assert shapes[8] == shapes[4096] == {"inputs": (2, 8, 4), "index": ()}


# DropConnect


def test_drop_connect_is_drawn_per_sequence_for_light_and_per_token_for_dynamic_kernels(algorithm):
    x, rate = draw((2, LENGTH, FEATURES)), 0.4
    dropout = sj.Dropout(rate, jax.random.key(3))
    for spec in (sj.LightweightConv(3, heads=2), sj.DynamicConv(3, heads=2)):
        length = 1 if isinstance(spec, sj.LightweightConv) else LENGTH
        factors = convolution.drop_taps((3, 2, length, 2), dropout)
        assert set(np.unique(factors)) == {np.float32(0), np.float32(1 / (1 - rate))}
        for masks in (CASES["encoder padded"], CASES["decoder packed"]):
            params = params_of(spec)
            found = spec(jax.tree.map(jnp.asarray, params), jnp.asarray(x), None, around_of(masks, dropout=dropout))
            spread = np.broadcast_to(np.moveaxis(factors, 0, -1), (2, LENGTH, 2, 3))
            by_loops = oracle_convolution.layer(
                spec, oracle.numbers(params), oracle.numbers(x), factors=spread, **masks
            )
            np.testing.assert_allclose(found, oracle.value(by_loops), rtol=0, atol=TOLERANCE)


def test_drop_connect_gradients_keep_the_draw(algorithm):
    """The backward pass multiplies by the forward's factors: a central difference in float64 sees it."""
    spec = sj.DynamicConv(3, heads=2)
    params, x = params_of(spec), jnp.asarray(draw((2, LENGTH, FEATURES)))
    around = Surroundings(dropout=sj.Dropout(0.4, jax.random.key(3)))
    loss = jax.jit(lambda generator: jnp.sum(spec(params | {"kernel_generator": generator}, x, None, around) ** 2))
    generator, direction = jnp.asarray(params["kernel_generator"]), jnp.asarray(draw((FEATURES, 2, 3), 9))
    slope = (loss(generator + 1e-2 * direction) - loss(generator - 1e-2 * direction)) / 2e-2
    # The difference's own error is 1e-4 of the third derivative; a wrong factor changes the slope by tens of per cent.
    np.testing.assert_allclose(jnp.vdot(jax.grad(loss)(generator), direction), slope, rtol=2e-3)


def test_drop_rates():
    factors = np.asarray(convolution.drop_taps((100, 100), sj.Dropout(0.25, jax.random.key(0))))
    assert abs((factors == 0).mean() - 0.25) < 0.02  # 4.6 standard deviations of 10,000 draws
    assert abs(factors.mean() - 1) < 0.03


# Stacks and models


def test_a_width_for_each_layer():
    spec = sj.LightweightConv((3, 7, 15), heads=4)
    assert [spec.of_layer(i, 3) for i in range(3)] == [sj.LightweightConv(w, heads=4) for w in (3, 7, 15)]
    assert sj.DynamicConv(9).of_layer(5, 12) == sj.DynamicConv(9)
    with pytest.raises(
        ValueError, match=r"width: expected one width per layer, got 3 widths \(3, 7, 15\) for 2 layers"
    ):
        spec.of_layer(0, 2)
    with pytest.raises(ValueError, match=r"width: expected one number, got \(3, 7, 15\), a width for each layer"):
        spec.params(sj.Dims(8, 4, 2))
    with pytest.raises(ValueError, match="scan_layers=False"):
        sj.t5_tiny(sj.LightweightConv((3, 5)))
    with pytest.raises(ValueError, match="got 3 widths .* for 2 layers"):
        sj.t5_tiny(spec, scan_layers=False)


def test_a_model_with_a_width_for_each_layer_decodes_as_it_reads():
    config = sj.t5_tiny(
        sj.DynamicConv((3, 5)),
        encoder_attention=sj.LightweightConv((5, 3)),
        vocab_size=17,
        features=8,
        mlp_features=12,
        heads=2,
        head_dim=4,
        scan_layers=False,
    )
    graph, state = nnx.split(sj.EncoderDecoder(config, rngs=nnx.Rngs(0)))
    encoder_tokens = jnp.asarray([[3, 4, 5, 6, 0, 0], [7, 8, 9, 10, 11, 12]], jnp.int32)
    decoder_tokens = jnp.asarray([[0, 3, 4, 5, 6, 7, 8], [0, 9, 8, 7, 6, 5, 4]], jnp.int32)

    @functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
    def run(state):
        model = nnx.merge(graph, state)
        cache, steps = model.init_cache(encoder_tokens, 9), []
        for tokens in (decoder_tokens[:, :3], *(decoder_tokens[:, i : i + 1] for i in range(3, 7))):
            logits, cache = model.decode_step(tokens, cache)
            steps.append(logits)
        return model(encoder_tokens, decoder_tokens), jnp.concatenate(steps, axis=1), cache

    full, steps, cache = run(state)
    # Logits of size 1 after two layers and a product over the features.
    np.testing.assert_allclose(steps, full, rtol=0, atol=1e-5)
    assert [layer["self"]["inputs"].shape for layer in cache["layers"]] == [(2, 2, 8), (2, 4, 8)]
    assert model_widths(config) == {"encoder": [5, 3], "decoder": [3, 5]}


def model_widths(config):
    model = nnx.eval_shape(lambda: sj.EncoderDecoder(config, rngs=nnx.Rngs(0)))
    return {
        name: [layer.attention.mixer.width for layer in getattr(model, name).layers] for name in ("encoder", "decoder")
    }


def test_counts_of_the_t5_scale_comparison():
    """The paper's table says LightConv 224M and DynConv 257M.

    So says one reading of the released configurations (Narang et al. 2021; models/lightweight_convolution.gin and
    dynamic_convolution.gin over vanilla_transformer.gin): kernels per channel, a linear map within the separable
    convolution and one behind it, biases, and 512 trained positions that encoder and decoder share. Its layer norms and
    MLPs also have biases, which ours don't: 0.14M and 0.08M that no rounding shows.
    """
    e, w, layers, vocab, positions = 768, 9, 24, 32_128, 512
    cross, norms = 12 * 4 * e * e, (2 * 12 + 3 * 12 + 2) * e
    linear = 2 * (e * e + e) + (e + e * e + e) + (e * e + e)  # glu; depth-wise bias and point-wise; out
    rest = (vocab + positions) * e + cross + norms
    form = "width=9, heads='features', bias=True, separable=True"
    light = sj.count_parameters(sj.paper_c4_base(f"LightConv[{form}]", learned_positions=positions))
    assert light == rest + layers * (linear + w * e + 2 * e * 3072) == 223_554_048
    dynamic = sj.paper_c4_base(f"DynConv[{form}]", mlp_features=512, learned_positions=positions)
    assert sj.count_parameters(dynamic) == rest + layers * (linear + w * (e * e + e) + 2 * e * 512) == 256_584_192
    norm_biases, mlp_biases = norms, {3072: layers * (3072 + e), 512: layers * (512 + e)}
    theirs = light + norm_biases + mlp_biases[3072], 256_584_192 + norm_biases + mlp_biases[512]
    for ours, them, said in zip((light, 256_584_192), theirs, (224, 257), strict=True):
        assert round(ours / 1e6) == round(them / 1e6) == said


@pytest.mark.parametrize(
    ("notation", "spec"),
    [
        ("LightConv[width=9]", sj.LightweightConv(9)),
        ("DynConv[width=9, heads='features']", sj.DynamicConv(9, heads="features")),
        ("LightConv[width=(3,7,15)]", sj.LightweightConv((3, 7, 15))),
        ("DynConv[width=9, heads=16, glu=False]", sj.DynamicConv(9, heads=16, glu=False)),
        ("DynamicConv[width=(3, 5)]", sj.DynamicConv((3, 5))),
    ],
)
def test_notation_and_json(notation, spec):
    assert sj.synthesizer(notation, 512) == spec
    depth = len(spec.width) if isinstance(spec.width, tuple) else 2
    config = sj.t5_tiny(notation, encoder_layers=depth, decoder_layers=depth, scan_layers=False)
    assert config.encoder_attention == spec and sj.config_from_json(sj.to_json(config)) == config


def test_notation_errors():
    with pytest.raises(ValueError, match=r"notation: 'LightConv' in 'LightConv' lacks width"):
        sj.synthesizer("LightConv", 512)
    with pytest.raises(ValueError, match=r"LightConv in 'LightConv\[width=9\]\+V' makes no scores"):
        sj.synthesizer("LightConv[width=9]+V", 512)


# Errors


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sj.LightweightConv(0), r"width: expected a positive whole number, got 0"),
        (lambda: sj.DynamicConv((3, 2.5)), r"width: expected a positive whole number, got 2.5"),
        (lambda: sj.DynamicConv(()), r"width: expected a width, or one for each layer, got an empty tuple"),
        (lambda: sj.LightweightConv(3, heads=0), r"heads: expected a positive whole number, got 0"),
        (lambda: sj.LightweightConv(3, heads="channels"), r"heads: expected a positive whole number, got 'channels'"),
        (lambda: sj.LightweightConv(3, glu="no"), r"glu: expected True or False, got 'no'"),
        (
            lambda: sj.LightweightConv(3, softmax=False, renormalize=True),
            r"renormalize: the softmax over the taps inside a row needs softmax=True",
        ),
        (
            lambda: sj.LightweightConv(3, heads=5).params(sj.Dims(8, 2, 4)),
            r"heads: 8 features don't divide among 5 heads .* such as heads=4",
        ),
        (lambda: sj.DynamicConv(3).params(sj.Dims(8, 3, 4)), r"heads: 8 features don't divide among 3 heads"),
        (
            lambda: call(x_kv=jnp.zeros((1, 5, 4))),
            r"x_kv: LightweightConv mixes neighbours within one sequence: use Dot",
        ),
        (lambda: call(memory=jnp.zeros((1, 2, 4))), r"memory: LightweightConv has no keys to extend"),
        (
            lambda: call(bias=jnp.zeros((1, 2, 3, 3))),
            r"bias: LightweightConv makes no scores that a bias could be added",
        ),
        (lambda: call(k_segments=jnp.ones((1, 3), jnp.int32)), r"k_segments: LightweightConv mixes one sequence with"),
        (lambda: step(bias=jnp.zeros((1, 2, 1, 3))), r"bias: LightweightConv makes no scores"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_what_cannot_be_is_refused_by_name(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def call(x_kv=None, **around):
    spec = sj.LightweightConv(3, heads=2)
    return spec(params_of(spec), jnp.zeros((1, 3, 4)), x_kv, Surroundings(**around))


def step(**around):
    spec = sj.LightweightConv(3, heads=2)
    cache = spec.init_cache({}, 4, 1, 3, jnp.float32)
    return spec.step(params_of(spec), jnp.zeros((1, 1, 4)), cache, Surroundings(**around))
