"""The Linen layer: the NNX layer's numbers, T5X's calls, and life inside a Linen model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax import linen as nn
from flax import nnx
from variants import MAX_LENGTH, MIXERS

import synthesizer_jax as sj
from synthesizer_jax.nn.attention import as_mixer

FEATURES, HEADS, HEAD_DIM = 6, 2, 4
BATCH, LENGTH = 2, 7
TOLERANCE = 2e-6  # two orders of summation of the same float32 numbers, outputs of size 1

KEY_MASK = jnp.array([[True] * 4 + [False] * 3, [True, False, True, True, False, True, False]])
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 2]], jnp.int32)
POSITIONS = jnp.array([[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5]], jnp.int32)

quick_jit = functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)


def rows(wanted=lambda mixer: True):
    """The rows of MIXERS whose mixer is wanted, as pytest's parameters."""
    chosen = [(name, scores) for name, scores in MIXERS if wanted(as_mixer(scores))]
    return pytest.mark.parametrize("scores", [scores for _, scores in chosen], ids=[name for name, _ in chosen])


def draw(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def nnx_layer(scores, **options):
    return sj.Attention(scores, FEATURES, HEADS, HEAD_DIM, rngs=nnx.Rngs(0), **options)


def linen_layer(scores, **options):
    return sj.linen.Attention(scores, HEADS, HEAD_DIM, **options)


def drawn(scores):
    """An NNX layer's (graph, trained, fixed), all parameters drawn."""
    graph, state = nnx.split(nnx.eval_shape(lambda: nnx_layer(scores)))
    flat, structure = jax.tree.flatten(state)
    state = structure.unflatten([draw(leaf.shape, 1 + i) / 2 for i, leaf in enumerate(flat)])
    return graph, *nnx.split_state(state, nnx.Param, sj.Fixed)


def shared_of(scores):
    """Drawn parameters of the stack; most mixers have none."""
    declared = as_mixer(scores).stack_params(sj.Dims(FEATURES, HEADS, HEAD_DIM))
    return {name: draw(param.shape, 50) for name, param in declared.items()}


def leaves(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same(found, expected):
    found, expected = leaves(found), leaves(expected)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)


# The NNX layer's numbers


def gradients(scores):
    """Of the NNX and of the Linen layer: (trained, fixed, x, shared) -> ((loss, y), gradients) but for `fixed`."""
    graph, layer = drawn(scores)[0], linen_layer(scores)
    masks = {"key_mask": KEY_MASK, "causal": as_mixer(scores).decoder_error() is None}
    cotangent = draw((BATCH, LENGTH, FEATURES), 61)

    def nnx_loss(trained, fixed, x, shared):
        y = nnx.merge(graph, trained, fixed)(x, **masks, shared=shared)
        return jnp.sum(y * cotangent), y

    def linen_loss(trained, fixed, x, shared):
        y = layer.apply(sj.linen.from_nnx(trained) | sj.linen.from_nnx(fixed), x, **masks, shared=shared)
        return jnp.sum(y * cotangent), y

    return [jax.value_and_grad(loss, argnums=(0, 2, 3), has_aux=True) for loss in (nnx_loss, linen_loss)]


@rows()
def test_the_program_is_the_nnx_layers(scores):
    """Values and gradients of both layers, traced: operation by operation the same, and so to the bit."""
    arguments = (*drawn(scores)[1:], draw((BATCH, LENGTH, FEATURES), 60), shared_of(scores))
    one, other = (str(jax.make_jaxpr(gradient)(*arguments)) for gradient in gradients(scores))
    assert one == other and len(one) > 1000


def kinds():
    """The first row of each kind of scores and of mixer."""
    first = {}
    for name, scores in MIXERS:
        first.setdefault((type(as_mixer(scores)), type(scores)), (name, scores))
    return first.values()


@pytest.mark.parametrize(("name", "scores"), kinds())
def test_values_and_gradients_equal_the_nnx_layers(name, scores):
    """To the bit, of trained parameters, inputs and what the stack shares, under a key mask and causally."""
    of_nnx, of_linen = (quick_jit(gradient) for gradient in gradients(scores))
    arguments = (*drawn(scores)[1:], draw((BATCH, LENGTH, FEATURES), 60), shared_of(scores))
    (_, expected), expected_gradients = of_nnx(*arguments)
    (_, y), found_gradients = of_linen(*arguments)
    assert np.all(np.isfinite(expected))
    np.testing.assert_array_equal(y, expected)
    assert_same(found_gradients, expected_gradients)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected_gradients))


