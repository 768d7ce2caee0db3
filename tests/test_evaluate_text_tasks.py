"""Tasks evaluated with random parameters: translation, a language model, a classifier, with the tasks' own metrics."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seqio
from sacrebleu.metrics import BLEU

import synthesizer_jax as sj
from synthesizer_jax.__main__ import main
from synthesizer_jax.evaluation import evaluate
from synthesizer_jax.models import parameters
from synthesizer_jax.training.checkpoint import CheckpointWriter

STEP = 3
SIZES = {"vocab_size": 32128, "features": 8, "mlp_features": 8, "head_dim": 4, "heads": 2, "dropout_rate": 0.0}
MODELS = {
    "translation": sj.t5_tiny("R+V", 64, encoder_layers=1, decoder_layers=1, **SIZES),
    "lm": sj.lm_tiny("R+V", 64, decoder_layers=1, **SIZES),
    "classifier": sj.classifier_tiny(2, "FR+V", 32, encoder_layers=1, **SIZES),
}


pytestmark = pytest.mark.usefixtures("real_data")


@pytest.fixture
def model(request, tmp_path):
    """A checkpoint of the kind of model, with parameters drawn at random."""
    config = MODELS[request.param]
    draw = np.random.default_rng(1)
    trained, fixed = jax.tree.map(
        lambda p: jnp.asarray(draw.normal(size=p.shape), jnp.float32), parameters.abstract(config)
    )
    with CheckpointWriter(str(tmp_path / "run")) as writer:
        writer.save(STEP, {"params": trained, "fixed": fixed}, config, {})
    return {"checkpoint_path": str(tmp_path / "run"), "output_dir": str(tmp_path)}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("model", ["translation"], indirect=True)
def test_translation_with_its_signature_on_screen_and_in_files(model, tmp_path, capsys):
    values = {
        "CHECKPOINT_PATH": f'"{model["checkpoint_path"]}"',
        "OUTPUT_DIR": f'"{tmp_path}"',
        "MIXTURE_OR_TASK_NAME": '"multi30k_en_de"',
        "TASK_FEATURE_LENGTHS": '{"inputs": 64, "targets": 64}',
        "BATCH_SIZE": "8",
        "evaluate.num_examples": "11",
    }
    flags = [f"--gin.{name}={value}" for name, value in values.items()]
    assert main(["evaluate", "--gin_file=runs/evaluate.gin", *flags]) == 0
    said = capsys.readouterr().out
    written = lines(tmp_path / f"multi30k_en_de-{STEP}.jsonl")
    assert len(written) == 11 and written[0]["input"].startswith("translate English to German: ")
    score = BLEU().corpus_score([line["prediction"] for line in written], [[line["target"] for line in written]])
    (found,) = lines(tmp_path / "multi30k_en_de-metrics.jsonl")
    assert list(found) == ["step", "split", "examples", "sacrebleu", "sacrebleu_signature", "t5_bleu"]
    assert found["sacrebleu"] == pytest.approx(score.score)
    assert found["sacrebleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert f"multi30k_en_de  sacrebleu_signature  {found['sacrebleu_signature']}" in said


@pytest.mark.parametrize("model", ["lm"], indirect=True)
def test_perplexity_per_word_and_per_subword_of_a_language_model(model, tmp_path):
    """From the scores in the file of examples; per subword it is the evaluation's own perplexity."""
    results = evaluate(
        mixture_or_task_name="lm1b", task_feature_lengths={"targets": 32}, split="test", num_examples=50, **model
    )
    found, written = results["lm1b"], lines(tmp_path / f"lm1b-test-{STEP}.jsonl")
    assert lines(tmp_path / "lm1b-test-metrics.jsonl") == [{"step": STEP, "split": "test", "examples": 50} | found]
    assert 0 < found["examples_cut"] < 50 and found["subwords"] == found["target_tokens"]
    assert math.log(found["perplexity_per_subword"]) == pytest.approx(found["loss"], rel=1e-6)
    nats, words = -sum(line["score"] for line in written), found["words"]
    assert math.log(found["perplexity_per_word"]) == pytest.approx(nats / words, rel=1e-6)
    assert words < sum(len(line["target"].split()) + 1 for line in written)


@pytest.mark.parametrize("model", ["lm"], indirect=True)
def test_perplexity_of_joined_texts(model, tmp_path):
    """Words and ends of the whole text, however it is cut."""
    results = evaluate(mixture_or_task_name="tiny_shakespeare", task_feature_lengths={"targets": 64}, **model)
    found = results["tiny_shakespeare"]
    source = seqio.TaskRegistry.get("tiny_shakespeare").source
    texts = [row["text"].decode() for row in source.get_dataset("validation", shuffle=False).as_numpy_iterator()]
    assert found["words"] == sum(len(text.split()) + 1 for text in texts)
    assert found["subwords"] == found["target_tokens"] and found["examples_cut"] == 0
    assert math.log(found["perplexity_per_subword"]) == pytest.approx(found["loss"], rel=1e-6)


@pytest.mark.parametrize("model", ["classifier"], indirect=True)
def test_accuracy_of_a_classifier(model, tmp_path):
    results = evaluate(mixture_or_task_name="movie_reviews_class", task_feature_lengths={"inputs": 32}, **model)
    written = lines(tmp_path / f"movie_reviews_class-{STEP}.jsonl")
    assert len(written) == 1066 and {line["target"] for line in written} == {"negative", "positive"}
    right = [line["prediction"] == line["target"] for line in written]
    assert 0 < sum(right) < 1066
    assert results["movie_reviews_class"] == {"accuracy": pytest.approx(100 * sum(right) / 1066)}
