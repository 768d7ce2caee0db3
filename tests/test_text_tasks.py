"""C4, translation, LM1B, summaries, news, reviews: formats by hand, every row there, held-out rows, what is refused."""

import gzip
import itertools
import json
import re
import subprocess
import sys

import pytest
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from synthesizer_jax import data, tasks
from synthesizer_jax.models.batch import DECODER_ONLY, ENCODER_DECODER, ENCODER_ONLY
from synthesizer_jax.tasks import (
    ag_news,
    c4,
    classification,
    cnn_dailymail,
    lm1b,
    lm_text,
    movie_reviews,
    multi30k,
    sources,
    wmt14,
)

MODULES = (c4, wmt14, multi30k, lm1b, cnn_dailymail, ag_news, movie_reviews, lm_text)
NAMES = [name for module in MODULES for name in tasks.CONTENTS[module.__name__]]


def run_program(program, *arguments, **options):
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_contents_page_lists_what_importing_registers():
    program = (
        "import importlib, json, sys, seqio\n"
        "before, registered = set(), {}\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    registered[module] = sorted(seqio.TaskRegistry.names() - before)\n"
        "    before = set(seqio.TaskRegistry.names())\n"
        "print(json.dumps(registered))"
    )
    modules = [module.__name__ for module in MODULES]
    assert run_program(program, *modules) == {name: sorted(tasks.CONTENTS[name]) for name in modules}


# Formats, written by hand; the texts are ours

EN_DE = {"en": "That is good.", "de": "Das ist gut."}
EN_FR = {"en": "That is good.", "fr": "C’est bien."}
NEWS = {"title": "Rates rise", "description": "Banks\\ fall.", "label": 2}
FORMATS = {
    "c4_span_corruption": ({"text": "Ä b"}, {"inputs": "", "targets": "Ä b"}),
    "c4_prefix_lm": ({"text": "Ä b"}, {"inputs": "", "targets": "Ä b"}),
    "c4_lm": ({"text": "Ä b"}, {"targets": "Ä b"}),
    "wmt14_en_de": (EN_DE, {"inputs": "translate English to German: That is good.", "targets": "Das ist gut."}),
    "wmt14_en_fr": (EN_FR, {"inputs": "translate English to French: That is good.", "targets": "C’est bien."}),
    "wmt_t2t_en_de": (EN_DE, {"inputs": "translate English to German: That is good.", "targets": "Das ist gut."}),
    "multi30k_en_de": (EN_DE, {"inputs": "translate English to German: That is good.", "targets": "Das ist gut."}),
    "multi30k_de_en": (EN_DE, {"inputs": "translate German to English: Das ist gut.", "targets": "That is good."}),
    "multi30k_en_fr": (EN_FR, {"inputs": "translate English to French: That is good.", "targets": "C’est bien."}),
    "multi30k_fr_en": (EN_FR, {"inputs": "translate French to English: C’est bien.", "targets": "That is good."}),
    "lm1b": ({"text": "It is , however , good ."}, {"targets": "It is , however , good ."}),
    "cnn_dailymail": (
        {"article": "(CNN)A dog ran.", "highlights": "Dog runs.\nIt is fast.", "id": "7", "publisher": "cnn"},
        {"inputs": "summarize: (CNN)A dog ran.", "targets": "Dog runs.\nIt is fast."},
    ),
    "ag_news": (NEWS, {"inputs": "ag_news text: Rates rise Banks\\ fall.", "targets": "Business"}),
    "ag_news_class": (NEWS | {"title": "", "label": 3}, {"inputs": "Banks\\ fall.", "targets": "Sci/Tech"}),
    "movie_reviews": (
        {"text": "a gem .", "label": 1},
        {"inputs": "movie_reviews text: a gem .", "targets": "positive"},
    ),
    "movie_reviews_class": ({"text": "dull .", "label": 0}, {"inputs": "dull .", "targets": "negative"}),
    "imdb_reviews": (
        {"text": "Fine.<br /><br />Go! I <b>did</b> .<br>", "label": 1},
        {"inputs": "imdb_reviews text: Fine. Go! I <b>did</b> .", "targets": "positive"},
    ),
    "imdb_reviews_class": ({"text": "Dull", "label": 0}, {"inputs": "Dull", "targets": "negative"}),
    "wikitext2": ({"text": "= Ä ="}, {"targets": "= Ä ="}),
    "wikitext2_span_corruption": ({"text": "= Ä ="}, {"inputs": "", "targets": "= Ä ="}),
    "tiny_shakespeare": ({"text": "ALL:\nGo."}, {"targets": "ALL:\nGo."}),
    "tiny_shakespeare_span_corruption": ({"text": "ALL:\nGo."}, {"inputs": "", "targets": "ALL:\nGo."}),
}


