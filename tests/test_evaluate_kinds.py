"""Evaluation and inference of language models and classifiers with random parameters: perplexity, accuracy, answers."""

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seqio
import tensorflow as tf
from t5.evaluation import metrics
from test_checkpoint_damage import take_state

import synthesizer_jax as sj
from synthesizer_jax.__main__ import main
from synthesizer_jax.evaluation import evaluate, infer
from synthesizer_jax.models import parameters
from synthesizer_jax.tasks.labels import LabelVocabulary
from synthesizer_jax.tasks.quickstart import OUTPUT_FEATURES, VOCABULARY
from synthesizer_jax.training.checkpoint import CheckpointWriter

STEP, LENGTH = 7, 16
LABELS = ("red", "green", "blue")
WORDS = "the value of object is returned string list name type module class function".split()
SIZES = {"vocab_size": 2176, "features": 16, "mlp_features": 16, "head_dim": 4, "heads": 4, "dropout_rate": 0.0}
LM = sj.lm_tiny("R+V", LENGTH, decoder_layers=1, **SIZES)
CLASSIFIER = sj.classifier_tiny(len(LABELS), "FR+V", LENGTH, encoder_layers=1, **SIZES)
TOKENIZED = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim]


def texts(count):
    draw = np.random.default_rng(count)
    return [" ".join(draw.choice(WORDS, size=draw.integers(1, 20))) for _ in range(count)]


def examples(count, label):
    """Texts of 1 to 20 words, of which many are cut; each text's label is one of three."""
    if label is None:
        return [{"targets": text} for text in texts(count)]
    return [{"inputs": text, "targets": label(number)} for number, text in enumerate(texts(count))]


def add_task(name, count, features, label=None, preprocessors=TOKENIZED, **more):
    def dataset(split, shuffle_files=False, seed=None):
        rows = examples(count, label)
        return tf.data.Dataset.from_tensor_slices({key: [row[key] for row in rows] for key in rows[0]})

    source = seqio.FunctionDataSource(dataset, splits=["validation"])
    seqio.TaskRegistry.add(
        name, source=source, preprocessors=preprocessors, output_features=features, **{"metric_fns": []} | more
    )


def likelihood(targets, scores):
    return {"log_likelihood": float(np.mean(scores)), "scored": len(targets)}


def tokenize_inputs(dataset):
    vocabulary = OUTPUT_FEATURES["inputs"].vocabulary
    return dataset.map(
        lambda x: {
            "inputs": vocabulary.encode_tf(x["inputs"]),
            "targets": tf.reshape(tf.cast(x["targets"], tf.int32), [1]),
        }
    )


@pytest.fixture(scope="module", autouse=True)
def tasks():
    text = {"targets": OUTPUT_FEATURES["targets"]}
    words = OUTPUT_FEATURES | {"targets": seqio.Feature(LabelVocabulary(LABELS), add_eos=False)}
    ids = words | {"targets": seqio.Feature(seqio.PassThroughVocabulary(len(LABELS)), add_eos=False)}
    add_task("kinds_test_text", 23, text)
    add_task("kinds_test_scored", 9, text, metric_fns=[likelihood])
    add_task("kinds_test_predicted", 3, text, metric_fns=[metrics.accuracy])
    add_task("kinds_test_words", 21, words, lambda i: LABELS[i % 3], metric_fns=[metrics.accuracy, likelihood])
    numbers = [tokenize_inputs, seqio.preprocessors.append_eos_after_trim]
    add_task("kinds_test_ids", 21, ids, lambda i: i % 3, numbers)
    seqio.MixtureRegistry.add("kinds_test_texts", ["kinds_test_text", "kinds_test_scored"], default_rate=1)
    yield
    seqio.MixtureRegistry.remove("kinds_test_texts")
    for name in ("text", "scored", "predicted", "words", "ids"):
        seqio.TaskRegistry.remove(f"kinds_test_{name}")


