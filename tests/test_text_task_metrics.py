"""BLEU, ROUGE and perplexities of the text tasks: by hand, by other implementations, of empty answers."""

import collections
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import seqio
import tensorflow_datasets as tfds
from rouge_score import rouge_scorer
from t5.evaluation import metrics

from synthesizer_jax import data
from synthesizer_jax.tasks import cnn_dailymail, perplexity, quickstart, translation

# BLEU

REFERENCES = [
    "Ein Mann schläft auf der Bank.",
    "Zwei Hunde rennen „schnell“ durch den Schnee!",
    "Das kostet 10€ (oder 12 £).",
]
ANSWERS = ["Ein Mann sitzt auf der Bank.", "Zwei Hunde rennen „schnell“ im Schnee.", "Das kostet 10 € oder 12£ ."]


def bleu_by_hand(references, answers):
    """Papineni et al. 2002 with one reference, of texts whose words are parted by spaces."""
    matched, said = np.zeros(4), np.zeros(4)
    lengths = [sum(len(text.split()) for text in texts) for texts in (references, answers)]
    for reference, answer in zip(references, answers, strict=True):
        for n in range(1, 5):
            counts = []
            for text in (reference, answer):
                words = text.split()
                counts.append(collections.Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1)))
            matched[n - 1] += sum((counts[0] & counts[1]).values())
            said[n - 1] += sum(counts[1].values())
    brevity = min(0, 1 - lengths[0] / lengths[1])
    return 100 * math.exp(brevity + np.mean(np.log(matched / said)))


@pytest.mark.parametrize("shorter", [False, True])
def test_bleu_is_papinenis(shorter):
    """Of plain words all tokenizers and smoothings agree."""
    draw = np.random.default_rng(int(shorter))
    references = [" ".join(draw.choice(["a", "b", "c", "d"], size=20)) for _ in range(30)]
    answers = [
        " ".join(draw.choice(text.split()[: 15 if shorter else 20], size=22 - 8 * shorter)) for text in references
    ]
    expected = bleu_by_hand(references, answers)
    assert 1 < expected < 60
    assert translation.sacrebleu(references, answers)["sacrebleu"] == pytest.approx(expected, rel=1e-9)
    assert translation.t5_bleu(references, answers) == {"t5_bleu": pytest.approx(expected, rel=1e-9)}


def test_bleus_are_those_of_sacrebleus_command_line(tmp_path):
    """With its signature; the two tokenizers differ on these texts."""
    for name, texts in (("references", REFERENCES), ("answers", ANSWERS)):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts))

    def command_line(*options):
        command = [sys.executable, "-m", "sacrebleu", "references", "-i", "answers", "-m", "bleu", "-w", "6", *options]
        return json.loads(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)

    found, t5s = translation.sacrebleu(REFERENCES, ANSWERS), translation.t5_bleu(REFERENCES, ANSWERS)
    said, with_t5s_tokenizer = command_line(), command_line("--tokenize", "intl")
    assert said["score"] == pytest.approx(found["sacrebleu"], abs=1e-6)
    assert found["sacrebleu_signature"].textdata == said["signature"] and "tok:13a" in said["signature"]
    assert with_t5s_tokenizer["score"] == pytest.approx(t5s["t5_bleu"], abs=1e-6)
    assert abs(said["score"] - with_t5s_tokenizer["score"]) > 1


def test_bleu_of_empty_and_of_perfect_answers():
    for answers, expected in ((REFERENCES, 100), ([""] * 3, 0), (["  "] * 3, 0)):
        assert translation.sacrebleu(REFERENCES, answers)["sacrebleu"] == pytest.approx(expected)
        assert translation.t5_bleu(REFERENCES, answers)["t5_bleu"] == pytest.approx(expected)
    one_missing = translation.sacrebleu(REFERENCES, ["", *REFERENCES[1:]])["sacrebleu"]
    words = [7, 8, 9]  # as 13a parts them: "Bank" "." and "(" "oder" are two, "„schnell“" and "10€" are one
    assert one_missing == pytest.approx(100 * math.exp(1 - sum(words) / sum(words[1:])))


# ROUGE