@pytest.mark.parametrize("name", NAMES)
def test_formats(name):
    row, expected = FORMATS[name]
    task = seqio.TaskRegistry.get(name)
    (example,) = task.preprocessors[0](tf.data.Dataset.from_tensors(row)).as_numpy_iterator()
    assert {key: text.decode() for key, text in example.items()} == expected
    assert set(task.output_features) == set(expected)


def test_labels_are_tfdss_in_their_order(shared, tmp_path):
    builder = tfds.builder_from_directory(str(shared / "tfds/ag_news_subset/1.0.0"))
    assert tuple(builder.info.features["label"].names) == ag_news.LABELS
    imdb = tfds.builder("imdb_reviews/plain_text", data_dir=str(tmp_path))
    assert imdb.info.features["label"].names == ["neg", "pos"] and movie_reviews.LABELS == ("negative", "positive")
    assert str(imdb.version) == "1.0.0"


def test_a_label_that_is_none_is_an_error():
    rows = tf.data.Dataset.from_tensors({"text": "a", "label": -1})
    made = classification.labelled(rows, prefix="", labels=("a", "b"), text=lambda example: example["text"])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"indices = -1 is not in \[0, 2\)"):
        list(made)


# Every row is there, and none of training is among the held-out ones

TFDS = {
    "c4_lm": "c4/en/2.2.0",
    "wmt14_en_de": "wmt14_translate/de-en/1.0.0",
    "wmt14_en_fr": "wmt14_translate/fr-en/1.0.0",
    "wmt_t2t_en_de": "wmt_t2t_translate/de-en/1.0.0",
    "lm1b": "lm1b/1.1.0",
    "cnn_dailymail": "cnn_dailymail/3.4.0",
    "ag_news": "ag_news_subset/1.0.0",
}
FILES = {
    "multi30k_en_de": {"train": 29000, "validation": 1014, "test": 1000},  # as Multi30k's paper has them
    "multi30k_fr_en": {"train": 29000, "validation": 1014, "test": 1000},
    "movie_reviews": {"train": 8530, "validation": 1066, "test": 1066},  # as Hugging Face's rotten_tomatoes
}


def rows_of(name, split):
    """As bytes that tell rows apart."""
    dataset = seqio.TaskRegistry.get(name).source.get_dataset(split, shuffle=False)
    return [b"|".join(str(value).encode() for value in row.values()) for row in dataset.as_numpy_iterator()]


@pytest.mark.parametrize("name", TFDS)
def test_every_row_of_tfds_is_in_one_split(real_data, name):
    info = tfds.builder_from_directory(str(real_data / "tfds" / TFDS[name])).info
    found = {split: rows_of(name, split) for split in seqio.TaskRegistry.get(name).splits}
    for split, rows in found.items():
        assert len(rows) == seqio.TaskRegistry.get(name).num_input_examples(split)
    counts = {split: len(rows) for split, rows in found.items()}
    if "validation" not in info.splits:
        assert counts["validation"] > 0.0099 * counts["train"]
        assert not set(found["train"]) & set(found["validation"])
        counts = {"train": counts["train"] + counts["validation"], "test": counts["test"]}
    assert counts == {split: info.splits[split].num_examples for split in info.splits}


@pytest.mark.parametrize("name", FILES)
def test_every_row_of_files_is_in_one_split(real_data, name):
    found = {split: rows_of(name, split) for split in FILES[name]}
    assert {split: len(rows) for split, rows in found.items()} == FILES[name]
    if name == "movie_reviews":
        assert len(set(itertools.chain(*found.values()))) == 2 * 5331


def test_reviews_are_split_where_hugging_face_splits_them(tmp_path):
    """Lines 1 to 80 of 100 are for training, then 10 and 10; the classes alternate."""
    negative, positive = (tmp_path / name for name in ("neg", "pos"))
    negative.write_bytes(b"".join(b"bad %d \r\n" % number for number in range(100)) + b"bad 7\n")
    positive.write_bytes(b"".join(b"d\xe9j\xe0 \x96 vu %d .\n" % number for number in range(100)))  # Windows' code page
    examples = movie_reviews.read_sentences(negative, positive)
    parts = {split: movie_reviews.part(split, examples) for split in ("train", "validation", "test")}
    for split, (start, stop) in {"train": (0, 80), "validation": (80, 90), "test": (90, 100)}.items():
        pairs = [
            ({"text": f"bad {i}", "label": 0}, {"text": f"déjà – vu {i} .", "label": 1}) for i in range(start, stop)
        ]
        assert parts[split] == [example for pair in pairs for example in pair]


