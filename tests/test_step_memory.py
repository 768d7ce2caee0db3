"""What saves memory changes no number: microbatches, the loss in chunks of the vocabulary, remat, dtypes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax import Linformer
from synthesizer_jax.analysis.collectives import collectives
from synthesizer_jax.analysis.hlo import Module
from synthesizer_jax.analysis.traffic import executed
from synthesizer_jax.models import classifier_tiny, lm_tiny, t5_1_1_tiny, t5_tiny
from synthesizer_jax.sharding import MeshShape, Rules, named_leaves, place_batch
from synthesizer_jax.training.loss import chunked_cross_entropy, cross_entropy
from synthesizer_jax.training.optimizer import Adafactor, AdamW, Constant
from synthesizer_jax.training.step import Trainer

ROWS, LENGTH, TARGETS, VOCAB = 8, 12, 6, 64
ONE, EIGHT = MeshShape(), MeshShape(data=2, fsdp=2, model=2)
SIZES = {"features": 16, "mlp_features": 32, "heads": 4, "head_dim": 4, "vocab_size": VOCAB}


def tiny(preset=t5_tiny, attention="R+V", **overrides):
    layers = {"decoder_layers": 1} | ({} if preset is lm_tiny else {"encoder_layers": 1})
    return preset(attention, max_length=LENGTH, **SIZES | layers | {"dropout_rate": 0.0} | overrides)


def trainer(config, shape=ONE, optimizer=Adafactor(Constant(1e-2), min_size_to_factor=8), **settings):
    devices = jax.devices()[: 1 if shape == ONE else 8]
    return Trainer(config, optimizer, shape.build(devices), **settings)


def ragged(config, seed=0):
    """A batch of which one microbatch has few targets, and one none at all."""
    rng = np.random.default_rng(seed)
    shapes = config.batch.shapes(ROWS, {"inputs": LENGTH, "targets": TARGETS}, packed=False)
    batch = {name: rng.integers(2, VOCAB, shape, dtype=np.int32) for name, shape in shapes.items()}
    lengths = np.array([6, 0, 2, 6, 1, 0, 5, 3])
    real = np.arange(TARGETS) < lengths[:, None]
    batch["decoder_target_tokens"] = np.where(real, batch["decoder_target_tokens"], 0)
    batch["decoder_loss_weights"] = real.astype(np.int32)
    return batch


def after_one_step(made, batch):
    state, metrics = made.train_step()(made.init(), place_batch(made.mesh, batch))
    return jax.device_get(state.params), {name: float(value) for name, value in metrics.items()}


def assert_same(ones, others, tolerance):
    """Equal to a part of each array's size: entries that are sums which cancel have no digits of their own."""
    for (name, one), (_, other) in zip(named_leaves(ones), named_leaves(others), strict=True):
        error = np.linalg.norm(np.asarray(one, np.float64) - other)
        assert error <= tolerance * np.linalg.norm(np.asarray(one, np.float64)), (name, error)


@pytest.mark.parametrize("shape", [ONE, EIGHT], ids=["one device", "eight devices"])
def test_microbatches_have_the_gradient_of_the_whole_batch(shape):
    config = tiny()
    batch = ragged(config)
    whole, of_whole = after_one_step(trainer(config), batch)
    parts, of_parts = after_one_step(trainer(config, shape, microbatches=2 if shape == EIGHT else 4), batch)
    assert of_parts == pytest.approx(of_whole, rel=1e-5)
    assert_same(whole, parts, 1e-5)


def packed(config):
    """Two or three sequences in a row."""
    batch, rng = ragged(config), np.random.default_rng(1)
    for side, length in (("encoder", LENGTH), ("decoder", TARGETS)):
        starts = np.sort(rng.integers(1, length, (ROWS, 2)), axis=1)
        segments = 1 + (np.arange(length) >= starts[:, :1]) + (np.arange(length) >= starts[:, 1:])
        first = np.maximum.accumulate(np.where(np.diff(segments, prepend=0) > 0, np.arange(length), 0), axis=1)
        batch |= {f"{side}_segment_ids": segments, f"{side}_positions": np.arange(length) - first}
    return {name: rows.astype(np.int32) for name, rows in batch.items()}