def test_rouge_by_hand():
    """5 of 6 words, all said; 3 of 5 pairs, of 4 said; the longest common subsequence is all that was said."""
    found = cnn_dailymail.rouge(["The cat sat on the mat."], ["the cat on the mat"])
    expected = {"rouge1": 2 * 1 * (5 / 6) / (1 + 5 / 6), "rouge2": 2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5)}
    for name, value in {**expected, "rougeLsum": expected["rouge1"]}.items():
        assert found[name] == pytest.approx(100 * value)
    two = cnn_dailymail.rouge(["The cat sat on the mat.", "x y"], ["the cat on the mat", ""])
    assert two["rouge1"] == pytest.approx(100 * expected["rouge1"] / 2)


def test_rouge_of_sentences_in_another_order():
    """A model says no newlines. T5's metric takes what it says for one sentence, in which the order counts."""
    target, answer = "Dogs ran. Cats sat.\nOne slept.", "Cats sat. One slept. Dogs ran."
    assert cnn_dailymail.rouge([target], [answer])["rougeLsum"] == pytest.approx(100)
    assert metrics.rouge([target], [answer])["rougeLsum"] < 80
    split = rouge_scorer.RougeScorer(["rougeLsum"]).score(target.replace(". ", ".\n"), answer.replace(". ", ".\n"))
    assert split["rougeLsum"].fmeasure == 1


def test_rouge_1_and_2_are_t5s():
    """T5's mean is that of draws with replacement: of one example it is exact."""
    draw = np.random.default_rng(0)
    for _ in range(20):
        target, answer = (
            " ".join(draw.choice(["Ab", "cd.", "ef", "gh!"], size=draw.integers(1, 30))) for _ in range(2)
        )
        found, t5s = cnn_dailymail.rouge([target], [answer]), metrics.rouge([target], [answer])
        assert [found[name] for name in ("rouge1", "rouge2")] == pytest.approx([t5s["rouge1"], t5s["rouge2"]])


def test_rouge_of_empty_and_of_perfect_answers():
    target = "Dogs ran (fast).\nCats sat. No."
    for answer, expected in ((target, 100), (target.replace("\n", " "), 100), ("", 0), (" \n ", 0), ("?!", 0)):
        found = cnn_dailymail.rouge([target], [answer])
        assert [found[name] for name in cnn_dailymail.ROUGE] == pytest.approx([expected] * 3)
    assert "no stemming" in found["rouge_signature"].textdata


def test_sentences():
    text = (
        'He said: "Stop." Then he left.\r\n\nU.S. forces won! Why? Mr. J. Smith paid 3.5 dollars at 2 a.m. on Monday.'
    )
    assert cnn_dailymail.sentences(text) == [
        'He said: "Stop."',
        "Then he left.",
        "U.S. forces won!",
        "Why?",
        "Mr. J. Smith paid 3.5 dollars at 2 a.m. on Monday.",
    ]


def test_most_sentences_of_highlights_are_found_without_their_newlines(shared):
    builder = tfds.builder_from_directory(str(shared / "tfds/cnn_dailymail/3.4.0"))
    ends, found = 0, 0
    for row in builder.as_dataset("train").as_numpy_iterator():
        lines = [line.strip() for line in row["highlights"].decode().split("\n")]
        places = [
            {sum(len(part) + 1 for part in parts[:end]) for end in range(1, len(parts))}
            for parts in (lines, cnn_dailymail.sentences(" ".join(lines)))
        ]
        ends, found = ends + len(places[0]), found + len(places[0] & places[1])
    assert ends > 200 and found > 0.9 * ends


# Perplexities; the quickstart's vocabulary is of the same kind as T5's

VOCABULARY = quickstart.VOCABULARY


def counted(text, length=1000, **example):
    ids = VOCABULARY.encode(text)[: length - 1] + [1]
    row = {"targets": np.asarray(ids, np.int32), "targets_pretokenized": text.encode()} | example
    return perplexity.scored(text, example=row, is_target=True, vocabulary=VOCABULARY)


def test_words_and_subwords_with_the_end():
    assert counted("the value of it")["words"] == 5
    for text in ("it , however , is -- good .", "Ünknown ☃☃ 字 x", "a\u00a0b", "  a  b ", "a\r\nb", "tab\there"):
        found = counted(text)
        assert found["words"] == len(text.split()) + 1
        assert found["subwords"] == len(VOCABULARY.encode(text)) + 1 and not found["cut"]
    assert counted("") == {"words": 1, "subwords": 1, "cut": 0}
    assert perplexity.scored("said", example={}, is_target=False) == "said"


