"""A step of decoding: what caches hold, reading several tokens at once, growing, and what a compiled step costs and copies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from variants import MAX_LENGTH, MIXERS, parametrized

import synthesizer_jax as sj
from synthesizer_jax import decoding
from synthesizer_jax.analysis import traffic
from synthesizer_jax.analysis.hlo import Module
from synthesizer_jax.axes import Param
from synthesizer_jax.decoding import greedy
from synthesizer_jax.models import parameters
from synthesizer_jax.nn.attention import as_mixer
from synthesizer_jax.scores import Spec

QUICK = functools.partial(jax.jit, compiler_options=oracle.QUICK_TO_COMPILE)
TOLERANCE = 2e-5  # of outputs up to 8, summed in another order
DIMS = sj.Dims(features=8, heads=2, head_dim=4)

DECODERS = [(name, spec) for name, spec in MIXERS if not as_mixer(spec).decoder_error()]


def drawn(spec, declared, seed=0):
    """Parameters away from any symmetric start; positive where a linear kernel's sums may else be near 0."""
    rng = np.random.default_rng(seed)
    signed = isinstance(spec, Spec) and spec.weighting_error()
    draw = lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32)
    return jax.tree.map(
        lambda p: jnp.abs(draw(p)) if signed else draw(p), declared, is_leaf=lambda leaf: isinstance(leaf, Param)
    )


def steps(mixer, params, x, cache, sizes):
    """Outputs of steps of x; a size (s, kept) reads s tokens and goes on after `kept` of them."""
    outs, start = [], 0
    for size in sizes:
        size, kept = size if isinstance(size, tuple) else (size, None)
        around = sj.mixers.Surroundings(kept=None if kept is None else jnp.int32(kept))
        y, cache = mixer.step(params, x[:, start : start + size], cache, around)
        kept = size if kept is None else kept
        outs.append(y[:, :kept])
        start += kept
    return jnp.concatenate(outs, axis=1), cache


@parametrized(DECODERS)
def test_tokens_read_at_once_of_which_some_are_kept_and_grown_caches_equal_single_steps(spec):
    mixer = as_mixer(spec)
    x = drawn(spec, Param((2, 9, DIMS.features), (None,) * 3, None), 1)

    @QUICK
    def everything(params, x):
        empty = functools.partial(mixer.init_cache, params, DIMS.features, 2)
        one_by_one, _ = steps(mixer, params, x, empty(MAX_LENGTH, x.dtype), [1] * 9)
        at_once, _ = steps(mixer, params, x, empty(MAX_LENGTH, x.dtype), [(6, 4), (5, 2), 1, 1, 1])
        first, cache = steps(mixer, params, x, empty(4, x.dtype), [3])
        cache = mixer.grow_cache(params, DIMS.features, cache, 8)
        second, cache = steps(mixer, params, x[:, 3:], cache, [4])
        cache = mixer.grow_cache(params, DIMS.features, cache, MAX_LENGTH)
        third, _ = steps(mixer, params, x[:, 7:], cache, [1, 1])
        return one_by_one, at_once, jnp.concatenate([first, second, third], axis=1)

    expected, *others = everything(drawn(spec, mixer.params(DIMS)), x)
    for found in others:
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * max(1, np.abs(expected).max()))


def cache_bytes(attention, length=32):
    cache = jax.eval_shape(
        lambda: as_mixer(attention).init_cache(
            drawn(attention, as_mixer(attention).params(DIMS)), DIMS.features, 2, length, jnp.float32
        )
    )
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache) if leaf.ndim)


def test_what_reads_no_keys_caches_values_alone():
    vanilla = cache_bytes(sj.DotProduct())
    assert vanilla == 2 * 2 * 32 * DIMS.heads * DIMS.head_dim * 4
    for name, part in (("R", 0.5), ("fixedR", 0.5), ("FR", 0.5), ("D", 0.5), ("FD", 0.5), ("R+D", 0.5), ("R+V", 1)):
        assert cache_bytes(sj.synthesizer(name, 32)) == part * vanilla, name


# Greedy decoding, in stages


