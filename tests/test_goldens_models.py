"""Whole encoder-decoders against values from outside the project: the authors' Mesh-TensorFlow Synthesizers, T5 in HF
transformers and in T5X (shared/goldens, sections 1b, 2 and 3): logits, losses, gradients and greedy decoding."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import serialization
from safetensors.numpy import load_file

import synthesizer_jax as sj
from synthesizer_jax.decoding import greedy
from synthesizer_jax.models import parameters
from synthesizer_jax.training.loss import cross_entropy

V1_0 = {"mlp_activation": "relu", "tied_embedding": True}
V1_1 = {"mlp_activation": "gated-gelu", "tied_embedding": False}
LAYER = re.compile(r"(encoder|decoder)/layers/(\d+)/(attention|cross_attention|mlp)(_norm)?/(?:scores/)?(.*)")


def configure(version, heads, buckets=32, max_distance=128, attention="V", **sizes):
    spec = attention if isinstance(attention, sj.Spec) else sj.synthesizer(attention, max_length=16)
    fields = {"vocab_size": 64, "features": 16, "mlp_features": 32, "head_dim": 4} | sizes
    return sj.EncoderDecoderConfig(
        heads=heads,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention=spec,
        decoder_attention=spec,
        relative_buckets=buckets,
        relative_max_distance=max_distance,
        dropout_rate=0.0,
        scan_layers=False,
        **version,
        **fields,
    )


# Names and layouts. Each function gives the array that stands at one of our paths, as a matrix [in, out].


def from_hf(arrays, path):
    """HF: matrices [out, in], the relative bias [buckets, heads]."""
    fixed = {
        "embedding/embedding": "shared.weight",
        "lm_head": "lm_head.weight",
        "encoder/final_norm/scale": "encoder.final_layer_norm.weight",
        "decoder/final_norm/scale": "decoder.final_layer_norm.weight",
        "encoder/relative_bias/rel_embedding": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "decoder/relative_bias/rel_embedding": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    }
    if path in fixed:
        array = arrays[fixed[path]]
        return array.T if path == "lm_head" or "relative" in path else array
    stack, layer, part, norm, leaf = LAYER.fullmatch(path).groups()
    sublayers = ("attention", "mlp") if stack == "encoder" else ("attention", "cross_attention", "mlp")
    name = f"{stack}.block.{layer}.layer.{sublayers.index(part)}"
    if norm:
        return arrays[f"{name}.layer_norm.weight"]
    kind = {"attention": "SelfAttention", "cross_attention": "EncDecAttention", "mlp": "DenseReluDense"}[part]
    leaf = {"query": "q", "key": "k", "value": "v", "out": "o"}.get(leaf, leaf)
    return arrays[f"{name}.{kind}.{leaf}.weight"].T


def from_t5x(arrays, path):
    fixed = {
        "embedding/embedding": "token_embedder/embedding",
        "lm_head": "decoder/logits_dense/kernel",
        "encoder/final_norm/scale": "encoder/encoder_norm/scale",
        "decoder/final_norm/scale": "decoder/decoder_norm/scale",
        "encoder/relative_bias/rel_embedding": "encoder/relpos_bias/rel_embedding",
        "decoder/relative_bias/rel_embedding": "decoder/relpos_bias/rel_embedding",
    }
    if path in fixed:
        return arrays[fixed[path]]
    stack, layer, part, norm, leaf = LAYER.fullmatch(path).groups()
    own = "attention" if stack == "encoder" else "self_attention"
    if norm:
        name = {"attention": own, "cross_attention": "cross_attention", "mlp": "mlp"}[part]
        return arrays[f"{stack}/layers_{layer}/pre_{name}_layer_norm/scale"]
    name = {"attention": own, "cross_attention": "encoder_decoder_attention", "mlp": "mlp"}[part]
    return arrays[f"{stack}/layers_{layer}/{name}/{leaf}/kernel"]


def from_mesh(arrays, path):
    """Mesh: R [n, heads, n], one scalar alpha a layer."""
    fixed = {
        "embedding/embedding": "shared/embedding",
        "encoder/final_norm/scale": "encoder/rms_norm/scale",
        "decoder/final_norm/scale": "decoder/rms_norm/scale",
        "encoder/relative_bias/rel_embedding": "encoder/block_000/layer_000/Synthesizer/relative_attention_bias",
        "decoder/relative_bias/rel_embedding": "decoder/block_000/layer_000/Synthesizer/relative_attention_bias",
    }
    if path in fixed:
        return arrays[fixed[path]]
    stack, layer, part, norm, leaf = LAYER.fullmatch(path).groups()
    sublayers = ("attention", "mlp") if stack == "encoder" else ("attention", "cross_attention", "mlp")
    name = f"{stack}/block_{int(layer):03}/layer_{sublayers.index(part):03}"
    if norm:
        return arrays[f"{name}/rms_norm/scale"]
    kind = {"attention": "Synthesizer", "cross_attention": "EncDecAttention", "mlp": "DenseReluDense"}[part]
    leaf = leaf.rpartition("/")[2]
    if leaf == "R":
        return arrays[f"{name}/{kind}/R"].transpose(1, 0, 2)
    if leaf == "value" and f"{name}/{kind}/kv" in arrays:
        return arrays[f"{name}/{kind}/kv"]
    names = {"query": "q", "key": "k", "value": "v", "out": "o", "w1": "q", "w2": "pi/kernel"}
    return arrays[f"{name}/{kind}/{names.get(leaf, leaf + '/kernel' if part == 'mlp' else leaf)}"]


def load(config, source, arrays):
    """Our tree of the source's arrays; every array of the source has a place in it."""
    trained, fixed = parameters.abstract(config)
    assert not fixed

    def visit(node, path):
        if isinstance(node, dict):
            return {name: visit(child, [*path, name]) for name, child in node.items()}
        return jnp.asarray(source(arrays, "/".join(path)).reshape(node.shape))

    tree = visit(trained, [])
    assert sum(leaf.size for leaf in jax.tree.leaves(tree)) == sum(array.size for array in arrays.values())
    return tree