@rows()
def test_parameters_have_the_names_shapes_and_axes_of_the_nnx_layer(scores):
    made = jax.eval_shape(
        lambda: linen_layer(scores).init(jax.random.key(0), jnp.zeros((1, 4, FEATURES)), shared=shared_of(scores))
    )
    state = nnx.state(nnx.eval_shape(lambda: nnx_layer(scores)))
    expected = {
        ("params" if isinstance(v, nnx.Param) else "fixed", *path): (v.shape, v.dtype, v.axes)
        for path, v in nnx.to_flat_state(state)
    }
    boxes = jax.tree.leaves_with_path(made, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    found = {tuple(key.key for key in path): (box.value.shape, box.value.dtype, box.names) for path, box in boxes}
    assert found == expected
    assert leaves(nn.get_partition_spec(made)).keys() == leaves(sj.linen.from_nnx(state)).keys()


CALLS = {
    "positions": {"q_positions": POSITIONS},
    "packed": {"q_segments": SEGMENTS, "q_positions": POSITIONS, "causal": True},
    "keys' own segments and positions": {
        "q_segments": SEGMENTS,
        "k_segments": SEGMENTS[::-1],
        "q_positions": POSITIONS,
        "k_positions": POSITIONS[::-1],
    },
    "bias": {"bias": draw((1, HEADS, LENGTH, LENGTH), 70), "key_mask": KEY_MASK},
    "mask": {"mask": draw((BATCH, 1, LENGTH, LENGTH), 71) > 0},
    "memory": {"memory": draw((BATCH, 3, FEATURES), 72), "causal": True},
    "another sequence": {"inputs_kv": draw((BATCH, 5, FEATURES), 73), "key_mask": KEY_MASK[:, :5]},
}


@pytest.mark.parametrize("call", CALLS)
def test_every_argument_means_what_it_means_in_nnx(call):
    arguments = CALLS[call]
    for scores in (sj.synthesizer("R+V", MAX_LENGTH), sj.DotProduct()):
        if call == "another sequence" and as_mixer(scores).cross_attention_error():
            continue
        graph, trained, fixed = drawn(scores)
        x, layer = draw((BATCH, LENGTH, FEATURES), 60), linen_layer(scores)
        named = {"x_kv" if name == "inputs_kv" else name: value for name, value in arguments.items()}
        expected = nnx.merge(graph, trained, fixed)(x, **named)
        variables = sj.linen.from_nnx(trained)
        np.testing.assert_array_equal(layer.apply(variables, x, **arguments), expected)
        weights = layer.apply(variables, x, **arguments, method="weights")
        np.testing.assert_array_equal(weights, nnx.merge(graph, trained, fixed).weights(x, **named))
        _, sown = layer.apply(variables, x, **arguments, sow_weights=True, mutable="intermediates")
        np.testing.assert_array_equal(sown["intermediates"]["attention_weights"][0], weights)


def test_computation_and_parameters_have_their_own_dtypes():
    x = draw((BATCH, LENGTH, FEATURES))
    layer = linen_layer(sj.synthesizer("R+V", MAX_LENGTH), dtype=jnp.bfloat16, param_dtype=jnp.float32)
    y, variables = jax.eval_shape(layer.init_with_output, jax.random.key(0), x)
    assert y.dtype == jnp.bfloat16 and all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(variables))
    low = linen_layer(sj.DotProduct(), param_dtype=jnp.bfloat16)
    y, variables = jax.eval_shape(low.init_with_output, jax.random.key(0), x)
    assert y.dtype == jnp.float32 and all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(variables))


def test_paths_of_the_algorithm_agree():
    x, scores = draw((BATCH, LENGTH, FEATURES)), sj.Random(MAX_LENGTH)
    variables = quick_jit(linen_layer(scores).init)(jax.random.key(0), x)
    ys = [linen_layer(scores, path=path).apply(variables, x, key_mask=KEY_MASK) for path in ("shared", "xla")]
    np.testing.assert_allclose(*ys, rtol=0, atol=TOLERANCE)


# Masks as T5X's models make them

TOKENS = jnp.array([[5, 6, 7, 8, 9, 0, 0], [5, 6, 7, 8, 9, 4, 3]])