@functools.cache
def drawn(config):
    """Parameters far from their small initial values, with which all answers would be alike."""
    draw = np.random.default_rng(1)
    return jax.tree.map(lambda p: jnp.asarray(draw.normal(size=p.shape), jnp.float32), parameters.abstract(config))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for config in (LM, CLASSIFIER):
        made[config] = tmp_path_factory.mktemp("run")
        trained, fixed = drawn(config)
        with CheckpointWriter(str(made[config])) as writer:
            writer.save(STEP, {"params": trained, "fixed": fixed}, config, {})
    return made


def run(function, folders, config, task, folder, **more):
    lengths = {"targets" if config is LM else "inputs": LENGTH}
    given = {"checkpoint_path": str(folders[config]), "output_dir": str(folder), "task_feature_lengths": lengths}
    return function(mixture_or_task_name=task, **given | more)


def lines(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def encoded(text):
    """Token ids, cut, with the end."""
    return [*VOCABULARY.encode(text)[: LENGTH - 1], 1]


@functools.cache
def log_probabilities(config, task_texts):
    """One row at a time, without padding to a common batch, by the model itself: [texts][positions, v] or [texts][c]."""
    forward = jax.jit(lambda trained, fixed, tokens: parameters.bind(config, trained, fixed)(tokens))
    rows = []
    for text in task_texts:
        ids = encoded(text)
        ids = [0, *ids[:-1]] if config is LM else ids
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(ids)] = ids
        logits = np.asarray(forward(*drawn(config), jnp.asarray(row)), np.float64)[0]
        rows.append(logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True)))
    return rows


# Language models


def test_perplexity_counts_every_token_once_whatever_the_batch_size(folders, tmp_path):
    scores = []
    for text, row in zip(texts(23), log_probabilities(LM, tuple(texts(23))), strict=True):
        scores.append(sum(row[t, token] for t, token in enumerate(encoded(text))))
    tokens = sum(len(encoded(text)) for text in texts(23))
    for size in (1, 7, 64):
        folder = tmp_path / str(size)
        found = run(evaluate, folders, LM, "kinds_test_text", folder, batch_size=size)["kinds_test_text"]
        assert found["target_tokens"] == tokens
        np.testing.assert_allclose(found["loss"], -sum(scores) / tokens, rtol=1e-5)
        np.testing.assert_allclose(found["perplexity"], np.exp(-sum(scores) / tokens), rtol=1e-4)
        assert lines(folder / "kinds_test_text-metrics.jsonl") == [
            {"step": STEP, "split": "validation", "examples": 23} | found
        ]
        written = lines(folder / f"kinds_test_text-{STEP}.jsonl")
        assert [line["target"] for line in written] == texts(23)
        np.testing.assert_allclose([line["score"] for line in written], scores, rtol=1e-4)
        assert list((folder / "kinds_test_text").glob("events.out.tfevents.*"))


def test_a_tasks_metrics_of_scores_stand_beside_perplexity(folders, tmp_path):
    results = run(evaluate, folders, LM, "kinds_test_texts", tmp_path, num_examples=5)
    assert list(results["kinds_test_text"]) == ["loss", "perplexity", "target_tokens"]
    scored = results["kinds_test_scored"]
    assert list(scored) == ["loss", "perplexity", "target_tokens", "log_likelihood", "scored"] and scored["scored"] == 5
    np.testing.assert_allclose(scored["loss"] * scored["target_tokens"], -5 * scored["log_likelihood"], rtol=1e-6)
    (line,) = lines(tmp_path / "kinds_test_scored-metrics.jsonl")
    assert line == {"step": STEP, "split": "validation", "examples": 5} | scored
    assert len(lines(tmp_path / f"kinds_test_scored-{STEP}.jsonl")) == 5


