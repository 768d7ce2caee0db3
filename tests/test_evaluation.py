"""Evaluation and inference of a tiny model with random parameters, on small tasks of our own."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seqio
import tensorflow as tf

import synthesizer_jax as sj
from synthesizer_jax.evaluation import evaluate, infer
from synthesizer_jax.models import parameters
from synthesizer_jax.sharding import MeshShape, Rules
from synthesizer_jax.tasks.quickstart import OUTPUT_FEATURES, VOCABULARY
from synthesizer_jax.training import checkpoint
from synthesizer_jax.training.checkpoint import CheckpointWriter

STEP = 7
LENGTHS = {"inputs": 16, "targets": 6}
WORDS = "the value of object is returned string list name type module class function".split()
LONG_NAME = "evaluation_test_" + "long" * 60
CONFIG = sj.t5_1_1_tiny("R+V", max_length=16, vocab_size=2176, features=16, head_dim=4, encoder_layers=1)


def letters(targets, predictions):
    return {"letters": float(np.mean([len(text) for text in predictions])), "examples": len(targets)}


def likelihood(targets, scores):
    return {"log_likelihood": float(np.mean(scores)), "scored": len(targets)}


def needs_more(targets, predictions, aux_values):
    return {}


def examples(count):
    draw = np.random.default_rng(count)
    texts = [" ".join(draw.choice(WORDS, size=draw.integers(1, 9))) for _ in range(count)]
    return [{"inputs": text, "targets": text.split()[-1]} for text in texts]


def add_task(name, counts, metric_fns, postprocess_fn=None, target=None):
    def dataset(split, shuffle_files=False, seed=None):
        rows = [row | ({} if target is None else {"targets": target}) for row in examples(counts[split])]
        return tf.data.Dataset.from_tensor_slices({key: [row[key] for row in rows] for key in rows[0]})

    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(dataset, splits=list(counts)),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
        output_features=OUTPUT_FEATURES,
        metric_fns=metric_fns,
        postprocess_fn=postprocess_fn,
    )


def upper(text, example=None, is_target=False):
    return text.upper()


@pytest.fixture(scope="module", autouse=True)
def tasks():
    add_task("evaluation_test_plain", {"validation": 23, "test": 3}, [letters, likelihood])
    add_task("evaluation_test_upper", {"validation": 5}, [letters], functools.partial(upper))
    add_task("evaluation_test_train_only", {"train": 5}, [letters])
    add_task("evaluation_test_no_metric", {"validation": 5}, [])
    add_task("evaluation_test_aux", {"validation": 5}, [needs_more])
    add_task(LONG_NAME, {"validation": 2}, [letters])
    add_task("evaluation_test_secret", {"validation": 4}, [letters], target="<unk>")
    half = ["evaluation_test_upper", "evaluation_test_secret"]
    seqio.MixtureRegistry.add("evaluation_test_half_secret", half, default_rate=1)
    parts = [
        "evaluation_test_plain",
        "evaluation_test_upper",
        "evaluation_test_train_only",
        "evaluation_test_no_metric",
    ]
    seqio.MixtureRegistry.add("evaluation_test_mixture", parts, default_rate=1)
    yield
    for name in (*parts, "evaluation_test_aux", LONG_NAME):
        seqio.TaskRegistry.remove(name)
    seqio.MixtureRegistry.remove("evaluation_test_mixture")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    draw = np.random.default_rng(1)
    trained, fixed = parameters.abstract(CONFIG)
    trained = jax.tree.map(lambda p: jnp.asarray(draw.normal(size=p.shape), jnp.float32), trained)
    with CheckpointWriter(str(folder)) as writer:
        writer.save(STEP, {"params": trained, "fixed": fixed}, CONFIG, {})
    return folder


def run(function, model_dir, folder, task, **more):
    arguments = {
        "checkpoint_path": str(model_dir),
        "output_dir": str(folder) if folder else None,
        "task_feature_lengths": LENGTHS,
    }
    return function(mixture_or_task_name=task, **(arguments | more))


def lines(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def test_the_metrics_count_every_example_whatever_the_batch_size(model_dir, tmp_path):
    name = "evaluation_test_plain"
    results = {size: run(evaluate, model_dir, tmp_path / str(size), name, batch_size=size) for size in (1, 7, 64)}
    for size, result in results.items():
        assert result[name]["examples"] == result[name]["scored"] == 23
        assert result[name]["letters"] == results[1][name]["letters"]
        np.testing.assert_allclose(result[name]["log_likelihood"], results[1][name]["log_likelihood"], rtol=1e-5)
        written = lines(tmp_path / str(size) / f"{name}-{STEP}.jsonl")
        assert [(line["input"], line["target"]) for line in written] == [
            (example["inputs"], example["targets"]) for example in examples(23)
        ]
        assert np.mean([len(line["prediction"]) for line in written]) == result[name]["letters"]
        np.testing.assert_allclose(
            np.mean([line["score"] for line in written]), result[name]["log_likelihood"], rtol=1e-6
        )
        assert lines(tmp_path / str(size) / f"{name}-metrics.jsonl") == [
            {"step": STEP, "split": "validation", "examples": 23} | result[name]
        ]


def test_a_mesh_and_rules_change_no_result(model_dir, tmp_path):
    """4 heads do not divide over 8 devices; with rules that leave them whole the model is used as it was trained."""
    name, mesh = "evaluation_test_plain", MeshShape(data=1, model=8)
    whole = run(evaluate, model_dir, tmp_path / "whole", name)[name]
    with pytest.raises(ValueError, match=r"axis 'heads' of size 4 does not divide over model=8; .*Rules\(axes="):
        run(evaluate, model_dir, tmp_path / "no", name, mesh=mesh)
    rules = Rules({"heads": None})
    split = run(evaluate, model_dir, tmp_path / "split", name, mesh=mesh, rules=rules)[name]
    np.testing.assert_allclose(split.pop("log_likelihood"), whole.pop("log_likelihood"), rtol=1e-5)
    assert split == whole
    said = [
        [line["prediction"] for line in lines(path)]
        for path in run(infer, model_dir, tmp_path / "infer", name, mesh=mesh, rules=rules)
        + [tmp_path / "whole" / f"{name}-{STEP}.jsonl"]
    ]
    assert said[0] == said[1]
    with pytest.raises(ValueError, match="Rules.parameters: 'R' matches no parameter"):
        run(infer, model_dir, tmp_path / "infer", name, rules=Rules(parameters={"R": {"heads": None}}))


def test_examples_that_are_cut_are_said(model_dir, tmp_path, capfd):
    run(evaluate, model_dir, tmp_path, "evaluation_test_plain", task_feature_lengths=LENGTHS | {"inputs": 4})
    cut = sum(len(VOCABULARY.encode(example["inputs"])) + 1 > 4 for example in examples(23))
    assert (
        cut
        and f"{cut} of the first 23 examples of evaluation_test_plain (validation) have more" in capfd.readouterr().err
    )


def test_a_mixture_by_tasks_beside_the_checkpoint(model_dir):
    results = run(evaluate, model_dir, None, "evaluation_test_mixture", batch_size=8, num_examples=4)
    assert set(results) == {"evaluation_test_plain", "evaluation_test_upper"}  # the others lack the split or metrics
    folder = model_dir / "inference_eval"
    for name in results:
        assert len(lines(folder / f"{name}-{STEP}.jsonl")) == results[name]["examples"] == 4
        assert list((folder / name).glob("events.out.tfevents.*"))
    for line in lines(folder / f"evaluation_test_upper-{STEP}.jsonl"):
        assert line["postprocessed_prediction"] == line["prediction"].upper()
        assert line["postprocessed_target"] == line["target"].upper()
    run(evaluate, model_dir / f"checkpoint_{STEP}", None, "evaluation_test_upper", batch_size=8)
    assert [line["examples"] for line in lines(folder / "evaluation_test_upper-metrics.jsonl")] == [4, 5]  # appended


def test_a_task_without_metrics_has_perplexity_per_target_token(model_dir, tmp_path):
    result = run(evaluate, model_dir, tmp_path, "evaluation_test_no_metric", batch_size=2)["evaluation_test_no_metric"]
    config, trained, fixed = checkpoint.restore_params(str(model_dir))
    nats, tokens = 0.0, 0
    for example in examples(5):  # each alone, without padding
        inputs, targets = (np.array([[*VOCABULARY.encode(example[name]), 1]], np.int32) for name in LENGTHS)
        before = jnp.pad(jnp.asarray(targets[:, :-1]), ((0, 0), (1, 0)))
        logits = parameters.bind(config, trained, fixed)(jnp.asarray(inputs), before)
        p = np.asarray(jax.nn.softmax(logits.astype(jnp.float32)), np.float64)
        nats -= np.log(p[0, np.arange(targets.shape[1]), targets[0]]).sum()
        tokens += targets.shape[1]
    assert result["target_tokens"] == tokens
    np.testing.assert_allclose(result["loss"], nats / tokens, rtol=1e-5)
    np.testing.assert_allclose(result["perplexity"], np.exp(nats / tokens), rtol=1e-5)
    written = lines(tmp_path / f"evaluation_test_no_metric-{STEP}.jsonl")
    assert [set(line) for line in written] == [{"input", "target", "score"}] * 5


def test_another_split_has_files_of_its_own(model_dir, tmp_path):
    for split, count in (("validation", 23), ("test", 3)):
        run(evaluate, model_dir, tmp_path, "evaluation_test_plain", split=split)
        run(infer, model_dir, tmp_path / "said", "evaluation_test_plain", split=split)
    names = {path.name for folder in (tmp_path, tmp_path / "said") for path in folder.glob("*.jsonl")}
    plain, test = "evaluation_test_plain", "evaluation_test_plain-test"
    assert names == {f"{name}-{what}.jsonl" for name in (plain, test) for what in (STEP, "metrics")}
    assert [len(lines(tmp_path / f"{name}-{STEP}.jsonl")) for name in (plain, test)] == [23, 3]
    (line,) = lines(tmp_path / f"{test}-metrics.jsonl")
    assert (line["split"], line["examples"]) == ("test", 3)


def test_a_split_without_labels_is_refused_or_left_out(model_dir, tmp_path, capfd):
    """A wrong answer and T5's placeholder for no label are both -1 to T5's metrics: 100 % right."""
    with pytest.raises(ValueError, match="split: 'validation' of evaluation_test_secret has no labels.*`infer`"):
        run(evaluate, model_dir, tmp_path, "evaluation_test_secret")
    results = run(evaluate, model_dir, tmp_path, "evaluation_test_half_secret")
    assert set(results) == {"evaluation_test_upper"}
    assert "left out, as their split 'validation' has no labels: evaluation_test_secret" in capfd.readouterr().err
    run(infer, model_dir, tmp_path, "evaluation_test_secret")
    assert len(lines(tmp_path / f"evaluation_test_secret-{STEP}.jsonl")) == 4


def test_a_long_task_name_fits_a_file_name(model_dir, tmp_path):
    run(evaluate, model_dir, tmp_path, LONG_NAME)
    names = [path.name for path in tmp_path.iterdir()]
    assert len(names) == 3 and all(name.startswith("evaluation_test_long") for name in names)


def test_infer_a_split_and_a_file_say_the_same(model_dir, tmp_path):
    (from_task,) = run(infer, model_dir, tmp_path, "evaluation_test_no_metric", batch_size=4)
    assert from_task == str(tmp_path / f"evaluation_test_no_metric-{STEP}.jsonl")
    inputs = [example["inputs"] for example in examples(5)]
    file = tmp_path / "questions.txt"
    file.write_text("".join(f"{text}\n" for text in inputs))
    (from_file,) = run(infer, model_dir, tmp_path, "evaluation_test_no_metric", input_file=str(file), batch_size=3)
    assert from_file == str(tmp_path / f"questions-{STEP}.jsonl")
    told, asked = lines(from_task), lines(from_file)
    assert [line["input"] for line in asked] == [line["input"] for line in told] == inputs
    assert [line["prediction"] for line in asked] == [line["prediction"] for line in told]
    assert [set(line) for line in asked] == [{"input", "prediction"}] * 5
    assert len({line["prediction"] for line in asked}) > 1
    assert set(told[0]) == {"input", "target", "prediction"}


def test_infer_cuts_a_long_line_but_keeps_its_end(model_dir, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("the value of the object is returned " * 20 + "\n\nname\n")
    (written,) = run(infer, model_dir, tmp_path, "evaluation_test_plain", input_file=str(file))
    assert len(lines(written)) == 3  # the empty line too: line n of the output answers line n of the input


@pytest.mark.parametrize("function, task, more, message", [
    (evaluate, "evaluation_test_aux", {}, "'evaluation_test_aux': a metric asks for 'prediction_with_aux'; greedy"),
    (evaluate, "evaluation_test_plain", {"split": "dev"}, "has no split 'dev'; it has test, validation"),
    (evaluate, "evaluation_test_plane", {}, "did you mean evaluation_test_plain"),
    (infer, "evaluation_test_plain", {"split": "dev"}, "has no split 'dev'; it has test, validation"),
    (infer, "evaluation_test_plain", {"input_file": "/nowhere.txt"}, "input_file: no such file: /nowhere.txt"),
    (evaluate, "evaluation_test_plain", {"batch_size": 0}, "batch_size: expected at least 1, got 0"),
    (evaluate, "evaluation_test_plain", {"task_feature_lengths": {"inputs": 8}}, "task_feature_lengths: expected"),
    (evaluate, "evaluation_test_plain", {"checkpoint_path": "/nowhere"}, "checkpoint path '/nowhere' does not exist"),
    (evaluate, "evaluation_test_plain", {"output_dir": "/dev/null/results"}, "cannot write to /dev/null/results"),
    (evaluate, "evaluation_test_plain", {"task_feature_lengths": {"inputs": 17, "targets": 6}}, "length 17 is more"),
    (evaluate, "evaluation_test_plain", {"task_feature_lengths": {"inputs": 6, "targets": 17}}, "max_length=16"),
])  # fmt: skip
def test_refuses(model_dir, tmp_path, function, task, more, message):
    with pytest.raises(ValueError, match=message):
        run(function, model_dir, tmp_path, task, **more)


def test_refuses_a_vocabulary_that_the_model_has_no_rows_for(tmp_path):
    config = sj.t5_1_1_tiny("V", vocab_size=VOCABULARY.vocab_size - 1, features=8, head_dim=4, encoder_layers=1)
    trained, fixed = jax.tree.map(lambda p: jnp.zeros(p.shape), parameters.abstract(config))
    with CheckpointWriter(str(tmp_path)) as writer:
        writer.save(0, {"params": trained, "fixed": fixed}, config, {})
    with pytest.raises(ValueError, match=f"has ids up to {VOCABULARY.vocab_size - 1}, the model has"):
        run(evaluate, tmp_path, tmp_path, "evaluation_test_plain")