def test_a_cut_example_counts_the_words_that_begin_before_the_cut():
    text = "documentation documentation documentation"
    pieces = [VOCABULARY.tokenizer.id_to_piece(i) for i in VOCABULARY.encode(text)]
    starts = [place for place, piece in enumerate(pieces) if piece.startswith("▁")]
    assert len(starts) == 3 and starts[1] > 1  # words of several pieces
    for length in range(2, len(pieces) + 3):
        found = counted(text, length)
        assert found["words"] == sum(start < length - 1 for start in starts) + 1
        assert found["subwords"] == min(length, len(pieces) + 1) and found["cut"] == (length < len(pieces) + 1)


def test_texts_that_were_joined_count_each_end():
    ids = [*VOCABULARY.encode("the value"), 1, *VOCABULARY.encode("it is good"), 1, *VOCABULARY.encode("or")]
    example = {"targets": np.asarray(ids, np.int32)}
    found = perplexity.scored(VOCABULARY.decode(ids), example=example, is_target=True, vocabulary=VOCABULARY)
    assert found == {"words": 8, "subwords": len(ids), "cut": 0}


def test_perplexities_are_of_all_texts_together():
    """Every word of probability 1/8, whatever its pieces: 2^(3 * words)."""
    targets = [{"words": 3, "subwords": 6, "cut": 0}, {"words": 5, "subwords": 6, "cut": 1}]
    found = perplexity.perplexities(targets, [3 * np.log(1 / 8), 5 * np.log(1 / 8)])
    assert found["perplexity_per_word"] == pytest.approx(8)
    assert found["perplexity_per_subword"] == pytest.approx(4)
    assert (found["words"], found["subwords"], found["examples_cut"]) == (8, 12, 1)
    assert perplexity.perplexities(targets[:1], [-3000.0])["perplexity_per_word"] == math.inf


def test_words_of_every_sentence_of_lm1b(shared, monkeypatch):
    """What white space parts; T5's pieces tell the same."""
    monkeypatch.setenv("SYNTHESIZER_JAX_VOCAB", str(shared / "data/vocab/t5/spiece.model"))
    seqio.set_tfds_data_dir_override(str(shared / "tfds"))
    try:
        rows = data.get_mixture_or_task("lm1b").get_dataset({"targets": 256}, "test", shuffle=False)
        texts = [(row["targets_pretokenized"].decode(), row) for row in rows.as_numpy_iterator()]
    finally:
        seqio.set_tfds_data_dir_override(None)
    real = (shared / "data/lm1b/test_sentences.txt").read_text().split("\n")
    vocabulary = data.get_mixture_or_task("lm1b").output_features["targets"].vocabulary
    texts += [(text, {"targets": [*vocabulary.encode(text), 1], "targets_pretokenized": text}) for text in real if text]
    assert len(texts) == 2995 + 50
    for text, row in texts:
        pieces = [vocabulary.tokenizer.id_to_piece(int(i)) for i in row["targets"]]
        assert "".join(pieces).count("▁") == len(text.split())  # what counts where a text is cut, or joined to others
        assert perplexity.scored(text, example=row, is_target=True)["words"] == len(text.split()) + 1, text


def test_tasks_name_these_metrics():
    for name, expected in (
        ("multi30k_en_de", ["sacrebleu", "t5_bleu"]),
        ("cnn_dailymail", ["rouge"]),
        ("ag_news", ["accuracy"]),
        ("movie_reviews_class", ["accuracy"]),
        ("lm1b", ["perplexities"]),
        ("c4_lm", ["perplexities"]),
    ):
        task = data.get_mixture_or_task(name)
        assert [function.__name__ for function in task.metric_fns] == expected


def test_an_answer_that_is_no_label_is_wrong():
    for name, labels in (("ag_news", ("World", "Sci/Tech", "Sports")), ("movie_reviews", ("negative", "positive"))):
        task = data.get_mixture_or_task(name)
        (accuracy,) = task.metric_fns
        said = [*labels, "", "sports", "positive negative"]
        right = [*labels, labels[0], labels[0], labels[0]]
        classes = [[task.postprocess_fn(t, example={}, is_target=True) for t in texts] for texts in (right, said)]
        assert accuracy(*classes) == {"accuracy": pytest.approx(100 * len(labels) / len(said))}
