"""Attention weights of whole models, and the pictures of them."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.analysis.attention_maps import draw_maps, encoder_maps
from synthesizer_jax.models import parameters, t5_tiny

SIZES = {"features": 16, "mlp_features": 32, "heads": 2, "head_dim": 8, "vocab_size": 32, "dropout_rate": 0.0}
TOKENS = jnp.array([[5, 6, 7, 8, 1, 0, 0], [9, 8, 7, 6, 5, 4, 1]])
TARGETS = jnp.array([[0, 3, 4], [0, 5, 6]])


@pytest.mark.parametrize("scan", [True, False])
def test_weights_of_a_model_are_those_that_its_layers_apply(scan):
    config = t5_tiny("R", max_length=8, scan_layers=scan, **SIZES)
    trained, fixed = parameters.init(config, jax.random.key(0))
    encoder, decoder = parameters.bind(config, trained, fixed).attention_weights(TOKENS, TARGETS)
    assert encoder.shape == (2, 2, 2, 7, 7) and decoder.shape == (2, 2, 2, 3, 3)
    np.testing.assert_allclose(encoder.sum(-1), 1, atol=1e-6)
    assert not encoder[:, 0, :, :, 5:].any()  # padding
    assert not jnp.triu(decoder, k=1).any()  # the future
    layers = trained["encoder"]["layers"]
    table = layers["attention"]["scores"]["R"][0] if scan else layers["0"]["attention"]["scores"]["R"]
    bias = parameters.bind(config, trained, fixed).encoder.bias(7, 7)[0]
    expected = jax.nn.softmax(table[:, :7, :7] + bias, axis=-1)
    np.testing.assert_allclose(encoder[0, 1], expected, atol=1e-6)  # no padding here


def test_maps_are_drawn_for_each_row_and_head():
    config = t5_tiny("R+V", max_length=8, **SIZES)
    trained, fixed = parameters.init(config, jax.random.key(0))
    first, last = (encoder_maps(config, trained, fixed, TOKENS[1:], layer) for layer in (0, -1))
    assert first.shape == last.shape == (2, 7, 7) and not np.array_equal(first, last)
    picture = draw_maps({"R+V": [first, last]}, ("first", "last"), list("abcdefg"), "two layers")
    titles = [axis.get_title().splitlines()[0] for axis in picture.axes]
    assert titles == ["first, head 1", "first, head 2", "last, head 1", "last, head 2"]
    file = io.BytesIO()
    picture.savefig(file)
    assert file.getvalue().startswith(b"\x89PNG")


def test_a_layer_that_is_not_there_is_refused():
    config = t5_tiny("R", max_length=8, **SIZES)
    with pytest.raises(ValueError, match="layer: the encoder has 2 layers, got 2"):
        encoder_maps(config, {}, {}, TOKENS[1:], 2)