@pytest.mark.parametrize("notation", ["V", "R", "FR", "D", "FD", "R+V", "fixedR"])
def test_masks_of_t5x_equal_the_keywords(notation):
    """At real tokens; a padded query may attend to nothing under such a mask, and gets 0."""
    scores = sj.synthesizer(notation, MAX_LENGTH)
    _, trained, fixed = drawn(scores)
    variables = sj.linen.from_nnx(trained) | sj.linen.from_nnx(fixed)
    apply = functools.partial(linen_layer(scores).apply, variables)
    real = TOKENS > 0
    padding = nn.make_attention_mask(real, real)  # floats [b, 1, q, k]
    decoder = nn.combine_masks(nn.make_causal_mask(TOKENS), padding)
    packing = nn.make_attention_mask(SEGMENTS, SEGMENTS, jnp.equal, dtype=bool)
    packed = nn.combine_masks(nn.make_attention_mask(SEGMENTS > 0, SEGMENTS > 0, dtype=bool), packing, dtype=bool)

    @quick_jit
    def run(x):
        return {
            "encoder": (apply(x, x, padding), apply(x, key_mask=real), real),
            "decoder": (apply(x, x, decoder), apply(x, key_mask=real, causal=True), real),
            "packed": (
                apply(x, x, packed, q_positions=POSITIONS),
                apply(x, q_segments=SEGMENTS, q_positions=POSITIONS),
                SEGMENTS > 0,
            ),
        }

    for case, (mask, keywords, real) in run(draw((BATCH, LENGTH, FEATURES), 60)).items():
        np.testing.assert_allclose(mask[real], keywords[real], rtol=0, atol=TOLERANCE, err_msg=case)
        assert not np.any(mask[~real]), case


@rows(lambda mixer: mixer.mask_error())
def test_a_mask_of_pairs_is_refused_by_name_where_there_are_no_pairs(scores):
    name = type(as_mixer(scores)).__name__
    x, mask = jnp.zeros((1, 4, FEATURES)), jnp.ones((1, 1, 4, 4), bool)
    with pytest.raises(ValueError, match=rf"mask: {name} has no weight for each pair of tokens .* key_mask, causal"):
        jax.eval_shape(lambda: linen_layer(scores).init(jax.random.key(0), x, mask=mask, shared=shared_of(scores)))


# Decoding with a cache collection


def decoded(layer, variables, x, sizes, **arguments):
    """Outputs of steps of these sizes, the cache made by a first call with inputs of the full length."""
    y, state = layer.apply(variables, x, decode=True, mutable="cache", **arguments)
    np.testing.assert_array_equal(y, layer.apply(variables, x, causal=True, **arguments))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state)), "the first call makes an empty cache"
    step = quick_jit(lambda cache, x: layer.apply(variables | cache, x, decode=True, mutable="cache", **arguments))
    outs, start = [], 0
    for size in sizes:
        y, state = step(state, x[:, start : start + size])
        outs.append(y)
        start += size
    return jnp.concatenate(outs, axis=1), state


def caches():
    """The first row of each form that a cache has."""
    first = {}
    for name, scores in MIXERS:
        mixer = as_mixer(scores)
        if mixer.decoder_error():
            continue
        params = jax.eval_shape(lambda scores=scores: nnx_layer(scores)._params())
        cache = jax.eval_shape(lambda p, mixer=mixer: mixer.init_cache(p, FEATURES, 1, 4, jnp.float32), params)
        first.setdefault(str(jax.tree.map(lambda leaf: leaf.ndim, cache)), (name, scores))
    return first.values()


@pytest.mark.parametrize(("name", "scores"), caches())
def test_decoding_equals_the_causal_forward(name, scores):
    _, trained, fixed = drawn(scores)
    variables = sj.linen.from_nnx(trained) | sj.linen.from_nnx(fixed)
    layer, x = linen_layer(scores), draw((BATCH, 5, FEATURES), 60)
    shared = {"shared": shared_of(scores)}
    expected = layer.apply(variables, x, causal=True, **shared)
    for sizes in ((1,) * 5, (2, 1, 2)):
        y, state = decoded(layer, variables, x, sizes, **shared)
        np.testing.assert_allclose(y, expected, rtol=0, atol=TOLERANCE)
    assert state["cache"]["cache_index"] == 5