def test_a_language_model_continues_each_line(folders, tmp_path):
    file = tmp_path / "begun.txt"
    begun = ["the value of", "object", "", "class function is"]
    file.write_text("".join(f"{line}\n" for line in begun))
    (written,) = run(infer, folders, LM, "kinds_test_text", tmp_path, input_file=str(file), batch_size=3)
    assert written == str(tmp_path / f"begun-{STEP}.jsonl")
    said = lines(written)
    assert [line["input"] for line in said] == begun and [set(line) for line in said] == [{"input", "prediction"}] * 4
    forward = jax.jit(lambda trained, fixed, tokens: parameters.bind(LM, trained, fixed)(tokens))
    for line in said:
        given = VOCABULARY.encode(line["input"])
        row = np.zeros((1, LENGTH + 1), np.int32)
        row[0, 1 : len(given) + 1] = given
        for t in range(len(given), LENGTH):
            logits = forward(*drawn(LM), jnp.asarray(row[:, :-1]))
            row[0, t + 1] = int(logits[0, t, : VOCABULARY.vocab_size].argmax())
            if row[0, t + 1] == 1:
                break
        assert line["input"] + line["prediction"] == VOCABULARY.decode(row[0, 1:].tolist())
    assert len({line["prediction"] for line in said}) == 4


# Classifiers


@pytest.mark.parametrize("task", ["kinds_test_words", "kinds_test_ids"])
def test_accuracy_counts_every_example_once(folders, tmp_path, task):
    """By the task's metrics, whose predictions are labels, and without any."""
    rows = log_probabilities(CLASSIFIER, tuple(texts(21)))
    answers = [int(row.argmax()) for row in rows]
    assert len(set(answers)) > 1
    expected = {"accuracy": 100 * np.mean([answer == number % 3 for number, answer in enumerate(answers)])}
    if task == "kinds_test_words":
        mean = np.mean([row[number % 3] for number, row in enumerate(rows)])
        expected |= {"log_likelihood": pytest.approx(mean, rel=1e-4), "scored": 21}
    for size in (4, 64):
        found = run(evaluate, folders, CLASSIFIER, task, tmp_path / str(size), batch_size=size)[task]
        assert found == expected
        assert lines(tmp_path / str(size) / f"{task}-metrics.jsonl") == [
            {"step": STEP, "split": "validation", "examples": 21} | found
        ]
        written = lines(tmp_path / str(size) / f"{task}-{STEP}.jsonl")
        names = LABELS if task == "kinds_test_words" else ("0", "1", "2")
        assert [line["prediction"] for line in written] == [names[answer] for answer in answers]
        assert [line["target"] for line in written] == [names[number % 3] for number in range(21)]


def test_a_classifier_labels_a_split_and_each_line_of_a_file(folders, tmp_path):
    (from_task,) = run(infer, folders, CLASSIFIER, "kinds_test_words", tmp_path, batch_size=4)
    file = tmp_path / "lines.txt"
    file.write_text("".join(f"{text}\n" for text in texts(21)))
    (from_file,) = run(infer, folders, CLASSIFIER, "kinds_test_words", tmp_path, input_file=str(file))
    answers = [LABELS[int(row.argmax())] for row in log_probabilities(CLASSIFIER, tuple(texts(21)))]
    assert [line["prediction"] for line in lines(from_task)] == answers
    assert lines(from_file) == [
        {"input": text, "prediction": answer} for text, answer in zip(texts(21), answers, strict=True)
    ]


# What is refused, and the command line


@pytest.mark.parametrize(
    "function, config, task, more, text",
    [
        (evaluate, LM, "kinds_test_predicted", {}, "a metric asks for 'prediction'; a language model, which has no inputs"),
        (evaluate, LM, "kinds_test_words", {}, "has the features inputs and targets, but DecoderOnly reads targets$"),
        (evaluate, CLASSIFIER, "kinds_test_text", {}, "has the features targets, but EncoderOnly reads inputs and targets"),
        (evaluate, LM, "kinds_test_text", {"task_feature_lengths": {"targets": 17}}, "length 17 is more than max_length=16"),
        (infer, LM, "kinds_test_text", {}, "input_file: a language model continues the lines of a text file: give one"),
        (infer, CLASSIFIER, "quickstart_negation_class", {}, "is one of 2 ids, the model has 3 classes"),
    ],
)  # fmt: skip
def test_refuses(folders, tmp_path, function, config, task, more, text):
    with pytest.raises(ValueError, match=text):
        run(function, folders, config, task, tmp_path, **more)


