"""Linformer and MLP-Mixer against values from outside the project (shared/goldens, section 5)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synthesizer_jax as sj
from synthesizer_jax.mixers import Surroundings

# Stated beside the values: of outputs, and of gradients after division by max(1, largest).
LINFORMER, LINFORMER_GRADIENT, MIXER = 2e-5, 2e-4, 1e-5
HEADS, HEAD_DIM = 2, 4


def linformer_parameters(data, value_weight):
    """[out, in] weights, heads-major, as [e, h, d] and [h, d, e]."""

    def inward(weight):
        split = weight.T.reshape(weight.shape[1], -1, HEAD_DIM)
        return jnp.asarray(np.broadcast_to(split, (split.shape[0], HEADS, HEAD_DIM)))  # one head serves both

    def projection(name):
        return jnp.asarray(data[name])

    params = {
        "query": inward(data["w.to_q.weight"]),
        "key": inward(data["w.to_k.weight"]),
        "value": inward(data[value_weight]),
        "out": jnp.asarray(data["w.to_out.weight"].T.reshape(HEADS, HEAD_DIM, -1)),
        "E": projection("w.proj_k"),
    }
    return params | ({"F": projection("w.proj_v")} if "w.proj_v" in data.files else {})


@pytest.mark.parametrize(
    "file,sharing,value_weight",
    [
        ("kv_separate", "headwise", "w.to_v.weight"),
        ("one_kv_head", "headwise", "w.to_v.weight"),
        ("share_kv", "key-value", "w.to_k.weight"),  # that code uses W_k x as the values, too
    ],
)
def test_linformer(shared, file, sharing, value_weight):
    data = np.load(shared / "goldens" / f"linformer_{file}.npz")
    spec = sj.Linformer(16, rank=4, sharing=sharing)
    params = linformer_parameters(data, value_weight)
    assert set(params) == set(spec.params(sj.Dims(8, HEADS, HEAD_DIM)))

    def run(x, context=None):
        context = None if context is None else jnp.asarray(context)
        return spec(params, jnp.asarray(x), context) + data["w.to_out.bias"]

    np.testing.assert_allclose(run(data["x"]), data["y"], rtol=0, atol=LINFORMER)
    np.testing.assert_allclose(run(data["short.x"]), data["short.y"], rtol=0, atol=LINFORMER)
    np.testing.assert_allclose(run(data["x"], data["cross.context"]), data["cross.y"], rtol=0, atol=LINFORMER)
    gradient = jax.grad(lambda x: jnp.sum(run(x) * data["cotangent"]))(jnp.asarray(data["x"]))
    scale = max(1.0, np.abs(data["grad_x"]).max())
    np.testing.assert_allclose(gradient / scale, data["grad_x"] / scale, rtol=0, atol=LINFORMER_GRADIENT)


def layer_norm(x, scale, bias):
    x = np.asarray(x, np.float64)
    scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return jnp.asarray(scaled * scale + bias, jnp.float32)


def test_mixer_of_timm(shared):
    """The exact gelu; weights [out, in]."""
    data = np.load(shared / "goldens" / "mixer_block_timm.npz")
    hidden, length = data["w.mlp_tokens.fc1.weight"].shape
    params = {
        "W1": data["w.mlp_tokens.fc1.weight"].T,
        "b1": data["w.mlp_tokens.fc1.bias"],
        "W2": data["w.mlp_tokens.fc2.weight"].T,
        "b2": data["w.mlp_tokens.fc2.bias"],
    }
    check_mixer(data, sj.TokenMixing(length, hidden, approximate_gelu=False), params, "w.norm1.weight", "w.norm1.bias")
    y = sj.TokenMixing(length, hidden, approximate_gelu=False)(jax.tree.map(jnp.asarray, params), jnp.asarray(data["x"]))
    np.testing.assert_allclose(y, data["token_mlp_no_norm.y"], rtol=0, atol=MIXER)


def test_mixer_of_its_authors(shared):
    """The tanh form of gelu; kernels [in, out]."""
    data = np.load(shared / "goldens" / "mixer_block_vit_jax.npz")
    length, hidden = data["w.token_mixing/Dense_0/kernel"].shape
    params = {
        "W1": data["w.token_mixing/Dense_0/kernel"],
        "b1": data["w.token_mixing/Dense_0/bias"],
        "W2": data["w.token_mixing/Dense_1/kernel"],
        "b2": data["w.token_mixing/Dense_1/bias"],
    }
    check_mixer(data, sj.TokenMixing(length, hidden), params, "w.LayerNorm_0/scale", "w.LayerNorm_0/bias")


def check_mixer(data, spec, params, scale, bias):
    params = jax.tree.map(jnp.asarray, params)
    declared = spec.params(sj.Dims(8, 1, 8))
    assert {name: array.shape for name, array in params.items()} == {name: p.shape for name, p in declared.items()}
    x = layer_norm(data["x"], data[scale], data[bias])
    y = spec(params, x)
    np.testing.assert_allclose(y, data["token_mlp.y"], rtol=0, atol=MIXER)
    np.testing.assert_allclose(data["x"] + np.asarray(y), data["token_mixing_residual.y"], rtol=0, atol=MIXER)
    rest = spec(params, x[:, :-1], around=Surroundings())
    assert rest.shape[1] == x.shape[1] - 1, "a shorter sequence uses the first rows and columns"
