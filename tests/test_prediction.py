"""Predictions and scores of a tiny model, against the model itself, whatever the batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import synthesizer_jax as sj
from synthesizer_jax import sharding
from synthesizer_jax.models import parameters
from synthesizer_jax.prediction import Predictor

VOCAB, INPUTS, TARGETS = 40, 12, 7
LENGTHS = {"inputs": INPUTS, "targets": TARGETS}
CONFIG = sj.t5_1_1_tiny("R+V", max_length=16, vocab_size=48, features=16, mlp_features=32, head_dim=4, encoder_layers=1)


@pytest.fixture(scope="module")
def model():
    """Parameters far from their small initial values, with which all answers would be alike."""
    draw = np.random.default_rng(1)
    trained, fixed = parameters.abstract(CONFIG)
    trained = jax.tree.map(lambda p: jnp.asarray(draw.normal(size=p.shape), jnp.float32), trained)
    return parameters.bind(CONFIG, trained, fixed)


def predictor(model, batch_size, devices=8):
    mesh = sharding.MeshShape().build(jax.devices()[:devices])
    trained, fixed = jax.device_put(parameters.split(model), sharding.replicated(mesh))
    return Predictor(CONFIG, trained, fixed, mesh, batch_size, LENGTHS, eos_id=1, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def examples():
    draw = np.random.default_rng(0)
    inputs = [draw.integers(2, VOCAB, size=draw.integers(1, INPUTS + 1)) for _ in range(19)]
    targets = [np.append(draw.integers(2, VOCAB, size=draw.integers(0, TARGETS)), 1) for _ in range(19)]
    return [
        {
            "encoder_input_tokens": source,
            "decoder_input_tokens": np.append(0, target[:-1]),
            "decoder_target_tokens": target,
            "decoder_loss_weights": np.ones_like(target),
        }
        for source, target in zip(inputs, targets, strict=True)
    ]


@pytest.fixture(scope="module")
def expected(model, examples):
    """(tokens, scores) by the full forward pass at each step, one batch, no cache."""
    forward = nnx.jit(lambda model, inputs, targets: model(inputs, targets))
    inputs = jnp.asarray(
        [np.pad(e["encoder_input_tokens"], (0, INPUTS - len(e["encoder_input_tokens"]))) for e in examples]
    )
    tokens = np.zeros((len(examples), TARGETS + 1), np.int32)
    for t in range(TARGETS):
        logits = np.asarray(forward(model, inputs, jnp.asarray(tokens[:, :-1])))
        ended = (tokens == 1).any(axis=1)
        tokens[:, t + 1] = np.where(ended, 0, logits[:, t, :VOCAB].argmax(axis=-1))
    scores = []
    given = [np.pad(e["decoder_input_tokens"], (0, TARGETS - len(e["decoder_input_tokens"]))) for e in examples]
    logits = np.asarray(forward(model, inputs, jnp.asarray(given)), np.float64)
    for row, example in zip(logits, examples, strict=True):
        log_probabilities = row - np.log(np.exp(row).sum(axis=-1, keepdims=True))
        scores.append(sum(log_probabilities[t, token] for t, token in enumerate(example["decoder_target_tokens"])))
    return tokens[:, 1:], np.asarray(scores)


@pytest.mark.parametrize("batch_size, devices", [(1, 1), (7, 8), (64, 8)])
def test_every_example_once_in_order_whatever_the_batches(model, examples, expected, batch_size, devices):
    numbered = list(enumerate(examples))
    predict = predictor(model, batch_size, devices)
    answers = list(predict.predict(numbered, lambda example: example[1]))
    scores = list(predict.score(numbered, lambda example: example[1]))
    assert [index for (index, _), _ in answers] == [index for (index, _), _ in scores] == list(range(19))
    np.testing.assert_array_equal(np.stack([tokens for _, tokens in answers]), expected[0])
    np.testing.assert_allclose([score for _, score in scores], expected[1], rtol=1e-5)


def test_a_model_answers_more_than_one_thing(model, examples):
    """Otherwise the tests above would pass with the inputs mixed up."""
    answers = [tuple(tokens) for _, tokens in predictor(model, 8).predict(examples, lambda example: example)]
    assert len(set(answers)) > 10


def test_no_examples_no_answers(model):
    assert list(predictor(model, 4).predict([], lambda example: example)) == []