def logits_of(config, trained, batch):
    return parameters.bind(config, trained, {})(**batch)


def compile_model(config):
    """(logits, encoder outputs, greedy ids) as jitted functions of the parameters and the batch."""

    @functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
    def forward(trained, batch):
        return logits_of(config, trained, batch)

    @functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
    def encode(trained, tokens, segment_ids=None, positions=None):
        return parameters.bind(config, trained, {}).encode(tokens, segment_ids=segment_ids, positions=positions)

    @functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
    def decode(trained, tokens):
        model = parameters.bind(config, trained, {})
        cache = model.init_cache(tokens, 12)
        return greedy(model.decode_step, cache, batch=tokens.shape[0], max_length=12)

    return forward, encode, decode


def batch_of(data, prefix, *names):
    return {name: jnp.asarray(data[prefix + name]) for name in names}


def check(actual, expected, real, tolerance):
    np.testing.assert_allclose(np.asarray(actual)[real], expected[real], rtol=0, atol=tolerance)


def check_gradients(actual, expected, tolerance):
    """Absolute, after division by max(1, largest)."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, found), wanted in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, np.abs(wanted).max())
        np.testing.assert_allclose(
            found / scale, wanted / scale, rtol=0, atol=tolerance, err_msg=jax.tree_util.keystr(path)
        )


def up_to_eos(ids):
    """Ids with what follows the first 1 set to 0."""
    ended = np.cumsum(np.asarray(ids) == 1, axis=1) - (np.asarray(ids) == 1) > 0
    return np.where(ended, 0, ids)


@functools.partial(jax.jit, static_argnums=0, compiler_options=oracle.QUICK_TO_COMPILE)
def gradients_of(loss, trained):
    return jax.value_and_grad(loss)(trained)


# Section 2: HF transformers


@pytest.mark.parametrize(("version", "heads"), [("v1_0", 4), ("v1_1", 3)])
def test_hf_t5(shared, version, heads):
    folder = shared / "goldens" / f"hf_t5_{version}"
    data = np.load(folder / "data.npz")
    config = configure({"v1_0": V1_0, "v1_1": V1_1}[version], heads, buckets=8, max_distance=16)
    trained = load(config, from_hf, load_file(folder / "model.safetensors"))
    forward, encode, decode = compile_model(config)
    inputs, decoder_inputs = jnp.asarray(data["input_ids"]), jnp.asarray(data["decoder_input_ids"])
    assert np.array_equal(data["attention_mask"] > 0, data["input_ids"] > 0)

    batch = {"encoder_input_tokens": inputs, "decoder_input_tokens": decoder_inputs}
    logits = forward(trained, batch)
    np.testing.assert_allclose(logits, data["logits"], rtol=0, atol=5e-5)
    assert oracle.relative_error(logits, data["logits"]) < 1e-5
    check(encode(trained, inputs), data["encoder_output"], data["attention_mask"] > 0, 5e-5)

    labels = jnp.asarray(data["labels"])

    def loss(trained):
        sums = cross_entropy(logits_of(config, trained, batch), jnp.maximum(labels, 0), labels >= 0)
        return sums.total / sums.weight

    value, gradients = gradients_of(loss, trained)
    np.testing.assert_allclose(value, data["loss"], rtol=1e-6)
    check_gradients(gradients, load(config, from_hf, load_file(folder / "grads.safetensors")), 5e-5)
    np.testing.assert_array_equal(decode(trained, inputs), up_to_eos(data["greedy_sequences"][:, 1:]))


# Section 3: T5X


@pytest.mark.parametrize(("version", "heads"), [("v1_0", 4), ("v1_1", 3)])
def test_t5x(shared, version, heads):
    folder = shared / "goldens" / f"t5x_{version}"
    data = np.load(folder / "data.npz")
    config = configure({"v1_0": V1_0, "v1_1": V1_1}[version], heads)
    trained = load(config, from_t5x, load_file(folder / "params.safetensors"))
    forward, encode, decode = compile_model(config)
    batch = batch_of(data, "", "encoder_input_tokens", "decoder_input_tokens")
    targets = data["decoder_target_tokens"]
    check(forward(trained, batch), data["logits"], targets > 0, 2e-5)
    inputs = batch["encoder_input_tokens"]
    check(encode(trained, inputs), data["encoder_output"], data["encoder_input_tokens"] > 0, 2e-5)
    np.testing.assert_array_equal(decode(trained, inputs), data["greedy_sequences"])

    names = [
        f"{stack}_{name}" for stack in ("encoder", "decoder") for name in ("input_tokens", "segment_ids", "positions")
    ]
    packed = batch_of(data, "packed.", *names)
    check(forward(trained, packed), data["packed.logits"], data["packed.decoder_segment_ids"] > 0, 2e-5)
    encoded = encode(trained, *(packed[f"encoder_{name}"] for name in ("input_tokens", "segment_ids", "positions")))
    check(encoded, data["packed.encoder_output"], data["packed.encoder_segment_ids"] > 0, 2e-5)

    def loss_sums(logits, z_loss, label_smoothing):
        weights = jnp.asarray(targets > 0)
        return cross_entropy(logits, jnp.asarray(targets), weights, z_loss=z_loss, label_smoothing=label_smoothing)

    logits = forward(trained, batch)

    for name, z_loss, label_smoothing in (
        ("plain", 0.0, 0.0),
        ("z", 1e-2, 0.0),
        ("smooth", 0.0, 0.1),
        ("z_smooth", 1e-2, 0.1),
    ):
        found = loss_sums(logits, z_loss, label_smoothing)
        np.testing.assert_allclose(found.total, data[f"loss_{name}.total"], rtol=1e-5)
        np.testing.assert_allclose(found.z_loss, data[f"loss_{name}.z_part"], rtol=1e-5)
        np.testing.assert_allclose(found.weight, data[f"loss_{name}.weight_sum"])

    def loss(trained):
        found = loss_sums(logits_of(config, trained, batch), 1e-2, 0.1)
        return found.total / found.weight

    check_gradients(
        gradients_of(loss, trained)[1], load(config, from_t5x, load_file(folder / "grads.safetensors")), 5e-6
    )


def test_t5x_own_checkpoint(shared):
    """The checkpoint in T5X's own test data (v1.1, 4 heads of 3, vocabulary cut to 256 rows)."""
    folder = shared / "goldens" / "t5x_real_tiny"
    data = np.load(folder / "data.npz")
    stored = serialization.msgpack_restore((folder / "test_t5_tiny_vocab256.checkpoint_0").read_bytes())
    arrays = {}

    def flatten(node, path):
        for name, child in node.items():
            flatten(child, [*path, name]) if isinstance(child, dict) else arrays.update(
                {"/".join([*path, name]): child}
            )

    flatten(stored["optimizer"]["target"], [])
    config = configure(V1_1, 4, vocab_size=256, features=8, mlp_features=16, head_dim=3)
    trained = load(config, from_t5x, arrays)
    forward, encode, _ = compile_model(config)
    batch = batch_of(data, "", "encoder_input_tokens", "decoder_input_tokens")
    check(forward(trained, batch), data["logits"], data["decoder_target_tokens"] > 0, 1e-5)
    check(
        encode(trained, batch["encoder_input_tokens"]), data["encoder_output"], data["encoder_input_tokens"] > 0, 1e-5
    )