def test_decoding_with_t5xs_bias_mask_and_beams():
    """A bias [1, h, q, k] for all steps, a mask of keys, and a cache that is tiled between the first call and the steps."""
    layer, x = linen_layer(sj.synthesizer("R+V", MAX_LENGTH)), draw((BATCH, 5, FEATURES), 60)
    bias, seen = draw((1, HEADS, 5, 5), 61), jnp.array([[True] * 5, [False, True, False, True, True]])
    variables = quick_jit(lambda x: layer.init(jax.random.key(1), x, x, decode=True))(x)
    params, cache = {"params": variables["params"]}, variables["cache"]
    assert sorted(cache) == ["cache_index", "cached_keys", "cached_value"]
    expected = layer.apply(params, x, bias=bias, key_mask=seen, causal=True)

    beams = 3
    tiled = {
        k: v if k == "cache_index" else jax.tree.map(lambda a: jnp.repeat(a, beams, 0), v) for k, v in cache.items()
    }
    mask = jnp.repeat(seen, beams, 0)[:, None, None, :].astype(jnp.float32)
    outs, state = [], {"cache": tiled}
    step = quick_jit(lambda v, x: layer.apply(v, x, x, mask, bias, decode=True, mutable="cache"))
    for i in range(5):
        y, state = step(params | state, jnp.repeat(x[:, i : i + 1], beams, 0))
        outs.append(y)
    found = jnp.concatenate(outs, axis=1)
    np.testing.assert_allclose(found, jnp.repeat(expected, beams, 0), rtol=0, atol=TOLERANCE)
    whole = nn.make_causal_mask(jnp.zeros((BATCH, 5)), dtype=bool) & seen[:, None, None, :]
    for masks in ({"mask": whole}, {"key_mask": seen}):
        y, _ = decoded(layer, params, x, (1, 2, 2), bias=bias, **masks)
        np.testing.assert_allclose(y, expected, rtol=0, atol=TOLERANCE)


# Dropout


def test_dropout_draws_from_its_stream():
    x = draw((BATCH, LENGTH, FEATURES))
    layer = linen_layer(sj.synthesizer("R+V", MAX_LENGTH), dropout_rate=0.5)
    variables = layer.init(jax.random.key(0), x, deterministic=True)

    def call(seed):
        return layer.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(seed)})

    none = layer.apply(variables, x, deterministic=True)
    np.testing.assert_array_equal(call(0), call(0))
    assert np.all(np.any(call(0) != call(1), axis=-1)) and np.all(np.any(call(0) != none, axis=-1))
    same = linen_layer(layer.scores, dropout_rate=0.5, deterministic=True).apply(variables, x)
    np.testing.assert_array_equal(none, same)
    np.testing.assert_array_equal(none, linen_layer(layer.scores).apply(variables, x))
    with pytest.raises(ValueError, match='Parameter "deterministic" must be passed'):
        layer.apply(variables, x)
    with pytest.raises(Exception, match='needs PRNG for "dropout"'):
        layer.apply(variables, x, deterministic=False)


# Parameters from and to NNX


@rows()
def test_parameters_go_to_linen_and_back(scores):
    graph, trained, fixed = drawn(scores)
    layer = nnx.merge(graph, trained, fixed)
    variables = sj.linen.from_nnx(layer)
    assert set(variables) == {"params"} | ({"fixed"} if nnx.to_flat_state(fixed) else set())
    other = nnx.eval_shape(lambda: nnx_layer(scores))
    assert sj.linen.to_nnx(variables, other) is other
    assert nnx.graphdef(other) == graph
    assert_same(nnx.to_pure_dict(nnx.state(other)), nnx.to_pure_dict(nnx.state(layer)))


def test_parameters_stand_in_the_boxes_of_a_target():
    layer = nnx_layer(sj.synthesizer("fixedR+V", MAX_LENGTH))
    made = linen_layer(layer.mixer).init(jax.random.key(1), jnp.zeros((1, 4, FEATURES)))
    abstract = jax.eval_shape(lambda: made)
    variables = sj.linen.from_nnx(layer, made)
    assert jax.tree.structure(variables) == jax.tree.structure(made)
    assert variables["params"]["value"].names == ("embed", "heads", "kv")
    assert variables["fixed"]["scores"]["random"]["R"].names == ("heads", "synth_query", "synth_key")
    assert_same(variables, sj.linen.from_nnx(layer, abstract))
    assert_same(nn.unbox(variables), sj.linen.from_nnx(nnx.state(layer)))
    back = sj.linen.to_nnx(variables | {"cache": {"cache_index": 3}}, nnx_layer(layer.mixer))
    assert_same(nnx.to_pure_dict(nnx.state(back)), nnx.to_pure_dict(nnx.state(layer)))


