"""The quickstart's text, vocabulary and tasks: held out, balanced, the same in every process."""

import ast
import collections
import hashlib
import json
import pathlib
import re
import subprocess
import sys

import pytest
import seqio
import tensorflow as tf

import synthesizer_jax.tasks
from synthesizer_jax.tasks import labels, quickstart, quickstart_text, train_quickstart_vocabulary

FOLDER = pathlib.Path(quickstart.__file__).parent
FINETUNING = [task.name for task in seqio.MixtureRegistry.get("quickstart_finetune").tasks]
SPLITS = ("train", "validation")


def texts(task: str, split: str) -> list[tuple[str, str]]:
    dataset = seqio.get_mixture_or_task(task).get_dataset(None, split, shuffle=False)
    return [
        (example["inputs_pretokenized"].decode(), example["targets_pretokenized"].decode())
        for example in dataset.as_numpy_iterator()
    ]


@pytest.fixture(scope="module")
def examples() -> dict[tuple[str, str], list[tuple[str, str]]]:
    return {(task, split): texts(task, split) for task in FINETUNING for split in SPLITS}


# Text


def test_there_is_enough_prose_and_a_fifth_of_it_is_held_out():
    train, validation = (sum(map(len, quickstart_text.sentences(split))) for split in SPLITS)
    assert train > 150_000 and validation > 35_000
    assert 0.1 < validation / (train + validation) < 0.3


def test_the_text_is_sentences_without_markup_or_code():
    for split in SPLITS:
        for sentence in quickstart_text.sentences(split):
            assert not re.search(r"\*\*\w[^*]*\*\*|::=|>>>|[\n{}\\\u2018-\u201d]|  ", sentence), sentence
            assert len(sentence) < 3000
        words = [word for sentence in quickstart_text.sentences(split) for word in sentence.split()]
        assert sum(bool(re.fullmatch(r"[A-Za-z'-]+[.,:;]?", word)) for word in words) > 0.8 * len(words)


def test_no_sentence_and_no_topic_is_in_both_splits():
    train, validation = (set(quickstart_text.sentences(split)) for split in SPLITS)
    assert not train & validation
    corpus = quickstart_text.corpus()
    assert not set(corpus["train"]) & set(corpus["validation"])
    assert set(corpus["validation"]) <= set(quickstart_text.VALIDATION_TOPICS)


def test_a_line_broken_at_a_hyphen_is_joined_and_markup_is_taken_off():
    block = "* The *value* of a **reference-\n  counting** scheme [1] is “real” prose, e.g. It is."
    (line,) = quickstart_text._paragraphs(block)
    assert line == 'The value of a reference-counting scheme is "real" prose, e.g. It is.'
    assert quickstart_text._sentences("See e.g. Python here. It is good.") == ["See e.g. Python here.", "It is good."]


# Vocabulary


def test_the_vocabulary_is_small_and_has_t5s_special_ids():
    vocabulary = quickstart.VOCABULARY
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (0, 1, 2)
    assert vocabulary.vocab_size == train_quickstart_vocabulary.PIECES + 100 == 2048
    assert vocabulary.decode([vocabulary.vocab_size - 1]).strip() == "<extra_id_0>"
    assert (FOLDER / "quickstart.model").stat().st_size < 100_000


def test_unknown_characters_are_rare_and_text_comes_back():
    for split in SPLITS:
        sentences = quickstart_text.sentences(split)
        ids = [quickstart.VOCABULARY.encode(sentence) for sentence in sentences]
        assert sum(i == 2 for row in ids for i in row) < 1e-4 * sum(map(len, ids))
        words = sum(len(sentence.split()) for sentence in sentences)
        assert sum(map(len, ids)) < 2 * words
        for sentence, row in zip(sentences[:200], ids, strict=False):
            assert 2 in row or quickstart.VOCABULARY.decode(row) == sentence
    printable = "".join(map(chr, range(33, 127)))
    assert 2 not in quickstart.VOCABULARY.encode(printable)


