"""Greedy decoding over step functions whose answers are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.decoding import greedy

EOS = 1


def follow(script, vocab=8):
    """A step that says row i's script [b, n], token by token, whatever it is given; the cache is the position."""
    script = jnp.asarray(script, jnp.int32)

    def step(tokens, position):
        said = script[:, jnp.minimum(position, script.shape[1] - 1)]
        return jax.nn.one_hot(said, vocab, dtype=jnp.float32)[:, None], position + 1

    return step


def bigram(table):
    """A step whose logits are a row of `table` [v, v], chosen by the token before; the cache counts the steps."""
    table = jnp.asarray(table, jnp.float32)
    return lambda tokens, steps: (table[tokens], steps + 1)


def test_says_the_script_and_nothing_after_eos():
    script = [[5, 4, EOS, 7, 7], [EOS, 6, 6, 6, 6], [2, 3, 4, 5, 6]]
    out = greedy(follow(script), jnp.int32(0), batch=3, max_length=5, eos_id=EOS)
    np.testing.assert_array_equal(out, [[5, 4, EOS, 0, 0], [EOS, 0, 0, 0, 0], [2, 3, 4, 5, 6]])
    assert out.dtype == jnp.int32


def test_feeds_back_what_it_said_from_the_start_id():
    table = np.zeros((6, 6))
    for before, after in ((0, 4), (4, 2), (2, 5), (5, EOS)):
        table[before, after] = 1
    out = greedy(bigram(table), jnp.int32(0), batch=1, max_length=8)
    np.testing.assert_array_equal(out, [[4, 2, 5, EOS, 0, 0, 0, 0]])
    out = greedy(bigram(table), jnp.int32(0), batch=1, max_length=8, start_id=2)
    np.testing.assert_array_equal(out, [[5, EOS, 0, 0, 0, 0, 0, 0]])


def test_equals_a_loop_over_random_logits():
    table = np.random.default_rng(0).normal(size=(11, 11))
    out = np.asarray(greedy(bigram(table), jnp.int32(0), batch=2, max_length=20))
    expected, last = [], 0
    while len(expected) < 20 and EOS not in expected:
        last = int(np.argmax(table[last]))
        expected.append(last)
    expected += [0] * (20 - len(expected))
    np.testing.assert_array_equal(out, [expected, expected])


@pytest.mark.parametrize("ends, steps", [([2, 4], 4), ([1, 1], 1), ([9, 2], 6)])
def test_stops_when_all_rows_have_ended(ends, steps):
    calls = []
    script = np.full((2, 10), 3)
    for row, end in enumerate(ends):
        script[row, end - 1] = EOS

    def counted(tokens, position):
        jax.debug.callback(lambda p: calls.append(int(p)), position)
        return follow(script)(tokens, position)

    jax.block_until_ready(greedy(counted, jnp.int32(0), batch=2, max_length=6))
    jax.effects_barrier()
    assert len(calls) == steps


def test_padded_ids_are_never_produced():
    """T5 has 32,100 ids and 32,128 embedding rows: the last 28 must not come out, however high their logits."""
    logits = jnp.asarray([0.0, -1.0, 3.0, 1.0, 9.0, 9.0])
    def step(tokens, cache):
        return (jnp.broadcast_to(logits, (*tokens.shape, 6)), cache)
    assert set(np.ravel(greedy(step, (), batch=2, max_length=3, vocab_size=4))) == {2}
    assert set(np.ravel(greedy(step, (), batch=2, max_length=3))) == {4}


def test_under_jit_with_bf16_logits_and_a_nested_cache():
    def step(tokens, cache):
        logits, position = follow([[5, 4, EOS]])(tokens, cache["at"])
        return logits.astype(jnp.bfloat16), {"at": position, "seen": cache["seen"] + tokens.sum()}

    decode = jax.jit(lambda cache: greedy(step, cache, batch=1, max_length=4))
    np.testing.assert_array_equal(decode({"at": jnp.int32(0), "seen": jnp.int32(0)}), [[5, 4, EOS, 0]])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(batch=0, max_length=4), "batch and max_length must be at least 1, got 0 and 4"),
        (dict(batch=1, max_length=0), "batch and max_length must be at least 1, got 1 and 0"),
        (dict(batch=1, max_length=4, vocab_size=9), "vocab_size must be between 1 and the logits' size 8, got 9"),
        (dict(batch=1, max_length=4, eos_id=8), "eos_id must be an id of the vocabulary .0 to 7., got 8"),
        (dict(batch=1, max_length=4, eos_id=5, vocab_size=5), "eos_id must be an id of the vocabulary .0 to 4., got 5"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        greedy(follow([[2, 3, EOS]]), jnp.int32(0), **arguments)