def test_a_whole_nnx_model_becomes_nested_variables_and_returns():
    model = nnx.List([nnx_layer(sj.Random(8)), nnx.Dict(inner=nnx_layer(sj.DotProduct()))])
    variables = sj.linen.from_nnx(model)
    assert sorted(variables["params"]["1"]["inner"]["scores"]) == ["key", "query"]
    other = nnx.List([nnx_layer(sj.Random(8)), nnx.Dict(inner=nnx_layer(sj.DotProduct()))])
    sj.linen.to_nnx(jax.tree.map(lambda a: a * 2, variables), other)
    assert_same(jax.tree.map(lambda a: a / 2, sj.linen.from_nnx(other)), variables)


def test_parameters_of_another_layer_are_listed():
    layer, other = nnx_layer(sj.Random(8)), nnx_layer(sj.synthesizer("fixedR", 8))
    variables = sj.linen.from_nnx(layer)
    with pytest.raises(
        ValueError,
        match=r"variables: .* Missing: fixed/scores/R\. Unexpected: params/scores/R\. Different: none\. Are both",
    ):
        sj.linen.to_nnx(variables, other)
    longer = linen_layer(sj.Random(9), param_dtype=jnp.bfloat16)
    made = jax.eval_shape(lambda: longer.init(jax.random.key(0), jnp.zeros((1, 4, FEATURES))))
    with pytest.raises(ValueError) as error:
        sj.linen.from_nnx(layer, made)
    text = str(error.value)
    assert "source: expected the parameters of target. Missing: none. Unexpected: none. Different: params/out" in text
    assert "params/scores/R ((2, 8, 8), 'float32') in place of ((2, 9, 9), 'bfloat16')" in text


# Inside a Linen model

VOCABULARY, WIDTH = 11, 16


class Block(nn.Module):
    """x + attention(norm(x)), x + MLP(norm(x)), as a body of nn.scan."""

    scores: object
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, x, mask, deterministic):
        y = nn.RMSNorm()(x)
        attention = sj.linen.Attention(self.scores, heads=2, head_dim=8, dropout_rate=self.dropout_rate)
        x = x + attention(y, y, mask, deterministic=deterministic)
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(2 * WIDTH)(nn.RMSNorm()(x)))), None


class LanguageModel(nn.Module):
    scores: object
    layers: int = 2
    scan: bool = False
    remat: bool = False
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, tokens, deterministic=True):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        mask = nn.make_causal_mask(tokens)
        block = nn.remat(Block, static_argnums=(3,)) if self.remat else Block
        if self.scan:
            block = nn.scan(
                block,
                variable_axes={"params": 0, "fixed": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=(nn.broadcast, nn.broadcast),
                length=self.layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x, _ = block(self.scores, self.dropout_rate, name="blocks")(x, mask, deterministic)
        else:
            for i in range(self.layers):
                x, _ = block(self.scores, self.dropout_rate, name=f"block_{i}")(x, mask, deterministic)
        return nn.Dense(VOCABULARY)(nn.RMSNorm()(x))


def batch_of_tokens(seed, batch=16):
    """Each token is the one two before it plus one: to be predicted by looking back."""
    first = np.random.default_rng(seed).integers(0, VOCABULARY, (batch, 2))
    tokens = [first[:, i % 2] + i // 2 for i in range(10)]
    return jnp.asarray(np.stack(tokens, 1) % VOCABULARY, jnp.int32)


@pytest.mark.parametrize(("notation", "scan", "remat"), [("D+V", False, True), ("fixedR+V", True, False)])
def test_a_small_transformer_trains(notation, scan, remat):
    model = LanguageModel(sj.synthesizer(notation, MAX_LENGTH), scan=scan, remat=remat, dropout_rate=0.1)
    variables = nn.unbox(quick_jit(model.init)(jax.random.key(0), batch_of_tokens(0)))
    params, fixed = variables["params"], {name: v for name, v in variables.items() if name != "params"}
    optimizer = optax.adam(1e-2)

    @quick_jit
    def train(params, state, tokens, key):
        def loss(params):
            logits = model.apply({"params": params} | fixed, tokens, deterministic=False, rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, 1:-1], tokens[:, 2:]).mean()

        loss, gradients = jax.value_and_grad(loss)(params)
        with jax.numpy_dtype_promotion("standard"):  # optax's own mixture of integers and floats
            updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, loss, gradients

    state, losses = optimizer.init(params), []
    for step in range(60):
        params, state, loss, gradients = train(params, state, batch_of_tokens(step), jax.random.key(step))
        losses.append(float(loss))
    assert losses[0] > 2.2 and losses[-1] < 0.7 * losses[0], losses[::20]
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients))
    assert ("fixed" in variables) == ("fixedR" in notation)


