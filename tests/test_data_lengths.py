"""Examples that are cut are counted and said; rows that are made of the very lengths are not."""

import functools

import numpy as np
import pytest
import sentencepiece
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds
from t5.data import preprocessors

import synthesizer_jax.tasks.quickstart  # noqa: F401  registers the tasks
from synthesizer_jax import data
from synthesizer_jax.data import lengths as lengths_module

TOKENS = seqio.Feature(vocabulary=seqio.PassThroughVocabulary(200, eos_id=1), add_eos=True)
BARE = seqio.Feature(vocabulary=seqio.PassThroughVocabulary(200, eos_id=1), add_eos=False)
INPUTS, TARGETS = (3, 9, 10, 11, 25), (5, 5, 7, 2, 1)  # tokens of the examples, without the end of the sequence


def examples(split, shuffle_files, seed=None):
    """INPUTS and TARGETS; of "many" 2,000 examples, of which each 10th has 12 tokens and the others 4."""
    if split == "many":
        numbers = tf.data.Dataset.range(2000)
        return numbers.map(lambda i: row(tf.where(i % 10 == 0, 12, 4), 2))
    return tf.data.Dataset.from_tensor_slices((list(INPUTS), list(TARGETS))).map(row)


def row(inputs, targets):
    return {"inputs": tf.fill([inputs], 7), "targets": tf.fill([targets], 8)}


def add(name, steps, features):
    source = seqio.FunctionDataSource(examples, ("train", "many"))
    seqio.TaskRegistry.add(name, source=source, preprocessors=steps, output_features=features)


after_trim = seqio.preprocessors.append_eos_after_trim
add("lengths_plain", [after_trim], {"inputs": TOKENS, "targets": TOKENS})
add("lengths_partial", [functools.partial(after_trim)], {"inputs": TOKENS, "targets": TOKENS})
add("lengths_trimmed_last", [seqio.preprocessors.append_eos], {"inputs": TOKENS, "targets": TOKENS})
add("lengths_without_end", [after_trim], {"inputs": BARE, "targets": TOKENS})
add(
    "lengths_divided",
    [
        functools.partial(preprocessors.rekey, key_map={"targets": "inputs"}),
        functools.partial(preprocessors.reduce_concat_tokens, batch_size=3),
        preprocessors.split_tokens_to_targets_length,
        after_trim,
    ],
    {"targets": TOKENS},
)
add("lengths_label", [after_trim], {"inputs": TOKENS, "targets": BARE})
seqio.MixtureRegistry.add("lengths_mixture", ["lengths_plain", "lengths_without_end"], default_rate=1)


def cut(name, lengths, **options):
    return [(c.task, c.feature, c.seen, c.longer, c.longest) for c in data.cut_examples(name, lengths, **options)]


@pytest.mark.parametrize("name", ["lengths_plain", "lengths_partial", "lengths_trimmed_last"])
@pytest.mark.parametrize(
    "lengths, expected",
    [
        # With the end of the sequence inputs have 4, 10, 11, 12, 26 tokens and targets 6, 6, 8, 3, 2.
        ({"inputs": 10, "targets": 8}, [("inputs", 5, 3, 26)]),
        ({"inputs": 25, "targets": 5}, [("inputs", 5, 1, 26), ("targets", 5, 3, 8)]),
        ({"inputs": 26, "targets": 8}, []),
    ],
)
def test_examples_with_more_tokens_than_the_length_are_counted(name, lengths, expected):
    assert cut(name, lengths) == [(name, *found) for found in expected]


def test_what_is_kept_is_what_a_row_has():
    """The counts agree with what training reads: an example that is not counted comes whole."""
    kept = data.task_dataset("lengths_plain", {"inputs": 10, "targets": 8}, split="train", shuffle=False)
    assert [len(x["inputs"]) for x in kept.as_numpy_iterator()] == [4, 10, 10, 10, 10]


def test_no_end_is_counted_where_none_is_added():
    assert cut("lengths_without_end", {"inputs": 11, "targets": 8}) == [("lengths_without_end", "inputs", 5, 1, 25)]
    assert cut("lengths_label", {"inputs": 12}) == [("lengths_label", "inputs", 5, 1, 26)]


def test_each_task_of_a_mixture_is_counted():
    found = cut("lengths_mixture", {"inputs": 10, "targets": 8})
    assert found == [("lengths_plain", "inputs", 5, 3, 26), ("lengths_without_end", "inputs", 5, 2, 25)]


@pytest.mark.parametrize("length", [4, 7, 12, 30])
def test_text_that_is_divided_into_rows_is_not_cut(length):
    assert cut("lengths_divided", {"targets": length}) == []


@pytest.mark.parametrize("lengths", [{"inputs": 64, "targets": 32}, {"inputs": 33, "targets": 11}])
def test_span_corruption_is_not_cut(lengths):
    assert cut("quickstart_span_corruption", lengths) == []


def test_a_thousand_examples_are_looked_at_and_fewer_where_they_are_slow(monkeypatch):
    lengths = {"inputs": 12, "targets": 5}
    assert cut("lengths_plain", lengths, split="many") == [("lengths_plain", "inputs", 1000, 100, 13)]
    monkeypatch.setattr(lengths_module, "SECONDS", 0.0)
    assert cut("lengths_plain", lengths, split="many", seed=1) == [("lengths_plain", "inputs", 32, 4, 13)]


def test_what_is_said():
    (warning,) = data.cut_examples("lengths_plain", {"inputs": 12, "targets": 5}, split="many")
    assert str(warning) == (
        "warning: task_feature_lengths: 100 of the first 1,000 examples of lengths_plain (many) have more than 12 "
        'tokens of "inputs" (longest 13) and are cut; {"inputs": 13} keeps all of these'
    )


def test_targets_too_short_for_span_corruption():
    """64 inputs are 60 tokens, a sentinel for each of 3 spans and the end: of 70 tokens 10 are noise, so 14 targets."""
    with pytest.raises(
        ValueError, match=r"'quickstart_span_corruption' with .*'targets': 7}: Expected targets length .*14\)"
    ):
        data.cut_examples("quickstart_span_corruption", {"inputs": 64, "targets": 7})


def test_no_room_for_a_token():
    with pytest.raises(ValueError, match=r'lengths\["inputs"\]: expected at least 2 tokens, .*, got 1'):
        data.cut_examples("quickstart_span_corruption", {"inputs": 1, "targets": 32})


def test_the_count_of_a_real_task(shared, monkeypatch):
    """T5's format of RTE and its vocabulary, written out here and encoded by SentencePiece itself."""
    model = str(shared / "data/vocab/t5/spiece.model")
    monkeypatch.setenv("SYNTHESIZER_JAX_VOCAB", model)
    monkeypatch.setattr(seqio.utils, "_TFDS_DATA_DIR_OVERRIDE", str(shared / "tfds"))
    pieces = sentencepiece.SentencePieceProcessor(model_file=model)
    rows = tfds.load("glue/rte:2.0.0", split="train[:1000]", data_dir=str(shared / "tfds"), download=False)
    counts = [
        len(pieces.encode(f"rte sentence1: {x['sentence1'].decode()} sentence2: {x['sentence2'].decode()}")) + 1
        for x in rows.as_numpy_iterator()
    ]
    longer, longest = int(np.sum(np.array(counts) > 64)), max(counts)
    assert cut("glue_rte", {"inputs": 64, "targets": 8}) == [("glue_rte", "inputs", 1000, longer, longest)]
    assert cut("glue_rte", {"inputs": longest, "targets": 8}) == []
