"""R in packed rows: the numbers of the general path and of each example alone, without [b, h, q, k]."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attend import ADVERSARIAL, draw

import synthesizer_jax as sj
from synthesizer_jax import activations
from synthesizer_jax.ops import packed_softmax
from synthesizer_jax.scores import Lookup
from synthesizer_jax.sharding import MeshShape, Rules, on

HEADS, HEAD_DIM, LONGEST = 2, 3, 48
SPEC = sj.Random(LONGEST)


def packed(lengths, length):
    """(segments, positions) [b, length] of rows with segments of these lengths; what remains is padding."""
    segments, positions = np.zeros((2, len(lengths), length), np.int32)
    for row, sizes in enumerate(lengths):
        ends = np.cumsum([0, *sizes])
        for number, (start, end) in enumerate(itertools.pairwise(ends), start=1):
            segments[row, start:end], positions[row, start:end] = number, np.arange(end - start)
    return segments, positions


LENGTHS = {
    "one": [[40], [40], [40]],
    "two": [[13, 27], [20, 20], [39, 1]],
    "padded": [[13, 9], [5], []],
    "many": [[2, 3, 5, 7, 11, 12], [1] * 40, [20, *[1] * 20]],
}


@functools.partial(jax.jit, static_argnames=("causal", "path", "spec"))
def gradients(table, values, cotangent, segments, positions, key_mask, causal=False, path="auto", spec=SPEC):
    """Outputs, gradients of R, gradients of the values."""
    x = jnp.zeros((*values.shape[:2], 1))

    def run(table, values):
        scores = spec({"R": table}, x, x, positions, positions)
        return sj.attend(scores, values, key_mask, causal, q_segments=segments, k_segments=segments, path=path)

    out, transposed = jax.vjp(run, table, values)
    return out, *transposed(cotangent)


def arguments(lengths, length=40, key_mask=None):
    segments, positions = map(jnp.asarray, packed(lengths, length))
    shape = (len(lengths), length, HEADS, HEAD_DIM)
    table, values, cotangent = draw((HEADS, LONGEST, LONGEST), 0), draw(shape, 1), draw(shape, 2)
    return [jnp.asarray(table), jnp.asarray(values), jnp.asarray(cotangent), segments, positions, key_mask]


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            one, other, rtol=0, atol=1e-5
        )  # measured 4e-6, in R's gradient of 40 rows of one key


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "key_mask"])
@pytest.mark.parametrize("case", LENGTHS)
def test_packed_rows_equal_the_general_path(case, masked, causal):
    key_mask = jnp.asarray(np.random.default_rng(3).random((3, 40)) < 0.8) if masked else None
    given = arguments(LENGTHS[case], key_mask=key_mask)
    assert_close(gradients(*given, causal=causal), gradients(*given, causal=causal, path="xla"))


def changed(what):
    """Arguments whose positions do not count up from 0 within segments, or whose segments are in pieces."""
    given = arguments(LENGTHS["padded"])
    segments, positions = np.array(given[3]), np.array(given[4])
    match what:
        case "positions from 3 on":
            positions += 3
        case "positions backwards":
            positions = 39 - positions
        case "one position twice":
            positions[0, 5] = positions[0, 4]
        case "segments in pieces":
            segments[0], positions[0] = np.arange(40) % 3, np.arange(40) // 3
        case "a segment that comes again":
            segments[0, 30:33], positions[0, 30:33] = 1, (30, 31, 32)
        case "ids in any order":
            segments = np.where(segments > 0, 1000 - segments, 0)
        case "no padding id in the middle":
            segments[0, 3] = 0
    given[3], given[4] = jnp.asarray(segments), jnp.asarray(positions)
    return given


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(
    "what",
    [
        "positions from 3 on",
        "positions backwards",
        "one position twice",
        "segments in pieces",
        "a segment that comes again",
        "ids in any order",
        "no padding id in the middle",
    ],
)
def test_unusual_positions_and_segments_equal_the_general_path(what, causal):
    given = changed(what)
    assert_close(gradients(*given, causal=causal), gradients(*given, causal=causal, path="xla"))


def test_queries_and_keys_of_different_rows():
    """Attention to other segments and positions than the queries' own."""
    table, values, cotangent, segments, positions, _ = arguments(LENGTHS["two"])
    shifted, other = positions[:, ::-1], jnp.roll(segments, 3, axis=1)

    def run(path, q_segments, q_positions, table, values):
        scores = sj.Scores(lookup=Lookup(table, q_positions, positions))
        return sj.attend(scores, values, q_segments=q_segments, k_segments=segments, path=path)

    for q_segments, q_positions in ((other, positions), (segments, shifted), (segments[:, :7], positions[:, :7])):
        q = q_segments.shape[1]
        results = []
        for path in ("auto", "xla"):
            function = functools.partial(run, path, q_segments, q_positions)
            out, transposed = jax.vjp(function, table, values)
            results.append((out, *transposed(cotangent[:, :q])))
        assert_close(*results)


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("name", ["plain", "plus_minus_200", "masked_keys_150_above", "rows_of_1e30", "large_offset"])
def test_an_example_gets_the_numbers_that_it_gets_alone(name, causal):
    """Also where R has its floor: every row is as long, and one example's row is as wide, as the packed one."""
    sizes = [[6], [2, 3, 1], [1, 2, 1, 2]]
    table = jnp.asarray(ADVERSARIAL[name][0])
    segments, positions = map(jnp.asarray, packed(sizes, 6))
    values, cotangent = jnp.asarray(draw((3, 6, 2, 3), 1)), jnp.asarray(draw((3, 6, 2, 3), 2))
    spec = sj.Random(6)
    found = gradients(table, values, cotangent, segments, positions, None, causal=causal, spec=spec)
    d_table, total = found[1], 0
    for row, lengths in enumerate(sizes):
        for start, end in zip(np.cumsum([0, *lengths]), np.cumsum(lengths), strict=False):
            alone = lambda x, row=row, start=start, end=end: (
                jnp.zeros((1, *x.shape[1:])).at[0, : end - start].set(x[row, start:end])
            )
            key_mask = jnp.arange(6)[None] < end - start

            def run(t, v, key_mask=key_mask):
                return sj.attend(sj.Scores(bias=t[None]), v, key_mask, causal)

            out, transposed = jax.vjp(run, table, alone(values))
            d_alone, d_values = transposed(alone(cotangent))
            np.testing.assert_allclose(found[0][row, start:end], out[0, : end - start], rtol=0, atol=2e-6)
            np.testing.assert_allclose(found[2][row, start:end], d_values[0, : end - start], rtol=0, atol=2e-6)
            total += d_alone
    np.testing.assert_allclose(d_table, total, rtol=0, atol=1e-5)