SIZES = {"vocab_size": 17, "features": 8, "mlp_features": 12, "heads": 2, "head_dim": 4, "mlp_activation": "relu"}
FORMS = ("V", "R", "D", "FR[rank=2]", "FD", "R+V", "D+V", "LightConv[width=3]", "TokenMixing")


@functools.cache
def initial(config):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) / 2, jnp.float32), parameters.abstract(config)
    )


def continued(logits_of, said, prompt, eos):
    """By the full forward pass at each position; said [b, n + 1] begins with the start."""
    for t in range(said.shape[1] - 1):
        chosen = logits_of(said[:, :-1])[:, t].argmax(axis=-1)
        ended = (said == eos).any(axis=1)
        said[:, t + 1] = np.where(ended, 0, np.where(prompt[:, t] > 0, prompt[:, t], chosen))
    return said[:, 1:]


@pytest.fixture
def short_stages(monkeypatch):
    """Stages of 3, 6, 11 tokens, blocks of up to 3, in place of 128, 256, ..."""
    monkeypatch.setattr(decoding, "_STAGE", 3)


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unscanned"])
def test_stages_and_prompts_read_in_blocks_equal_the_full_forward(attention, scan, short_stages):
    n, eos = 11, 1
    options = {"relative_bias": "Conv" not in attention and "Mixing" not in attention, "scan_layers": scan}
    spec = sj.synthesizer(attention, MAX_LENGTH)
    fields = SIZES | options
    config = sj.DecoderOnlyConfig(decoder_layers=2, decoder_attention=spec, tied_embedding=True, **fields)
    trained, fixed = initial(config)
    prompts = np.zeros((4, 3, n), np.int32)
    prompts[1, :, :2] = [[6, 2], [4, 3], [9, 9]]
    prompts[2] = [[6, 2, 13, 5, 7, 8, 2, 0, 0, 0, 0], [4, 9, 3, 3, 3, 10, 11, 12, 0, 0, 0], [5] * 11]
    prompts[3] = [[6, 2, 13, 5, 7, 8, 2, 0, 0, 0, 0], [4, 9, 3, 3, eos, 10, 11, 12, 0, 0, 0], [5] * 10 + [0]]

    @QUICK
    def decode(trained, fixed, prompt):
        model = parameters.bind(config, trained, fixed).for_decoding()
        known = {"batch": 3, "max_length": n, "eos_id": eos, "prompt": prompt, "grow": model.grow_cache}
        return greedy(model.decode_step, model.init_cache(3, 1), read=model.prefill, **known)

    forward = QUICK(lambda tokens: parameters.bind(config, trained, fixed)(tokens))
    logits_of = lambda tokens: np.asarray(forward(jnp.asarray(tokens)))
    for prompt in prompts:
        expected = continued(logits_of, np.zeros((3, n + 1), np.int32), prompt, eos)
        np.testing.assert_array_equal(decode(trained, fixed, jnp.asarray(prompt)), expected)


@pytest.mark.parametrize("attention", ["V", "R", "D"])
def test_an_encoder_decoder_in_stages_equals_the_full_forward(attention, short_stages):
    """Inputs of different lengths, one of them empty, beside padding."""
    n, eos = 11, 1
    config = sj.t5_tiny(attention, MAX_LENGTH, encoder_layers=1, decoder_layers=2, **SIZES)
    trained, fixed = initial(config)
    inputs = jnp.asarray([[3, 5, 2, 9, 16, 0, 0], [7, 1, 4, 4, 8, 2, 3], [0] * 7], jnp.int32)

    @QUICK
    def decode(trained, fixed, inputs):
        model = parameters.bind(config, trained, fixed).for_decoding()
        known = {"batch": 3, "max_length": n, "eos_id": eos, "grow": model.grow_cache}
        return greedy(model.decode_step, model.init_cache(inputs, 1), **known)

    forward = QUICK(lambda tokens: parameters.bind(config, trained, fixed)(inputs, tokens))
    nothing = np.zeros((3, n), np.int32)
    expected = continued(
        lambda tokens: np.asarray(forward(jnp.asarray(tokens))), np.zeros((3, n + 1), np.int32), nothing, eos
    )
    np.testing.assert_array_equal(decode(trained, fixed, inputs), expected)