def test_a_scanned_stack_is_the_same_stack():
    """Blocks' parameters stacked along the axis "layers", trained and fixed, give the outputs of one block after another."""
    scores, tokens = sj.synthesizer("fixedR+V", MAX_LENGTH), batch_of_tokens(0)
    apart, scanned = LanguageModel(scores), LanguageModel(scores, scan=True)
    variables = nn.unbox(quick_jit(apart.init)(jax.random.key(0), tokens))
    made = jax.eval_shape(lambda: scanned.init(jax.random.key(0), tokens))
    stacked = {}
    for name, tree in variables.items():
        blocks = [tree[f"block_{i}"] for i in range(2)]
        rest = {key: value for key, value in tree.items() if not key.startswith("block_")}
        stacked[name] = rest | {"blocks": jax.tree.map(lambda *a: jnp.stack(a), *blocks)}
    assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(jnp.shape, nn.unbox(made))
    found, expected = quick_jit(scanned.apply)(stacked, tokens), quick_jit(apart.apply)(variables, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    specs = nn.get_partition_spec(made)
    assert specs["fixed"]["blocks"]["Attention_0"]["scores"]["random"]["R"] == jax.P(
        "layers", "heads", "synth_query", "synth_key"
    )


def test_parameters_are_sharded_by_their_logical_axes():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rules = (("heads", "model"), ("embed", "data"))
    layer, x = sj.linen.Attention(sj.synthesizer("R+V", 8), heads=4, head_dim=2), draw((BATCH, LENGTH, FEATURES))
    plain = nn.unbox(layer.init(jax.random.key(0), x))
    specs = nn.get_partition_spec(jax.eval_shape(lambda: layer.init(jax.random.key(0), x)))
    shardings = nn.logical_to_mesh_sharding(specs, mesh, rules)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        variables = jax.jit(layer.init, out_shardings=shardings)(jax.random.key(0), x)
        y = jax.jit(layer.apply)(variables, x)
    assert variables["params"]["value"].value.sharding.spec == jax.P("data", "model", None)
    assert variables["params"]["scores"]["random"]["R"].value.sharding.spec == jax.P("model", None, None)
    for name, leaf in leaves(nn.unbox(jax.device_get(variables))).items():
        np.testing.assert_allclose(leaf, leaves(plain)[name], rtol=1e-6, atol=1e-7, err_msg=name)  # jit fuses
    np.testing.assert_allclose(y, layer.apply(plain, x), rtol=0, atol=TOLERANCE)


def test_the_layers_of_a_stack_share_parameters():
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scores = sj.Linformer(MAX_LENGTH, rank=3, sharing="layerwise")
            shared = sj.linen.StackParameters(scores, FEATURES, HEADS, HEAD_DIM, name="shared")()
            for _ in range(2):
                x = x + sj.linen.Attention(scores, HEADS, HEAD_DIM)(x, shared=shared)
            return x

    x = draw((BATCH, LENGTH, FEATURES))
    variables = quick_jit(Stack().init)(jax.random.key(0), x)
    params = variables["params"]
    assert sorted(params) == ["Attention_0", "Attention_1", "shared"]
    assert nn.unbox(params["shared"])["E"].shape == (MAX_LENGTH, 3) and "E" not in params["Attention_0"]
    gradients = quick_jit(jax.grad(lambda v: jnp.sum(Stack().apply(v, x) ** 2)))(variables)
    assert np.any(gradients["params"]["shared"]["E"].value)
    empty = sj.linen.StackParameters(sj.Random(8), FEATURES, HEADS, HEAD_DIM)
    assert empty.apply({}) == {}


def test_through_the_bridge_it_is_an_nnx_module():
    scores, x = sj.synthesizer("fixedR+V", MAX_LENGTH), draw((BATCH, LENGTH, FEATURES))
    bridged = nnx.bridge.ToNNX(linen_layer(scores), rngs=nnx.Rngs(0)).lazy_init(x)
    native = nnx_layer(scores)
    state = nnx.to_flat_state(nnx.state(bridged, (nnx.Param, sj.Fixed)))
    expected = {path: (type(v), v.shape, v.axes) for path, v in nnx.to_flat_state(nnx.state(native))}
    assert {path: (type(v), v.shape, v.axes) for path, v in state} == expected
    sj.linen.to_nnx(sj.linen.from_nnx(native), bridged)
    np.testing.assert_array_equal(bridged(x, key_mask=KEY_MASK, causal=True), native(x, key_mask=KEY_MASK, causal=True))
    gradients = nnx.grad(lambda module: jnp.sum(module(x) ** 2))(bridged)
    assert all(np.any(v[...]) for _, v in nnx.to_flat_state(gradients))
    assert {path[:3] for path, _ in nnx.to_flat_state(gradients)} == {
        ("out",),
        ("value",),
        ("scores", "alpha"),
        ("scores", "dot_product", "query")[:3],
        ("scores", "dot_product", "key")[:3],
    }


# What is refused


def call(scores, *args, init=True, **arguments):
    return jax.eval_shape(lambda: linen_layer(scores).init(jax.random.key(0), *args, **arguments))


X = jnp.zeros((1, 4, FEATURES))


@pytest.mark.parametrize(
    ("attempt", "text"),
    [
        (lambda: call("R+V", X), r"scores: expected scores such as Random\(512\).* got 'R\+V'"),
        (lambda: call(sj.Random(8), X, X + 0), r"inputs_kv: Random scores .* in self-attention leave it out"),
        (lambda: call(sj.Random(3), X), r"Random: query length 4 is more than max_length=3"),
        (lambda: call(sj.Random(3), X, decode=True), r"length: expected at most max_length=3 of the scores, got 4"),
        (
            lambda: call(sj.DotProduct(), X, jnp.zeros((1, 5, FEATURES)), decode=True),
            r"decode: expected self-attention",
        ),
        (
            lambda: call(sj.Random(8), X, decode=True, q_positions=jnp.arange(4), memory=X),
            r"decode: it continues one sequence from its start and goes without q_positions, memory",
        ),
        (lambda: call(sj.Linformer(8, rank=2), X, decode=True), r"decode: Linformer projects the whole sequence"),
        (
            lambda: call(sj.TokenMixing(8), X, decode=True, mask=jnp.ones((1, 1, 1, 4))),
            r"mask: TokenMixing has no weight",
        ),
        (
            lambda: call(sj.TokenMixing(8), X, decode=True, bias=jnp.ones((1, 1, 4, 4))),
            r"bias: TokenMixing has no softmax",
        ),
        (lambda: call(sj.Random(8), X, decode=True, sow_weights=True), r"sow_weights: single steps have no weights"),
        (
            lambda: call(sj.Random(8), X, mask=jnp.ones((1, 1, 4, 5))),
            r"mask: expected booleans of shape \[b\|1, h\|1, q\|1",
        ),
        (
            lambda: linen_layer(sj.Random(8), dropout_rate=1.0).init(jax.random.key(0), X, deterministic=False),
            r"dropout_rate: expected a rate from 0 to below 1, got 1\.0",
        ),
        (
            lambda: sj.linen.Attention(sj.Random(8), heads=0, head_dim=4).init(jax.random.key(0), X),
            r"heads: expected a positive whole number, got 0",
        ),
        (
            lambda: linen_layer(sj.Random(8, trained=False)).apply(
                {"params": {"value": jnp.zeros((6, 2, 4)), "out": jnp.zeros((2, 4, 6))}}
                | {"fixed": {"scores": {"R": jnp.zeros((2, 9, 9))}}},
                X,
            ),
            r"fixed: expected R of shape \(2, 8, 8\), got \(2, 9, 9\)",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_arguments_are_refused(attempt, text):
    with pytest.raises(ValueError, match=text):
        attempt()


def test_missing_parameters_are_named_by_flax():
    variables = nn.unbox(linen_layer(sj.synthesizer("R+V", 8)).init(jax.random.key(0), X))
    del variables["params"]["scores"]["random"]["R"]
    with pytest.raises(Exception, match=r'named "R" in scope "/scores/random"'):
        linen_layer(sj.synthesizer("R+V", 8)).apply(variables, X)