@pytest.mark.parametrize("what", ["", "positions from 3 on"])
def test_on_a_mesh_and_in_parts_of_a_batch(what):
    """Split over the batch and the heads, and each part of the batch by itself, as microbatches have it."""
    given = changed(what)
    given = [jnp.concatenate([x, x[:1]]) if x is not None and x.shape[0] == 3 else x for x in given]
    table, values, cotangent, segments, positions, _ = given
    expected = gradients(*given, causal=True)
    mesh = MeshShape(data=2, model=2).build(jax.devices()[:4])
    with on(mesh, Rules()):
        whole = jax.jit(lambda *args: gradients(*args, None, causal=True))(*given[:5])
        parts = [x.reshape(2, 2, *x.shape[1:]) for x in (values, cotangent, segments, positions)]
        of_part = activations.part_by_part(lambda *rows: gradients(table, *rows, None, causal=True), "data")
        out, d_table, d_values = jax.jit(of_part)(*parts)
    assert_close(whole, expected)
    assert_close((out.reshape(values.shape), d_table.sum(0), d_values.reshape(values.shape)), expected)


def test_the_program_holds_no_weights_of_all_rows():
    """[b, h, q, k] is in the general path's program, and in this one's only for one row at a time."""
    given = arguments([[13, 24]] * 7, length=37)
    text = {path: str(jax.make_jaxpr(functools.partial(gradients, path=path))(*given)) for path in ("auto", "xla")}
    assert "f32[7,2,37,37]" in text["xla"] and "f32[7,2,37,37]" not in text["auto"]


@pytest.mark.parametrize("length", [1, 5, 16, 31, 32, 40, 114, 512, 600])
def test_every_segment_has_a_block_that_holds_it(length):
    """The k-th longest of a row has at most length // k tokens."""
    plan = packed_softmax._plan(length)
    held = [(first + i, plan.size // blocks) for first, blocks in zip(plan.first, plan.blocks) for i in range(blocks)]
    ranks, sizes = zip(*held, strict=True)
    assert list(ranks) == list(range(1, len(ranks) + 1)) and len(ranks) >= length
    assert all(size >= length // rank for rank, size in held[:length]) and min(sizes) > 0
    assert plan.size < length + plan.blocks[-1]


def test_a_position_beyond_the_table_gives_nan():
    given = arguments([[20, 20]])
    given[4] = given[4].at[0, 30].set(LONGEST)
    out = np.asarray(gradients(*given)[0])
    assert np.isnan(out[0, 20:]).all() and np.isfinite(out[0, :20]).all()