def test_the_steps_of_a_prompt_that_are_saved(short_stages):
    """7 tokens of every row and the rest step by step: 11 - 7 steps, and the tokens read are the inputs before them."""
    calls, blocks = [], []

    def step(tokens, cache):
        jax.debug.callback(lambda _: calls.append(1), tokens)
        return jax.nn.one_hot(tokens, 9), cache + 1

    def read(tokens, cache, kept):
        jax.debug.callback(lambda t, k, at: blocks.append((int(at), t[0, : int(k)].tolist())), tokens, kept, cache)
        return cache + kept

    prompt = jnp.asarray([[2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0], [2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 0]], jnp.int32)
    options = {"batch": 2, "max_length": 11, "prompt": prompt, "read": read, "grow": lambda cache, length: cache}
    said = jax.block_until_ready(greedy(step, jnp.int32(0), **options))
    jax.effects_barrier()
    np.testing.assert_array_equal(said, [[2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8], [2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 4]])
    assert sorted(blocks) == [(0, [0, 2, 3]), (3, [4, 5, 6]), (6, [7])]
    assert len(calls) == 4


# Compiled steps


STEPS = 7
BATCH, STAGE = 2, 16


def compiled_steps(attention, max_length, scan=True):
    """(module, what runs in each of STEPS steps with a cache for STAGE tokens, bytes of a layer's values)."""
    config = sj.t5_tiny(attention, max_length, encoder_layers=1, decoder_layers=2, scan_layers=scan, **SIZES)
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), parameters.abstract(config))

    def run(trained, fixed, inputs):
        model = parameters.bind(config, trained, fixed).for_decoding()

        def step(_, state):
            logits, cache = model.decode_step(*state)
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

        start = jnp.zeros((BATCH, 1), jnp.int32), model.init_cache(inputs, STAGE)
        return jax.lax.fori_loop(0, STEPS, step, start)[0]

    inputs = jax.ShapeDtypeStruct((BATCH, 5), jnp.int32)
    module = Module.parse(jax.jit(run).lower(*params, inputs).compile().as_text())
    return module, [entry for entry in traffic.executed(module) if entry[2] == STEPS]


@pytest.mark.parametrize("attention", ["V", "R", "FR[rank=2]", "D"])
def test_the_cost_of_a_step_does_not_depend_on_the_maximum_length(attention):
    found = []
    for max_length in (16, 256):
        module, program = compiled_steps(attention, max_length)
        assert program
        found.append((traffic.memory_bytes(module, program), traffic.matrix_flops(module, program)))
    (short, short_flops), (long, long_flops) = found
    assert long_flops == short_flops > 0
    assert long < 1.1 * short  # R's tables of 256 tokens alone have 1 MB, 50 times what a step moves


@pytest.mark.parametrize("attention", ["V", "R", "R+V"])
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unscanned"])
def test_a_step_copies_no_cache_no_weights_and_no_table(attention, scan):
    """Whatever is as large as a layer's cached values and written in a step is an update in place."""
    module, program = compiled_steps(attention, 64, scan)
    values = BATCH * SIZES["heads"] * SIZES["head_dim"] * STAGE
    written = [
        (instruction.name, str(array))
        for computation, instruction, _ in program
        for array in instruction.results
        if instruction.opcode not in traffic.FREE and array.size >= values and not updates_in_place(module, instruction)
    ]
    assert not written
    updates = [instruction for _, instruction, _ in program if updates_in_place(module, instruction)]
    per_layer = 1 if attention == "R" else 2
    assert len([i for i in updates if i.results[0].size == values]) == 2 * per_layer


def updates_in_place(module, instruction):
    if instruction.opcode == "fusion":
        root = module.computations[instruction.called()].root
        while root.opcode == "bitcast":
            root = module.computations[instruction.called()][root.operands[0]]
        return root.opcode == "dynamic-update-slice"
    return instruction.opcode == "dynamic-update-slice"