@pytest.mark.parametrize(
    "attention,shape,settings",
    [
        ("R+V", EIGHT, {}),
        ("R+V", MeshShape(data=4, model=2), {"loss_chunks": 2}),
        pytest.param("DynConv[width=3]", EIGHT, {}, marks=pytest.mark.slow),
        (Linformer(LENGTH, rank=3), EIGHT, {}),
        pytest.param("FR+V", MeshShape(data=4, model=2), {}, marks=pytest.mark.slow),
        pytest.param("LightConv[width=3]", EIGHT, {}, marks=pytest.mark.slow),
    ],
)
def test_what_a_microbatch_drops_does_not_depend_on_the_mesh(attention, shape, settings):
    """Dropout of each row, packed, is what it is on one device, though each part of the data axis is gone through alone."""
    own = {} if isinstance(attention, str) else {"encoder_attention": attention}
    config = dataclasses.replace(tiny(attention="V" if own else attention, dropout_rate=0.3), **own)
    batch = packed(config)
    one, of_one = after_one_step(trainer(config, microbatches=2), batch)
    eight, of_eight = after_one_step(trainer(config, shape, microbatches=2, **settings), batch)
    assert of_eight == pytest.approx(of_one, rel=1e-5)
    assert_same(one, eight, 1e-5)


def test_gradients_are_summed_over_the_data_axis_once():
    """After the last microbatch, not after each."""
    config = tiny()
    made = trainer(config, MeshShape(data=8), microbatches=4)
    module = Module.parse(made.train_step().lower(made.abstract_state(), shapes_of(config, 32)).compile().as_text())
    found = collectives(module, executed(module), dict(made.mesh.shape))
    gradients = 4 * sum(leaf.size for leaf in jax.tree.leaves(made.abstract_state().params))
    assert gradients <= sum(one.bytes for one in found) < 1.01 * gradients


def test_parameters_may_be_stored_over_the_data_axis():
    """Then gradients are scattered over it, each time."""
    config = tiny(dropout_rate=0.3)
    batch = ragged(config)
    one, of_one = after_one_step(trainer(config, microbatches=2), batch)
    made = trainer(config, EIGHT, microbatches=2, rules=Rules({"embed": ("data", "fsdp")}))
    eight, of_eight = after_one_step(made, batch)
    assert of_eight == pytest.approx(of_one, rel=1e-5)
    assert_same(one, eight, 1e-5)


def test_each_microbatch_has_its_own_dropout():
    """The same rows in both microbatches, of which one counts: with one mask for both it would not matter which."""
    config = tiny(dropout_rate=0.5)
    rows = {name: np.repeat(rows[:4], 2, axis=0) for name, rows in ragged(config).items()}  # microbatch i has i::2
    step, losses = trainer(config, microbatches=2).train_step(), []
    for counts in ([1, 0], [0, 1], [1, 0]):
        weights = rows["decoder_loss_weights"] * np.tile(counts, 4)[:, None]
        made = trainer(config, microbatches=2)
        batch = place_batch(made.mesh, rows | {"decoder_loss_weights": weights})
        losses.append(float(step(made.init(), batch)[1]["loss"]))
    assert losses[0] == losses[2]
    assert abs(losses[0] - losses[1]) > 1e-3 * losses[0]


@pytest.mark.parametrize(
    "count,text", [(3, "use a multiple of 3"), (0, "microbatches: expected a whole number >= 1, got 0")]
)
def test_wrong_microbatches(count, text):
    config = tiny()
    with pytest.raises(ValueError, match=text):
        trainer(config, microbatches=count).train_step().lower(trainer(config).abstract_state(), ragged(config))


