"""Training language models and classifiers: losses, perplexity, meshes, exact resume, a pretrained encoder."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synthesizer_jax as sj
from synthesizer_jax.models import parameters
from synthesizer_jax.models.batch import DECODER_ONLY, ENCODER_ONLY
from synthesizer_jax.sharding import MeshShape, named_leaves, place_batch
from synthesizer_jax.training import checkpoint, loop
from synthesizer_jax.training import step as step_module
from synthesizer_jax.training.checkpoint import CheckpointWriter
from synthesizer_jax.training.logging import read_lines, summarize
from synthesizer_jax.training.optimizer import Adafactor, Constant
from synthesizer_jax.training.step import Trainer

ROWS, LENGTH, VOCAB, CLASSES = 8, 12, 32, 3
SIZES = {"features": 16, "mlp_features": 32, "heads": 4, "head_dim": 8}
OPTIMIZER = Adafactor(Constant(1e-2), min_size_to_factor=8)
LM = sj.lm_tiny("R", LENGTH, vocab_size=VOCAB, dropout_rate=0.0, decoder_layers=1, **SIZES)
CLASSIFIER = sj.classifier_tiny(CLASSES, "FR+V", LENGTH, vocab_size=VOCAB, dropout_rate=0.0, encoder_layers=1, **SIZES)
ONE, ALL = MeshShape(), MeshShape(data=2, fsdp=2, model=2)


def language_batch(seed=0):
    """Two texts in each row; the second row is half empty."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(2, VOCAB, (ROWS, LENGTH), dtype=np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32) % 6, (ROWS, 1))
    segments = np.tile(np.repeat([[1, 2]], 6, axis=1).astype(np.int32), (ROWS, 1))
    targets[1, 6:], segments[1, 6:], positions[1, 6:] = 0, 0, 0
    return {
        "decoder_input_tokens": np.where(positions > 0, np.pad(targets, ((0, 0), (1, 0)))[:, :-1], 0),
        "decoder_target_tokens": targets,
        "decoder_loss_weights": (targets > 0).astype(np.int32),
        "decoder_segment_ids": segments,
        "decoder_positions": positions,
    }