def test_reviews_of_unequal_classes_are_all_there(tmp_path):
    negative, positive = (tmp_path / name for name in ("neg", "pos"))
    negative.write_text("".join(f"bad {number}\n" for number in range(10)))
    positive.write_text("".join(f"gut – {number}\n" for number in range(50)))
    examples = movie_reviews.read_sentences(negative, positive)
    parts = [movie_reviews.part(split, examples) for split in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [48, 6, 6]
    assert sorted(e["text"] for part in parts for e in part) == sorted(e["text"] for e in examples)


# Multi30k's files


def written(path, content):
    with gzip.open(path, "wb") as file:
        file.write(content)
    return path


def test_pairs_of_lines(tmp_path):
    """Only a newline ends a line, and an empty line keeps its place."""
    english = written(tmp_path / "a.en.gz", "One\u2028two\r\n\nThree\rfour".encode())
    german = written(tmp_path / "a.de.gz", "\ufeffEins\u0085zwei\n \nDrei – vier\n".encode())
    assert multi30k.read_pairs("en", "de", english, german) == [
        {"en": "One\u2028two", "de": "Eins\u0085zwei"},
        {"en": "", "de": ""},
        {"en": "Three\rfour", "de": "Drei – vier"},
    ]


def test_unequal_or_broken_files_are_refused(tmp_path):
    english = written(tmp_path / "a.en.gz", b"One\nTwo\n")
    german = written(tmp_path / "a.de.gz", b"Eins\nZwei\nDrei\n")
    with pytest.raises(ValueError, match=r"expected as many lines in .*a.en.gz as in .*a.de.gz, got 2 and 3; get both"):
        multi30k.read_pairs("en", "de", english, german)
    german.write_bytes(german.read_bytes()[:-6])
    with pytest.raises(ValueError, match="a.de.gz: expected a whole gz file, got: .*; get it anew"):
        multi30k.read_pairs("en", "de", english, german)
    german.write_text("no gz")
    with pytest.raises(ValueError, match="a.de.gz: expected a whole gz file, got: Not a gzipped file"):
        multi30k.read_pairs("en", "de", english, german)


# T5's own tasks over the same rows

BESIDE_T5 = """
import json, sys
import numpy as np, seqio, t5.data
vocabulary, folder = sys.argv[1:]
sys.modules["t5.data.utils"].DEFAULT_SPM_PATH = vocabulary
import t5.data.tasks
from synthesizer_jax.tasks import c4, cnn_dailymail, wmt14
seqio.set_tfds_data_dir_override(folder)
PAIRS = {"c4_span_corruption": "c4_v220_span_corruption", "c4_prefix_lm": "c4_v220_prefix_lm",
         "cnn_dailymail": "cnn_dailymail_v002", "wmt14_en_de": "wmt14_ende_v003", "wmt14_en_fr": "wmt14_enfr_v003",
         "wmt_t2t_en_de": "wmt_t2t_ende_v003"}
count_of = lambda name: 2000 if name.startswith("c4") else 200
counts = {}
for name, theirs in PAIRS.items():
    for split in ("train", "validation"):
        options = dict(sequence_length={"inputs": 512, "targets": 114}, split=split, seed=7, try_in_mem_cache=False)
        options["shuffle"] = name.startswith("c4")
        ours, other = (seqio.TaskRegistry.get(n).get_dataset(**options).take(count_of(name)) for n in (name, theirs))
        count = 0
        for one, two in zip(ours.as_numpy_iterator(), other.as_numpy_iterator(), strict=True):
            assert one.keys() == two.keys(), (name, list(one), list(two))
            for key in one:
                assert np.array_equal(one[key], two[key]), (name, split, count, key)
            count += 1
        counts[f"{name} {split}"] = count
print(json.dumps(counts))
"""


def test_examples_are_t5s_own(shared):
    """Tokens and texts: all documents of C4, with the same noise from the same seed, and the others' first rows."""
    environment = {"SYNTHESIZER_JAX_VOCAB": str(shared / "data/vocab/t5/spiece.model")}
    counts = run_program(
        BESIDE_T5,
        environment["SYNTHESIZER_JAX_VOCAB"],
        shared / "tfds",
        env={"PATH": "", "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"} | environment,
    )
    assert counts.pop("c4_span_corruption train") > 700 and counts.pop("c4_prefix_lm train") > 1000
    assert len(counts) == 10 and min(counts.values()) >= 50 and counts["wmt14_en_de train"] == 200


# What is not there


def test_missing_data_is_an_error_at_once(tmp_path):
    """In a process of its own, as sources remember where data was found; sooner than any retry of a download."""
    program = (
        "import importlib, json, sys, time, seqio\n"
        "seqio.set_tfds_data_dir_override(sys.argv[1])\n"
        "for module in sys.argv[2:]: importlib.import_module(module)\n"
        "start, said = time.monotonic(), {}\n"
        "for name in seqio.TaskRegistry.names():\n"
        "    try: seqio.TaskRegistry.get(name).source.get_dataset('train')\n"
        "    except FileNotFoundError as error: said[name] = str(error)\n"
        "print(json.dumps([time.monotonic() - start, said]))"
    )
    seconds, said = run_program(program, tmp_path, *(module.__name__ for module in MODULES))
    assert sorted(said) == sorted(NAMES)
    assert seconds < 10
    for name, text in said.items():
        from_files = name.startswith(("multi30k", "movie", "wikitext2", "tiny"))
        expected = (
            "--data_dir (SYNTHESIZER_JAX_DATA) is not given: the folder that has" if from_files else "with: tfds build "
        )
        assert expected in text, (name, text)


def test_files_that_are_not_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SYNTHESIZER_JAX_DATA", str(tmp_path))
    for name, text in (
        ("multi30k_fr_en", r"no multi30k/train.fr.gz, multi30k/train.en.gz in .*; get data/task1/raw"),
        ("movie_reviews", r"no movie_reviews/rt-polarity.neg, movie_reviews/rt-polarity.pos in .*; unpack sentence"),
        ("wikitext2", r"no wikitext-2-raw/wiki.train.raw in .* \(--data_dir, SYNTHESIZER_JAX_DATA\); unpack"),
        ("tiny_shakespeare", r"no tinyshakespeare/input.txt in .*; get data/tinyshakespeare/input.txt of https"),
    ):
        assert re.search(text, seqio.TaskRegistry.get(name).source.missing("train"))
    file = sources.Files({"train": ["a.txt"]}, print, "ask me")
    with pytest.raises(FileNotFoundError, match=r"no a.txt in .* \(--data_dir, SYNTHESIZER_JAX_DATA\); ask me"):
        file.get_dataset("train")


# Batches

KINDS = {
    "c4_span_corruption": (ENCODER_DECODER, {"inputs": 128, "targets": 32}),
    "c4_lm": (DECODER_ONLY, {"targets": 128}),
    "wmt14_en_fr": (ENCODER_DECODER, {"inputs": 128, "targets": 128}),
    "multi30k_de_en": (ENCODER_DECODER, {"inputs": 64, "targets": 64}),
    "lm1b": (DECODER_ONLY, {"targets": 128}),
    "cnn_dailymail": (ENCODER_DECODER, {"inputs": 256, "targets": 64}),
    "ag_news_class": (ENCODER_ONLY, {"inputs": 64}),
    "movie_reviews_class": (ENCODER_ONLY, {"inputs": 64}),
    "tiny_shakespeare": (DECODER_ONLY, {"targets": 64}),
}


@pytest.mark.parametrize("name", KINDS)
def test_batches_for_its_kind_of_model(real_data, name):
    keys, lengths = KINDS[name]
    packed = bool(keys.packing)
    with data.TrainBatches(name, lengths, 4, keys=keys, pack=packed) as batches:
        one = next(batches)
    assert {key: rows.shape for key, rows in one.items()} == keys.shapes(4, lengths, packed=packed)
    if keys == ENCODER_ONLY:
        assert set(one["labels"]) <= set(range(4 if name == "ag_news_class" else 2))
    rows = sum(real for _, real in data.eval_batches(name, lengths, 64, keys=keys))
    whole = lengths | ({"targets": 1} if keys == ENCODER_ONLY else {})
    task = seqio.TaskRegistry.get(name)
    expected = sum(1 for _ in task.get_dataset(whole, "validation", shuffle=False, seed=0).as_numpy_iterator())
    assert rows == expected > 0
    if "cnn" in name or "class" in name or name == "lm1b":
        assert rows == task.num_input_examples("validation")