@pytest.mark.parametrize("z_loss,label_smoothing", [(0.0, 0.0), (1e-2, 0.2)])
@pytest.mark.parametrize("chunks", [1, 4, VOCAB])
def test_the_loss_in_chunks_is_the_loss(chunks, z_loss, label_smoothing):
    rng = np.random.default_rng(0)
    x, table = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 5, 8), (VOCAB, 8)))
    table = table.at[7].mul(30)  # logits of some 100, so that a sum without its maximum overflows
    targets = jnp.asarray(rng.integers(0, VOCAB, (3, 5)), jnp.int32)
    targets = targets.at[0].set(jnp.argmax(jnp.einsum("te,ve->tv", x[0], table), -1).astype(jnp.int32))
    weights = jnp.asarray(rng.integers(0, 2, (3, 5)), jnp.int32).at[0].set(1)
    settings = {"z_loss": z_loss, "label_smoothing": label_smoothing}

    def plain(x, table):
        sums = cross_entropy(jnp.einsum("bte,ve->btv", x, table), targets, weights, **settings)
        return sums.total + 0.5 * sums.nats + 0.25 * sums.z_loss, sums

    def chunked(x, table):
        sums = chunked_cross_entropy(x, table, targets, weights, chunks=chunks, **settings)
        return sums.total + 0.5 * sums.nats + 0.25 * sums.z_loss, sums

    grad = [jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(x, table) for f in (plain, chunked)]
    (one, by_one), (other, by_other) = grad
    np.testing.assert_allclose(jax.tree.leaves(other), jax.tree.leaves(one), rtol=2e-6)
    assert other[1].correct == one[1].correct > 0
    assert_same(list(by_one), list(by_other), 2e-6)


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_a_target_that_is_no_token_is_nan_in_chunks_as_well(bad):
    x, table = jnp.ones((1, 2, 4)), jnp.ones((VOCAB, 4))
    sums = chunked_cross_entropy(x, table, jnp.array([[1, bad]]), jnp.array([[1, 1]]), chunks=4)
    assert np.isnan(sums.total)
    unseen = chunked_cross_entropy(x, table, jnp.array([[1, bad]]), jnp.array([[1, 0]]), chunks=4)
    np.testing.assert_allclose(unseen.total, np.log(VOCAB), rtol=1e-6)


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(t5_tiny, id="tied"),
        pytest.param(t5_1_1_tiny, id="own softmax", marks=pytest.mark.slow),
        pytest.param(lm_tiny, id="language model", marks=pytest.mark.slow),
    ],
)
def test_a_step_in_chunks_of_the_vocabulary(preset):
    config = tiny(preset)
    batch = ragged(config)
    whole, of_whole = after_one_step(trainer(config), batch)
    parts, of_parts = after_one_step(trainer(config, EIGHT, loss_chunks=4, microbatches=2), batch)
    assert of_parts == pytest.approx(of_whole, rel=1e-5)
    assert_same(whole, parts, 1e-5)


def test_logits_are_never_whole():
    """No array of the compiled step is as large as the logits."""
    config = tiny(vocab_size=4096)
    count = {}
    for chunks in (1, 8):
        made = trainer(config, loss_chunks=chunks)
        text = made.train_step().lower(made.abstract_state(), shapes_of(config)).compile().as_text()
        count[chunks] = text.count(f"f32[{ROWS},{TARGETS},4096]") + text.count(f"f32[{ROWS * TARGETS},4096]")
    assert count[1] > 0 == count[8]