def labelled_batch(seed=0):
    """The last row is padding, as evaluation fills batches."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, VOCAB, (ROWS, LENGTH), dtype=np.int32)
    labels, weights = rng.integers(0, CLASSES, ROWS, dtype=np.int32), np.ones(ROWS, np.int32)
    tokens[::2, 9:], tokens[-1], labels[-1], weights[-1] = 0, 0, 0, 0
    return {"encoder_input_tokens": tokens, "labels": labels, "loss_weights": weights}


KINDS = {"lm": (LM, language_batch), "classifier": (CLASSIFIER, labelled_batch)}
kinds = pytest.mark.parametrize("config, batch_of", KINDS.values(), ids=list(KINDS))


def trainer(config, devices=1, shape=ONE, **settings):
    return Trainer(config, OPTIMIZER, shape.build(jax.devices()[:devices]), **settings)


@functools.cache
def compiled(made):
    return made.train_step()


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Runs of the same program share its compilation, which is most of their time."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.5,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


# Steps


@kinds
def test_the_loss_is_that_of_the_logits(config, batch_of):
    made, batch = trainer(config, z_loss=1e-3, label_smoothing=0.1), batch_of()
    keys, state = config.batch, made.init()
    model = jax.device_get((state.params, state.fixed))

    @jax.jit
    def logits_of(trained, fixed):
        arrays = {name: jnp.asarray(batch[name]) for name in (*keys.inputs, *keys.packing) if name in batch}
        return parameters.bind(config, trained, fixed)(**arrays)

    logits = np.asarray(logits_of(*model), np.float64)
    targets, real = batch[keys.targets], batch[keys.weights] > 0
    sums = jax.device_get(made.eval_step()(state, place_batch(made.mesh, batch)))
    metrics = jax.device_get(compiled(made)(state, place_batch(made.mesh, batch))[1])

    log_p = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    nats = -np.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0][real].sum()
    right = np.sum((logits.argmax(axis=-1) == targets)[real])
    assert metrics["weight"] == sums["weight"] == real.sum()
    assert metrics["accuracy"] == sums["accuracy"] == right
    np.testing.assert_allclose(sums["loss"], nats, rtol=1e-5)
    soft = np.where(np.eye(logits.shape[-1])[targets] > 0, 0.9, 0.1 / (logits.shape[-1] - 1))
    log_z = np.log(np.sum(np.exp(logits), axis=-1))
    losses = np.sum(soft * (np.log(soft) - log_p), axis=-1) + 1e-3 * log_z**2
    np.testing.assert_allclose(metrics["loss"], losses[real].sum(), rtol=1e-5)
    if config is LM:  # perplexity without smoothing and z-loss
        np.testing.assert_allclose(metrics["nats"], nats, rtol=1e-5)
        told = summarize([sums, sums])
        np.testing.assert_allclose(told["perplexity"], np.exp(nats / real.sum()), rtol=1e-5)
    else:
        assert "nats" not in metrics
    names = {name.partition("/")[2]: float(value) for name, value in metrics.items() if name.startswith("non_padding")}
    expected = {"decoder": real.mean()} if config is LM else {"encoder": (batch["encoder_input_tokens"] > 0).mean()}
    assert names == pytest.approx(expected)


@kinds
def test_any_mesh_trains_as_one_device_and_learns(config, batch_of):
    config = dataclasses.replace(config, dropout_rate=0.1)
    batch, history = batch_of(), []
    for devices, shape, steps in ((1, ONE, 60), (8, ALL, 3)):
        made = trainer(config, devices, shape)
        state, losses = made.init(), []
        for _ in range(steps):
            state, metrics = compiled(made)(state, place_batch(made.mesh, batch))
            losses.append(float(metrics["loss"]))
        history.append(losses)
    np.testing.assert_allclose(history[1], history[0][:3], rtol=1e-5)
    assert history[0][-1] < 0.75 * history[0][0]  # random texts can only be learnt by heart
    axes = dict(named_leaves(parameters.abstract(config)[0]))
    sizes = {"vocab": 2, "mlp": 2, "heads": 2, "embed": 2, "synth_query": 2}
    for name, leaf in named_leaves(state.params):
        parts = leaf.size // leaf.addressable_shards[0].data.size
        assert parts == np.prod([sizes.get(axis, 1) for axis in axes[name].axes]), name


@pytest.mark.parametrize(
    "keys, batch_of, change, text",
    [
        (DECODER_ONLY, language_batch, lambda b: b.pop("decoder_positions"), r"missing \['decoder_positions'\]"),
        (
            DECODER_ONLY,
            language_batch,
            lambda b: b.update(encoder_input_tokens=b["decoder_positions"]),
            r"unknown \['encoder_input_tokens'\]; DecoderOnly reads decoder_input_tokens, decoder_target_tokens, dec",
        ),
        (
            ENCODER_ONLY,
            labelled_batch,
            lambda b: b.pop("labels"),
            r"missing \['labels'\], unknown nothing; EncoderOnly",
        ),
        (
            ENCODER_ONLY,
            labelled_batch,
            lambda b: b.update(encoder_segment_ids=b["encoder_input_tokens"]),
            r"unknown \['encoder_segment_ids'\]; EncoderOnly reads encoder_input_tokens, labels, loss_weights$",
        ),
        (ENCODER_ONLY, labelled_batch, lambda b: b.update(labels=np.zeros(8)), r"batch\['labels'\]: expected whole"),
    ],
)
def test_wrong_batches(keys, batch_of, change, text):
    batch = batch_of()
    step_module.check_batch(batch, keys)
    change(batch)
    with pytest.raises(ValueError, match=text):
        step_module.check_batch(batch, keys)


# Runs


class OneDevice(MeshShape):
    """Compiles in half the time."""

    def build(self, devices=None):
        return super().build(jax.devices()[:1])


def arguments(config, model_dir, **changes):
    lm = isinstance(config, sj.DecoderOnlyConfig)
    given = {
        "model": dataclasses.replace(config, vocab_size=2048, **({} if lm else {"num_classes": 2})),
        "optimizer": OPTIMIZER,
        "mixture_or_task_name": "quickstart_lm" if lm else "quickstart_negation_class",
        "mixture_or_task_module": "synthesizer_jax.tasks.quickstart",
        "task_feature_lengths": {"targets" if lm else "inputs": LENGTH},
        "pack": lm,
        "batch_size": 8,
        "train_steps": 4,
        "model_dir": str(model_dir),
        "log_period": 1,
        "checkpoint_period": 2,
        "eval_period": 4,
        "eval_steps": 2,
        "mesh": OneDevice(),
    }
    return given | changes


def entries(folder, *names):
    """The values of the log that do not depend on the clock."""
    lines = read_lines(pathlib.Path(folder, *names) / "metrics.jsonl")
    return [{name: value for name, value in line.items() if "timing" not in name} for line in lines]


@kinds
def test_a_run_goes_on_exactly_where_it_stopped(config, batch_of, tmp_path):
    task = arguments(config, "")["mixture_or_task_name"]
    whole = loop.train(**arguments(config, tmp_path / "whole"))
    loop.train(**arguments(config, tmp_path / "parts", train_steps=2, eval_period=None))
    parts = loop.train(**arguments(config, tmp_path / "parts"))
    assert entries(tmp_path / "parts", "train") == entries(tmp_path / "whole", "train")
    assert parts.evaluations == whole.evaluations
    for (name, a), (_, b) in zip(named_leaves(parts.state), named_leaves(whole.state), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    (log,) = entries(tmp_path / "whole", "training_eval", task)
    speed = read_lines(tmp_path / "whole" / "train" / "metrics.jsonl")[1]
    if config.batch == DECODER_ONLY:
        assert set(log) == {"step", "loss", "accuracy", "perplexity"}
        assert log["perplexity"] == pytest.approx(np.exp(log["loss"]))
        assert "timing/target_tokens_per_second" in speed
    else:
        assert set(log) == {"step", "loss", "accuracy"}
        assert "timing/examples_per_second" in speed
    assert checkpoint.read_config(whole.checkpoint) == whole_config(config)


def whole_config(config):
    return arguments(config, "")["model"]


@pytest.mark.parametrize(
    "config, change, text",
    [
        (CLASSIFIER, {"pack": True}, r"pack: EncoderOnly gives one answer for a row.*set pack=False \(PACK = False\)"),
        (
            CLASSIFIER,
            {"model": CLASSIFIER},
            "'inputs' of 'quickstart_negation_class' has ids up to 2047, the model has 32",
        ),
        (
            CLASSIFIER,
            {"model": dataclasses.replace(CLASSIFIER, vocab_size=2048)},
            "num_classes: 'targets' of 'quickstart_negation_class' is one of 2 ids, the model has 3 classes",
        ),
        (
            CLASSIFIER,
            {"mixture_or_task_name": "quickstart_negation"},
            "num_classes: 'targets' of 'quickstart_negation' is one of 2048 ids, the model has 2 classes",
        ),
        (
            CLASSIFIER,
            {"mixture_or_task_name": "quickstart_lm"},
            "has the features targets, but EncoderOnly reads inputs",
        ),
        (
            LM,
            {"mixture_or_task_name": "quickstart_negation"},
            "'quickstart_negation' has the features inputs and targets, but DecoderOnly reads targets$",
        ),
        (
            LM,
            {"task_feature_lengths": {"inputs": 8}},
            r'expected {"targets": TOKENS} for DecoderOnly, got {\'inputs\': 8}',
        ),
        (CLASSIFIER, {"task_feature_lengths": {"targets": 8}}, r'expected {"inputs": TOKENS} for EncoderOnly, got'),
        (LM, {"task_feature_lengths": {"targets": LENGTH + 1}}, "max_length=12"),
        (
            LM,
            {"model": sj.t5_tiny("R", LENGTH, vocab_size=2048, **SIZES)},
            "'quickstart_lm' has the features targets, but EncoderDecoder reads inputs and targets",
        ),
    ],
)
def test_wrong_arguments(tmp_path, config, change, text):
    with pytest.raises(ValueError, match=text):
        loop.train(**arguments(config, tmp_path, **change))
    assert checkpoint.latest(tmp_path) is None


# Pretrained encoders


ENCODER = {"vocab_size": VOCAB, "encoder_layers": 1, "learned_positions": LENGTH} | SIZES
WHOLE = sj.t5_tiny("fixedR+V", LENGTH, decoder_layers=1, **ENCODER)
TUNED = sj.classifier_tiny(CLASSES, "fixedR+V", LENGTH, **ENCODER)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """kind -> a folder with a checkpoint whose every entry is another number."""
    folders = {}
    for config in (WHOLE, TUNED, LM):
        numbers = iter(range(10**6))
        trees = jax.tree.map(
            lambda leaf: (np.arange(np.prod(leaf.shape)) + next(numbers)).reshape(leaf.shape).astype(np.float32),
            parameters.abstract(config),
        )
        folders[config.batch.kind] = str(tmp_path_factory.mktemp(config.batch.kind))
        with CheckpointWriter(folders[config.batch.kind]) as writer:
            writer.save(5, dict(zip(("params", "fixed"), trees, strict=True)), config, {})
    return folders


def restored(folder):
    _, trained, fixed = checkpoint.restore_params(folder, ONE.build(jax.devices()[:1]))
    return trained, fixed


def test_a_classifier_takes_embedding_and_encoder_of_an_encoder_decoder(saved):
    mesh = MeshShape(model=2).build(jax.devices()[:8])
    trained, fixed = checkpoint.initial_params(saved["EncoderDecoder"], mesh, TUNED, seed=3)
    whole, whole_fixed = restored(saved["EncoderDecoder"])
    for name in ("embedding", "position_embedding", "encoder"):
        jax.tree.map(np.testing.assert_array_equal, trained[name], whole[name])
    jax.tree.map(np.testing.assert_array_equal, fixed, {"encoder": whole_fixed["encoder"]})
    new = jax.jit(lambda: parameters.init(TUNED, jax.random.key(3))[0]["classifier"])()
    jax.tree.map(np.testing.assert_array_equal, trained["classifier"], new)
    assert jax.tree.structure((trained, fixed)) == jax.tree.structure(parameters.abstract(TUNED))
    assert trained["embedding"]["embedding"].addressable_shards[0].data.shape == (16, 16)


def test_a_classifier_goes_on_from_a_classifier_with_its_head(saved):
    mesh = ONE.build(jax.devices()[:1])
    trained, fixed = checkpoint.initial_params(saved["EncoderOnly"], mesh, TUNED, seed=3)
    jax.tree.map(np.testing.assert_array_equal, (trained, fixed), restored(saved["EncoderOnly"]))
    with pytest.raises(ValueError, match="num_classes: 3 in the checkpoint, 4 now"):
        checkpoint.initial_params(saved["EncoderOnly"], mesh, dataclasses.replace(TUNED, num_classes=4), seed=3)


def test_an_encoder_that_does_not_fit_is_told_in_three_lists(saved):
    other = dataclasses.replace(TUNED, encoder_attention=sj.synthesizer("R+V", LENGTH), mlp_features=48)
    with pytest.raises(ValueError) as error:
        checkpoint.check_initial(checkpoint.find(saved["EncoderDecoder"]), other)
    missing, rest = str(error.value).split("  unexpected in the checkpoint:\n")
    unexpected, different = rest.split("  of different shape:\n")
    assert "missing in the checkpoint:\n    params/encoder/layers/attention/scores/random/R\n" in missing
    assert unexpected == "    fixed/encoder/layers/attention/scores/random/R\n"  # nothing of the decoder
    assert "params/encoder/layers/mlp/wi: (1, 16, 32) in the checkpoint, (1, 16, 48) wanted" in different


@pytest.mark.parametrize(
    "change, text",
    [
        ({"relative_max_distance": 64}, "another encoder:\n  relative_max_distance: 128 in the checkpoint, 64 now"),
        ({"num_classes": 5, "dropout_rate": 0.4, "pooling": "first", "dtype": "bfloat16"}, None),
    ],
)
def test_what_the_shapes_do_not_show_is_compared_too(saved, change, text):
    config, found = dataclasses.replace(TUNED, **change), checkpoint.find(saved["EncoderDecoder"])
    if text is None:
        assert checkpoint.check_initial(found, config).startswith("embedding and encoder of")
    else:
        with pytest.raises(ValueError, match=text):
            checkpoint.check_initial(found, config)


@pytest.mark.parametrize(
    "kind, config", [("EncoderDecoder", LM), ("EncoderOnly", WHOLE), ("EncoderOnly", LM), ("DecoderOnly", TUNED)]
)
def test_another_kind_of_model_is_refused(saved, kind, config):
    text = f"holds another kind of model: {kind}, where {config.batch.kind} is wanted"
    with pytest.raises(ValueError, match=text):
        checkpoint.initial_params(saved[kind], ONE.build(jax.devices()[:1]), config, seed=0)
    with pytest.raises(ValueError, match=text):
        checkpoint.restore_params(saved[kind], config=config)


def test_training_begins_with_the_pretrained_encoder(tmp_path, capfd):
    whole = sj.t5_tiny("FR+V", LENGTH, vocab_size=2048, encoder_layers=1, decoder_layers=1, **SIZES)
    trained, fixed = jax.tree.map(lambda p: np.full(p.shape, 0.25, np.float32), parameters.abstract(whole))
    with CheckpointWriter(str(tmp_path / "whole")) as writer:
        writer.save(9, {"params": trained, "fixed": fixed}, whole, {})
    changes = {"initial_checkpoint_path": str(tmp_path / "whole"), "train_steps": 1, "eval_period": None}
    result = loop.train(**arguments(CLASSIFIER, tmp_path / "tuned", **changes))
    folder = tmp_path / "whole" / "checkpoint_9"
    assert f"starts from embedding and encoder of {folder}, with a new head" in capfd.readouterr().err
    embedding = np.asarray(result.state.params["embedding"]["embedding"])
    assert 0 < np.mean(embedding != 0.25) and np.max(np.abs(embedding - 0.25)) < 0.1  # one step away