def test_the_script_trains_the_same_model_twice():
    sentences = quickstart_text.sentences("validation")
    first, second = (train_quickstart_vocabulary.train(sentences, pieces=300) for _ in range(2))
    assert first == second
    assert str(FOLDER).encode() not in (FOLDER / "quickstart.model").read_bytes()


# Tasks


def test_the_contents_page_lists_what_importing_registers():
    new = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json, seqio, t5.data; before = seqio.TaskRegistry.names() | seqio.MixtureRegistry.names()\n"
            "import synthesizer_jax.tasks.quickstart\n"
            "print(json.dumps(sorted((seqio.TaskRegistry.names() | seqio.MixtureRegistry.names()) - before)))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    listed = synthesizer_jax.tasks.CONTENTS["synthesizer_jax.tasks.quickstart"]
    assert json.loads(new.stdout.splitlines()[-1]) == sorted(listed)


def test_tasks_use_nothing_of_the_library():
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            else:
                continue
            for name in names:
                assert f"{name}.".startswith("synthesizer_jax.tasks.") or not name.startswith(
                    ("synthesizer_jax", "jax", "flax")
                )


def test_classes_are_equally_frequent_and_examples_differ(examples):
    for (task, split), found in examples.items():
        assert len(found) == quickstart.EXAMPLES[split]
        labels = collections.Counter(target for _, target in found)
        assert set(labels) == set(quickstart.LABELS) and len(set(labels.values())) == 1, (task, labels)
        assert len(set(found)) > 0.6 * len(found)


def test_labels_are_right(examples):
    other = quickstart.other_number()
    assert len(other) == 2 * quickstart.NOUNS and other["object"] == "objects" and other["objects"] == "object"
    assert all(other[word] in (f"{word}s", word[:-1]) and other[other[word]] == word for word in other)
    for split in SPLITS:
        paragraphs = [p for topic in quickstart_text.corpus()[split].values() for p in topic]
        text = "\n".join(f" {' '.join(quickstart._words(paragraph))} " for paragraph in paragraphs)
        for inputs, target in examples["quickstart_negation", split]:
            words = inputs.removeprefix("negation ").split()
            assert f" {' '.join(words)} " in text and 8 <= len(words) <= 12
            assert any(word in quickstart.NEGATIONS for word in words) == (target == "true")
        for inputs, target in examples["quickstart_number", split]:
            sentence, word = re.fullmatch(r"number (.*): (\w+)", inputs).groups()
            assert f" {sentence} " in text and word not in sentence.split()
            assert (other[word] in sentence.split()) == (target == "true")


def test_the_word_alone_and_the_sentence_alone_do_not_tell_the_answer(examples):
    """A guess by the word that is asked for, or by each word of the sentence, is hardly better than chance."""
    found = [
        (re.fullmatch(r"number (.*): (\w+)", inputs).groups(), target == "true")
        for inputs, target in examples["quickstart_number", "train"]
    ]
    by_word = collections.defaultdict(list)
    for (_, word), label in found:
        by_word[word].append(label)
    assert sum(max(sum(labels), len(labels) - sum(labels)) for labels in by_word.values()) < 0.58 * len(found)
    by_word.clear()
    for (sentence, _), label in found:
        for word in set(sentence.split()):
            by_word[word].append(label)
    frequent = [labels for labels in by_word.values() if len(labels) > 500]
    assert frequent and all(0.4 < sum(labels) / len(labels) < 0.6 for labels in frequent)


def test_no_validation_input_is_in_training(examples):
    for task in FINETUNING:
        train, validation = ({inputs for inputs, _ in examples[task, split]} for split in SPLITS)
        assert not train & validation


def test_inputs_and_targets_are_short(examples):
    for found in examples.values():
        assert max(len(quickstart.VOCABULARY.encode(inputs)) for inputs, _ in found) < 64
        assert max(len(quickstart.VOCABULARY.encode(target)) for _, target in found) <= 3