@pytest.mark.parametrize(
    "config,settings,text",
    [
        (
            tiny(),
            {"loss_chunks": 5},
            "loss_chunks=5 does not divide the vocabulary's 64 rows; usable: 1, 2, 4, 8, 16, 32, 64",
        ),
        (tiny(), {"loss_chunks": True}, "loss_chunks: expected a whole number >= 1, got True"),
        (classifier_tiny(2), {"loss_chunks": 2}, "loss_chunks: expected 1, as a classifier has no vocabulary"),
    ],
)
def test_wrong_chunks(config, settings, text):
    with pytest.raises(ValueError, match=text):
        trainer(config, **settings)
    with pytest.raises(ValueError, match="a device's 32 rows of the vocabulary"):
        trainer(tiny(), EIGHT, loss_chunks=64)


def shapes_of(config, rows=ROWS):
    shapes = config.batch.shapes(rows, {"inputs": LENGTH, "targets": TARGETS}, packed=False)
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "remat,scan",
    [
        pytest.param("attention", True, id="attention"),
        pytest.param("full", True, id="full", marks=pytest.mark.slow),
        pytest.param("dots", True, id="dots", marks=pytest.mark.slow),
        pytest.param("attention", False, id="attention, unrolled", marks=pytest.mark.slow),
        pytest.param("full", False, id="full, unrolled", marks=pytest.mark.slow),
    ],
)
def test_remat_changes_no_number(remat, scan):
    config = tiny(scan_layers=scan)
    batch = ragged(config)
    whole, of_whole = after_one_step(trainer(config), batch)
    again, of_again = after_one_step(trainer(dataclasses.replace(config, remat=remat)), batch)
    assert of_again == pytest.approx(of_whole, rel=1e-6)
    assert_same(whole, again, 1e-6)


def test_bfloat16_parameters_train():
    """Stored in half the bytes; sums of gradients, updates and the optimizer's statistics are made in float32."""
    config = tiny(param_dtype="bfloat16", dtype="bfloat16", dropout_rate=0.1)
    made = trainer(config, EIGHT, microbatches=2, loss_chunks=2)
    state, step, batch = made.init(), made.train_step(), place_batch(made.mesh, ragged(config))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    losses = []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}


def test_the_first_moment_may_be_bfloat16():
    config = tiny()
    made = trainer(config, optimizer=AdamW(Constant(1e-2), moment_dtype="bfloat16"))
    state = made.init()
    kinds = {name.rpartition("/mu/")[1]: leaf.dtype for name, leaf in named_leaves(state.opt_state) if "/mu/" in name}
    assert kinds == {"/mu/": jnp.dtype("bfloat16")}
    plain, exact = after_one_step(trainer(config, optimizer=AdamW(Constant(1e-2))), ragged(config))
    rounded, of_rounded = after_one_step(made, ragged(config))
    assert of_rounded == exact
    assert_same(plain, rounded, 2e-3)
    with pytest.raises(ValueError, match="AdamW.moment_dtype: expected 'float32' or 'bfloat16', got 'float16'"):
        AdamW(Constant(1e-2), moment_dtype="float16")


def test_memory_falls_as_promised_on_the_cpu_too():
    """Peak bytes by the compiler: with four microbatches, in chunks, with remat."""
    config = tiny(encoder_layers=4, decoder_layers=4, vocab_size=4096)
    temporary = {}
    for name, changed, settings in (
        ("plain", config, {}),
        ("microbatches", config, {"microbatches": 4}),
        ("chunks", config, {"loss_chunks": 16}),
    ):
        made = trainer(changed, **settings)
        compiled = made.train_step().lower(made.abstract_state(), shapes_of(changed, rows=32)).compile()
        temporary[name] = compiled.memory_analysis().temp_size_in_bytes
    assert temporary["microbatches"] < temporary["plain"] > temporary["chunks"]


def test_nothing_is_whole_on_one_device_while_it_is_drawn():
    """The program that draws initial values has parts of the largest parameter alone, of any dtype."""
    made = trainer(tiny(vocab_size=4096, features=64, mlp_features=128), EIGHT)
    text = made.initial_program().lower(made.seed).compile().as_text()
    assert "[2048,32]" in text and "[4096,64]" not in text and f"[{4096 * 64}]" not in text
