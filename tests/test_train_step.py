"""The training step: its update, metrics, donation, compilation, dropout, and equality over meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthesizer_jax.models import parameters, t5_tiny
from synthesizer_jax.sharding import MeshShape, named_leaves, place_batch
from synthesizer_jax.training import step as step_module
from synthesizer_jax.training.optimizer import Adafactor, Constant
from synthesizer_jax.training.step import Trainer

ROWS, INPUTS, TARGETS, VOCAB = 8, 12, 6, 32
ONE = MeshShape()
ALL = MeshShape(data=2, fsdp=2, model=2)


def tiny(attention="fixedR", **overrides):
    sizes = {"features": 16, "mlp_features": 32, "heads": 4, "head_dim": 8, "vocab_size": VOCAB, "dropout_rate": 0.0}
    return t5_tiny(attention, max_length=INPUTS, **sizes | overrides)


WITH_DROPOUT = tiny("R", dropout_rate=0.1)


def trainer(config=None, devices=1, shape=ONE, **settings):
    optimizer = settings.pop("optimizer", Adafactor(Constant(1e-2), min_size_to_factor=8))
    settings = {"z_loss": 1e-3, "label_smoothing": 0.1} | settings
    return Trainer(config or tiny(), optimizer, shape.build(jax.devices()[:devices]), **settings)


@functools.cache
def compiled(made):
    """The step of a trainer, compiled once for all tests: compiling takes most of their time."""
    return made.train_step()


@functools.cache
def initial(made):
    return jax.device_get(made.init())


def start(made):
    """The initial state; each call gives new arrays, as a step takes them away."""
    return jax.device_put(initial(made), jax.tree.map(lambda leaf: leaf.sharding, made.abstract_state()))


def example(seed=0, packed=False):
    rng = np.random.default_rng(seed)
    inputs = rng.integers(2, VOCAB, (ROWS, INPUTS), dtype=np.int32)
    targets = rng.integers(2, VOCAB, (ROWS, TARGETS), dtype=np.int32)
    inputs[:, 9:], targets[::2, 4:] = 0, 0
    batch = {
        "encoder_input_tokens": inputs,
        "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
        "decoder_target_tokens": targets,
        "decoder_loss_weights": (targets > 0).astype(np.int32),
    }
    if packed:
        for side, length in (("encoder", INPUTS), ("decoder", TARGETS)):
            segments = np.repeat([[1, 2]], length // 2, axis=1).astype(np.int32)
            batch[f"{side}_segment_ids"] = np.tile(segments, (ROWS, 1))
            batch[f"{side}_positions"] = np.tile(np.arange(length, dtype=np.int32) % (length // 2), (ROWS, 1))
    return batch


def run(made, batches):
    state, history = start(made), []
    for batch in batches:
        state, metrics = compiled(made)(state, place_batch(made.mesh, batch))
        history.append(jax.device_get(metrics))
    return state, history


def test_one_step_is_the_optimizer_on_the_mean_gradient():
    made, batch = trainer(), jax.tree.map(jnp.asarray, example(packed=True))
    state = start(made)
    trained, fixed, opt_state = jax.device_get((state.params, state.fixed, state.opt_state))

    def plain(trained):
        packing = {name: batch[name] for name in batch if "segment" in name or "positions" in name}
        model = parameters.bind(made.config, trained, fixed)
        logits = model(batch["encoder_input_tokens"], batch["decoder_input_tokens"], **packing)
        soft = jnp.where(jax.nn.one_hot(batch["decoder_target_tokens"], VOCAB) > 0, 0.9, 0.1 / (VOCAB - 1))
        losses = optax.losses.softmax_cross_entropy(logits, soft) + 1e-3 * jax.nn.logsumexp(logits, -1) ** 2
        entropy = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1 / (VOCAB - 1)))
        real = batch["decoder_target_tokens"] > 0
        right = jnp.argmax(logits, -1).astype(jnp.int32) == batch["decoder_target_tokens"]
        return jnp.sum(jnp.where(real, losses - entropy, 0.0)) / jnp.sum(real, dtype=jnp.float32), jnp.sum(right & real)

    (loss, right), gradients = jax.jit(jax.value_and_grad(plain, has_aux=True))(trained)
    transformation = made.optimizer.build(parameters.abstract(made.config)[0])
    updates, _ = jax.jit(transformation.update)(gradients, opt_state, trained)
    expected = optax.apply_updates(trained, updates)

    state, metrics = compiled(made)(state, place_batch(made.mesh, batch))
    np.testing.assert_allclose(metrics["loss"] / metrics["weight"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["gradient_norm"], optax.tree.norm(gradients), rtol=1e-5)
    assert int(metrics["accuracy"]) == int(right)
    for (name, one), (_, other) in zip(named_leaves(state.params), named_leaves(expected), strict=True):
        # Adafactor divides a gradient by its size, which makes whole steps of small gradients and their rounding.
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5, err_msg=name)
    assert state.step == 1


def test_metrics():
    made, batch = trainer(), example()
    _, (metrics,) = run(made, [batch])
    assert metrics["weight"] == np.sum(batch["decoder_target_tokens"] > 0)
    np.testing.assert_allclose(metrics["learning_rate"], 1e-2, rtol=1e-6)
    np.testing.assert_allclose(metrics["non_padding_fraction/encoder"], 9 / 12)
    np.testing.assert_allclose(metrics["non_padding_fraction/decoder"], 5 / 6)
    assert 0 < metrics["z_loss"] < metrics["loss"]
    assert all(value.dtype == jnp.float32 and value.shape == () for value in metrics.values())


def test_training_learns_and_leaves_fixed_parameters_alone():
    made = trainer()
    before = initial(made).fixed
    state, history = run(made, [example()] * 30)
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert jax.tree.leaves(before)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.fixed))


def test_a_batch_without_targets_changes_nothing():
    made, batch = trainer(), example()
    batch["decoder_loss_weights"] = np.zeros_like(batch["decoder_loss_weights"])
    before = initial(made).params
    state, history = run(made, [batch])
    assert history[0]["loss"] == 0
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))


def test_dropout_depends_on_seed_and_step_alone():
    made, batch = trainer(WITH_DROPOUT), example()
    step = compiled(made)

    def loss(number):
        state = dataclasses.replace(start(made), step=jnp.int32(number))
        return float(step(state, place_batch(made.mesh, batch))[1]["loss"])

    assert loss(0) == loss(0)
    assert len({loss(0), loss(1), loss(2)}) == 3
    placed = jax.tree.map(jnp.asarray, batch)
    programs = [
        trainer(WITH_DROPOUT, seed=s).train_step().lower(made.abstract_state(), placed).as_text() for s in (0, 1)
    ]
    assert programs[0] != programs[1]


@pytest.mark.parametrize("shape", [ONE, ALL])
def test_any_mesh_trains_as_one_device_and_compiles_once(shape, monkeypatch):
    traces, compilations = [], []
    batches = [example(i) for i in range(4)]
    _, history = run(trainer(WITH_DROPOUT), batches)

    monkeypatch.setattr(step_module, "check_batch", lambda *_: traces.append(1))
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **kwargs: compilations.append(event) if "backend_compile" in event else None
    )
    made = trainer(WITH_DROPOUT, devices=8, shape=shape)
    state, step = start(made), made.train_step()
    for i, batch in enumerate(batches):
        placed, previous = place_batch(made.mesh, batch), state
        compilations.clear()
        state, metrics = step(state, placed)
        np.testing.assert_allclose(metrics["loss"], history[i]["loss"], rtol=1e-5)
        assert bool(compilations) == (i == 0)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((previous.params, previous.fixed)))
    assert len(traces) == 1

    axes = dict(named_leaves(parameters.abstract(WITH_DROPOUT)[0]))
    sizes = {
        "vocab": shape.model,
        "mlp": shape.model,
        "heads": shape.model,
        "embed": shape.fsdp,
        "synth_query": shape.fsdp,
    }
    for name, leaf in named_leaves(state.params):
        parts = leaf.size // leaf.addressable_shards[0].data.size
        assert parts == np.prod([sizes.get(axis, 1) for axis in axes[name].axes]), name


def test_initial_values_do_not_depend_on_the_mesh():
    one, eight = initial(trainer(WITH_DROPOUT)), initial(trainer(WITH_DROPOUT, devices=8, shape=ALL))
    jax.tree.map(np.testing.assert_array_equal, one, eight)


def test_evaluation_has_no_dropout_z_loss_or_smoothing():
    made, batch = trainer(tiny(dropout_rate=0.5), z_loss=1.0, label_smoothing=0.2), example()
    state = start(made)
    sums = made.eval_step()(state, place_batch(made.mesh, batch))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    logits = jax.jit(lambda *tokens: parameters.bind(made.config, state.params, state.fixed)(*tokens))(
        batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    )
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch["decoder_target_tokens"])
    np.testing.assert_allclose(sums["loss"], np.sum(np.asarray(losses)[batch["decoder_target_tokens"] > 0]), rtol=1e-6)
    assert set(sums) == {"loss", "accuracy", "weight"}


@pytest.mark.parametrize(
    "change,text",
    [
        (lambda b: b.pop("decoder_loss_weights"), r"batch: missing \['decoder_loss_weights'\], unknown nothing"),
        (lambda b: b.update(encoder_segment_id=b["encoder_input_tokens"]), r"unknown \['encoder_segment_id'\]"),
        (
            lambda b: b.update(encoder_segment_ids=b["encoder_input_tokens"]),
            r"missing \['encoder_positions', 'decoder_",
        ),
        (
            lambda b: b.update(decoder_target_tokens=np.zeros((ROWS, 6), np.float32)),
            "expected whole numbers, got float",
        ),
    ],
)
def test_wrong_batches(change, text):
    batch = example()
    change(batch)
    with pytest.raises(ValueError, match=text):
        step_module.check_batch(batch)


def test_a_step_checks_its_batch():
    made, batch = trainer(), example()
    batch["encoder_segment_id"] = batch["encoder_input_tokens"]
    with pytest.raises(ValueError, match="unknown"):
        made.train_step()(made.abstract_state(), place_batch(made.mesh, batch))


def test_a_model_that_does_not_fit_the_mesh_is_refused_before_compiling():
    made = trainer(tiny(heads=3), devices=8, shape=MeshShape(model=2))
    with pytest.raises(ValueError, match=r"axis 'heads' of size 3 does not divide over model=2"):
        made.init()


def test_bfloat16_trains():
    state, history = run(trainer(tiny("R", dtype="bfloat16", param_dtype="bfloat16")), [example()] * 20)
    assert history[-1]["loss"] < history[0]["loss"]
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    assert jnp.dtype("bfloat16") not in {leaf.dtype for leaf in jax.tree.leaves(state.opt_state)}