def test_examples_are_the_same_in_every_process(examples):
    """Another process has another hash seed, so the order of sets differs there."""
    program = (
        "import hashlib, json, sys; from synthesizer_jax.tasks import quickstart as q\n"
        "made = [f(s) for f in (q.documents, q.negation_examples, q.number_examples) for s in ('train', 'validation')]\n"
        "print(hashlib.sha256(json.dumps(made).encode()).hexdigest())"
    )
    new = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    functions = (quickstart.documents, quickstart.negation_examples, quickstart.number_examples)
    made = [function(split) for function in functions for split in SPLITS]
    assert new.stdout.splitlines()[-1] == hashlib.sha256(json.dumps(made).encode()).hexdigest()


def test_accuracy_counts_an_invalid_answer_as_wrong():
    for name in FINETUNING:
        task = seqio.TaskRegistry.get(name)
        (accuracy,) = task.metric_fns
        answers = [task.postprocess_fn(text, example={}, is_target=False) for text in ("true", "false", "", "true x")]
        right = [task.postprocess_fn(text, example={}, is_target=True) for text in ("true", "true", "true", "true")]
        assert accuracy(right, answers) == {"accuracy": 25.0}
        assert accuracy(right, right) == {"accuracy": 100.0}


def test_labels_are_class_ids_and_sentences_are_texts():
    """The same examples for a classifier; "true" and "false" as ids."""
    classes = seqio.get_mixture_or_task("quickstart_negation_class").get_dataset(None, "validation", shuffle=False)
    words = seqio.get_mixture_or_task("quickstart_negation").get_dataset(None, "validation", shuffle=False)
    for one, other in zip(classes.take(50).as_numpy_iterator(), words.take(50).as_numpy_iterator(), strict=True):
        assert one["inputs"].tolist() == other["inputs"].tolist()
        assert [quickstart.LABELS[i] for i in one["targets"]] == [other["targets_pretokenized"].decode()]
    task = seqio.get_mixture_or_task("quickstart_lm")
    for split in SPLITS:
        found = [
            x["targets_pretokenized"].decode() for x in task.get_dataset(None, split, shuffle=False).as_numpy_iterator()
        ]
        assert found == quickstart_text.sentences(split)
    assert list(task.output_features) == ["targets"]


def test_a_label_vocabulary():
    vocabulary = labels.LabelVocabulary(("world", "sports", "business"))
    assert vocabulary.vocab_size == 3 and vocabulary.eos_id is None
    for number, label in enumerate(vocabulary.labels):
        assert vocabulary.encode(label) == [number] == vocabulary.encode_tf(label).numpy().tolist()
        assert vocabulary.decode([number]) == label == vocabulary.decode_tf(tf.constant([number])).numpy().decode()
    assert (
        vocabulary
        == labels.LabelVocabulary(["world", "sports", "business"])
        != labels.LabelVocabulary(("world", "sports"))
    )
    with pytest.raises(ValueError, match="label: expected one of .* got 'weather'"):
        vocabulary.encode("weather")
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected one of the labels"):
        vocabulary.encode_tf("weather")
    with pytest.raises(ValueError, match=r"labels: expected two or more, no two alike, got \('a', 'a'\)"):
        labels.LabelVocabulary(("a", "a"))


def test_span_corruption_hides_text_behind_sentinels_and_loses_none():
    lengths = {"inputs": 64, "targets": 32}
    task = seqio.TaskRegistry.get("quickstart_span_corruption")
    documents = quickstart.documents("validation")
    text = [i for document in documents for i in quickstart.VOCABULARY.encode(document["text"])]
    rebuilt = []
    for example in task.get_dataset(lengths, "validation", shuffle=False, seed=0).as_numpy_iterator():
        spans, hidden = {}, None
        assert example["inputs"][-1] == example["targets"][-1] == 1
        assert len(example["inputs"]) <= 64 and len(example["targets"]) <= 32
        for token in example["targets"][:-1]:
            if token >= 1948:
                hidden = spans.setdefault(int(token), [])
            else:
                hidden.append(int(token))
        assert list(spans) == list(range(2047, 2047 - len(spans), -1))
        for token in example["inputs"][:-1]:
            rebuilt += spans.pop(int(token)) if token >= 1948 else [int(token)]
        assert not spans
    assert rebuilt == text