# Section 1b: the authors' Synthesizers

MESH = {
    "random": "R",
    "dense_minus": "D[bias=False,share_w2=True]",
    "random_plus_alpha": sj.synthesizer("R+V", 16, weights="sigmoid", per_head=False),
}


def shifted(targets, segments=None):
    """Targets shifted right, 0 at the start of the row and of each segment."""
    out = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
    if segments is None:
        return out
    return np.where(segments != np.pad(segments, ((0, 0), (1, 0)))[:, :-1], 0, out)


def mesh_loss(logits, targets):
    """Smoothed by 0.1 (no constant subtracted), z_loss 1e-2, summed over targets > 0, divided by all positions."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    log_p = logits - log_z[..., None]
    at_target = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    cross = -0.9 * at_target - 0.1 * jnp.mean(log_p, axis=-1)
    return jnp.sum(jnp.where(targets > 0, cross + 1e-2 * log_z**2, 0)) / targets.size


@pytest.mark.parametrize("mode", MESH)
def test_mesh_model(shared, mode):
    folder = shared / "goldens" / f"mtf_model_{mode}"
    data = np.load(folder / "data.npz")
    config = configure(V1_0, 2, buckets=8, attention=MESH[mode])
    trained = load(config, from_mesh, load_file(folder / "weights.safetensors"))
    forward, _, decode = compile_model(config)
    inputs, targets = jnp.asarray(data["inputs"]), jnp.asarray(data["targets"])
    batch = {"encoder_input_tokens": inputs, "decoder_input_tokens": jnp.asarray(shifted(data["targets"]))}
    check(forward(trained, batch), data["logits"], data["targets"] > 0, 2e-5)

    value, gradients = gradients_of(lambda trained: mesh_loss(logits_of(config, trained, batch), targets), trained)
    np.testing.assert_allclose(value, data["loss"], rtol=1e-5)
    check_gradients(gradients, load(config, from_mesh, load_file(folder / "grads.safetensors")), 1e-5)
    np.testing.assert_array_equal(up_to_eos(decode(trained, inputs)), up_to_eos(data["greedy.ids"]))

    # The authors index R and pi by the slot in a packed row: positions that do not restart give their numbers.
    segments = {stack: data[f"packed.{stack}_segment_ids"] for stack in ("encoder", "decoder")}
    packed = {
        "encoder_input_tokens": data["packed.inputs"],
        "decoder_input_tokens": shifted(data["packed.targets"], segments["decoder"]),
    }
    for stack, ids in segments.items():
        packed[f"{stack}_segment_ids"] = ids
        packed[f"{stack}_positions"] = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    logits = forward(trained, jax.tree.map(jnp.asarray, packed))
    check(logits, data["packed.logits"], segments["decoder"] > 0, 2e-5)
    np.testing.assert_allclose(mesh_loss(logits, jnp.asarray(data["packed.targets"])), data["packed.loss"], rtol=1e-5)