def test_a_line_that_leaves_nothing_to_say_is_refused_by_its_number(folders, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("the value\n" + "the value of the object " * 9 + "\n")
    with pytest.raises(ValueError, match=r'input_file: line 2 has \d+ tokens, which .*lengths\["targets"\] = 16; give'):
        run(infer, folders, LM, "kinds_test_text", tmp_path, input_file=str(file))


@pytest.mark.parametrize("config", [LM, CLASSIFIER], ids=["lm", "classifier"])
def test_dry_runs_tell_the_batch_of_the_kind_of_model(folders, tmp_path, capsys, config):
    lm = config is LM
    flags = {
        "CHECKPOINT_PATH": f'"{folders[config]}"',
        "MIXTURE_OR_TASK_NAME": '"kinds_test_text"' if lm else '"kinds_test_words"',
        "TASK_FEATURE_LENGTHS": f'{{"{"targets" if lm else "inputs"}": 16}}',
        "BATCH_SIZE": "8",
    }
    flags = [f"--gin.{name}={value}" for name, value in flags.items()]
    assert main(["evaluate", "--gin_file=runs/evaluate.gin", *flags, "--dry_run"]) == 0
    told = capsys.readouterr().out
    assert f"model: {sj.count_parameters(config):,} trained parameters" in told
    if lm:
        assert "decoder_loss_weights [8, 16] int32" in told and "-> logits [8, 16, 2176] float32" in told
        assert main(["infer", "--gin_file=runs/infer.gin", *flags, "--dry_run"]) == 2
        assert "input_file: a language model continues the lines" in capsys.readouterr().err
    else:
        assert "labels [8] int32" in told and "-> logits [8, 3] float32" in told
        assert main(["infer", "--gin_file=runs/infer.gin", *flags, "--dry_run"]) == 0


@pytest.mark.parametrize("function", [evaluate, infer])
def test_a_damaged_checkpoint_is_passed_over(folders, tmp_path, capfd, function):
    """Also where the damage shows only when parameters are read; results are of the one before, by its step."""
    model_dir = shutil.copytree(folders[CLASSIFIER], tmp_path / "run")
    trained, fixed = jax.tree.map(jnp.zeros_like, drawn(CLASSIFIER))
    with CheckpointWriter(str(model_dir)) as writer:
        writer.save(STEP + 1, {"params": trained, "fixed": fixed}, CLASSIFIER, {})
    take_state(model_dir / f"checkpoint_{STEP + 1}", model_dir / f"checkpoint_{STEP}")
    whole = run(function, folders, CLASSIFIER, "kinds_test_words", tmp_path / "whole")
    capfd.readouterr()
    other = run(function, {CLASSIFIER: model_dir}, CLASSIFIER, "kinds_test_words", tmp_path / "other")
    assert f"checkpoint_{STEP + 1} is damaged: other values than were saved in " in capfd.readouterr().err
    name = f"kinds_test_words-{STEP}.jsonl"
    assert (tmp_path / "other" / name).read_text() == (tmp_path / "whole" / name).read_text()
    assert other == whole if function is evaluate else other == [str(tmp_path / "other" / name)]

    (model_dir / f"checkpoint_{STEP + 1}/state/_METADATA").unlink()
    flags = [
        f'CHECKPOINT_PATH="{model_dir}"',
        'MIXTURE_OR_TASK_NAME="kinds_test_words"',
        f'TASK_FEATURE_LENGTHS={{"inputs": {LENGTH}}}',
    ]
    assert (
        main(
            [
                function.__name__,
                f"--gin_file=runs/{function.__name__}.gin",
                *(f"--gin.{flag}" for flag in flags),
                "--dry_run",
            ]
        )
        == 0
    )
    told = capfd.readouterr().out
    assert (
        f"checkpoint_{STEP + 1} is damaged: state/_METADATA is missing\ncheckpoint: {model_dir}/checkpoint_{STEP}\n"
        in told
    )
