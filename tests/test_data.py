"""From seqio tasks to batches: packing, hosts, exact resume, every example once in evaluation, and what errors say."""

import collections
import hashlib
import importlib.metadata
import inspect
import json
import subprocess
import sys

import numpy as np
import pytest
import seqio
import tensorflow as tf

import synthesizer_jax.tasks.quickstart  # noqa: F401  registers the tasks
from synthesizer_jax import data
from synthesizer_jax.models import t5_tiny
from synthesizer_jax.models.batch import DECODER_ONLY, ENCODER_DECODER, ENCODER_ONLY

LENGTHS = {"inputs": 12, "targets": 7}
SIZES = {"train": 37, "validation": 11, "empty": 0}
PACKED = {f"{side}_{what}" for side in ("encoder", "decoder") for what in ("segment_ids", "positions")}
KEYS = {"encoder_input_tokens", "decoder_target_tokens", "decoder_input_tokens", "decoder_loss_weights"}


def numbers(split, shuffle_files, seed=None):
    """Example i: i + 2, 1 to 9 times, as inputs; another number, 1 to 5 times, as targets."""
    return tf.data.Dataset.range(SIZES[split], output_type=tf.int32).map(
        lambda i: {"inputs": tf.repeat(i + 2, i % 9 + 1), "targets": tf.repeat(i * i % 91 + 2, i % 5 + 1)}
    )


def register(name, preprocessors=(), sizes=SIZES):
    feature = seqio.Feature(vocabulary=seqio.PassThroughVocabulary(100, eos_id=1), add_eos=True)
    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(numbers, splits=tuple(sizes)),
        preprocessors=[*preprocessors, seqio.preprocessors.append_eos_after_trim],
        output_features=dict.fromkeys(LENGTHS, feature),
    )


def register_kind(name, features, keep):
    """`numbers` with other features: what is no feature is left out, and a label is the number of the inputs."""

    def choose(dataset):
        return dataset.map(lambda x: {name: make(x) for name, make in keep.items()})

    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(numbers, splits=tuple(SIZES)),
        preprocessors=[choose, seqio.preprocessors.append_eos_after_trim],
        output_features=features,
    )


TOKENS = seqio.Feature(vocabulary=seqio.PassThroughVocabulary(100, eos_id=1), add_eos=True)
LABEL = seqio.Feature(vocabulary=seqio.PassThroughVocabulary(9), add_eos=False)
TEXT = {"targets": lambda x: x["inputs"]}
CLASS = {"inputs": lambda x: x["inputs"], "targets": lambda x: x["inputs"][:1] % 9}
register_kind("data_test_text", {"targets": TOKENS}, TEXT)
register_kind("data_test_class", {"inputs": TOKENS, "targets": LABEL}, CLASS)
register_kind("data_test_two_labels", {"inputs": TOKENS, "targets": LABEL}, CLASS | {"targets": lambda x: x["targets"]})
register_kind("data_test_no_label", {"inputs": TOKENS, "targets": LABEL}, CLASS | {"targets": lambda x: [-1]})
register("data_test")
register("data_test_no_validation", sizes=("train",))
register("data_test_nothing", [lambda dataset: dataset.filter(lambda example: False)])
register("data_test_cacheable", [seqio.CacheDatasetPlaceholder()])
seqio.MixtureRegistry.add("data_test_mixture", ["data_test", "data_test_no_validation"], default_rate=1)


def take(batches, count):
    return [next(batches) for _ in range(count)]


def equal(left, right):
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
        for a, b in zip(left, right, strict=True)
    )


def examples_of(batch):
    """The examples in a batch as (inputs, targets), whether packed or not."""
    for row in range(len(batch["encoder_input_tokens"])):
        x, y = batch["encoder_input_tokens"][row], batch["decoder_target_tokens"][row]
        in_x = batch.get("encoder_segment_ids", {row: (x > 0).astype(int)})[row]
        in_y = batch.get("decoder_segment_ids", {row: (y > 0).astype(int)})[row]
        assert set(in_x) | {0} == set(in_y) | {0}
        for segment in sorted(set(in_x) - {0}):
            yield tuple(x[in_x == segment].tolist()), tuple(y[in_y == segment].tolist())


def expected_examples(split):
    cut = [(example["inputs"], example["targets"]) for example in numbers(split, False).as_numpy_iterator()]
    return collections.Counter(((*x[:11].tolist(), 1), (*y[:6].tolist(), 1)) for x, y in cut)


# Batches


@pytest.mark.parametrize("pack", [True, False])
def test_the_keys_are_seqios_and_the_decoder_sees_its_own_example_shifted(pack):
    with data.TrainBatches("data_test", LENGTHS, 4, pack=pack) as batches:
        batch = next(batches)
    assert set(batch) == (KEYS | PACKED if pack else KEYS)
    for name, ids in batch.items():
        assert ids.dtype == np.int32 and ids.shape == (4, 12 if name.startswith("encoder") else 7)
    targets, inputs = batch["decoder_target_tokens"], batch["decoder_input_tokens"]
    first = batch["decoder_positions"] == 0 if pack else np.arange(7)[None] == 0
    expected = np.where(first, 0, np.pad(targets, ((0, 0), (1, 0)))[:, :-1])
    weights = batch["decoder_loss_weights"]
    np.testing.assert_array_equal(weights, targets > 0)
    np.testing.assert_array_equal(inputs * weights, expected * weights)


@pytest.mark.parametrize("pack", [True, False])
def test_one_epoch_holds_every_example_whole_and_once(pack):
    with data.TrainBatches("data_test", LENGTHS, 1, pack=pack, num_epochs=1) as batches:
        rows = list(batches)
    assert collections.Counter(example for row in rows for example in examples_of(row)) == expected_examples("train")
    assert len(rows) == 37 if not pack else len(rows) < 37


def test_positions_count_from_0_within_each_segment():
    with data.TrainBatches("data_test", LENGTHS, 8) as batches:
        batch = next(batches)
    for side in ("encoder", "decoder"):
        for segments, positions in zip(batch[f"{side}_segment_ids"], batch[f"{side}_positions"], strict=True):
            for segment in set(segments) - {0}:
                np.testing.assert_array_equal(positions[segments == segment], np.arange(np.sum(segments == segment)))


def test_the_order_depends_on_the_seed_alone():
    runs = [data.TrainBatches("data_test", LENGTHS, 4, seed=seed) for seed in (3, 3, 4)]
    first, again, other = (take(batches, 12) for batches in runs)
    assert equal(first, again) and not equal(first, other)


def test_the_hosts_rows_together_are_the_batch():
    whole = take(data.TrainBatches("data_test", LENGTHS, 8), 6)
    parts = [take(data.TrainBatches("data_test", LENGTHS, 8, shard=(index, 4)), 6) for index in range(4)]
    steps = zip(*parts, strict=True)
    assert equal([{key: np.concatenate([part[key] for part in step]) for key in step[0]} for step in steps], whole)


def test_a_split_smaller_than_a_batch_comes_again_or_is_refused():
    with data.TrainBatches("data_test", LENGTHS, 64, pack=False) as batches:
        assert sum(1 for _ in examples_of(next(batches))) == 64
    with pytest.raises(ValueError, match=r"batch_size: 'train' of 'data_test' has fewer rows than one batch of 64"):
        next(data.TrainBatches("data_test", LENGTHS, 64, pack=False, num_epochs=1))


def test_a_mixture_draws_from_the_tasks_that_have_the_split():
    with data.TrainBatches("data_test_mixture", LENGTHS, 4, split="validation") as batches:
        drawn = {example for batch in take(batches, 10) for example in examples_of(batch)}
    assert drawn <= set(expected_examples("validation"))


# Resume


def digest(batches):
    hashed = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            hashed.update(name.encode() + batch[name].tobytes())
    return hashed.hexdigest()


RESUME = f"""
import hashlib, json, pathlib, sys
import synthesizer_jax.tasks.quickstart
from synthesizer_jax import data
from synthesizer_jax.models import t5_tiny
from synthesizer_jax.models.batch import DECODER_ONLY, ENCODER_DECODER, ENCODER_ONLY
{inspect.getsource(digest)}
for arguments, paths in json.load(sys.stdin):
    batches = data.TrainBatches(**arguments)
    for path in paths:
        batches.restore(pathlib.Path(path).read_bytes())
        print("digest", digest([next(batches) for _ in range(30)]))
"""


def test_a_new_process_goes_on_with_the_very_same_batches(tmp_path):
    """Shuffling and packing on, within an epoch, at its end and beyond. An epoch of text is 20 batches."""
    cases, digests = [], []
    for name, lengths, stops in (
        ("quickstart_span_corruption", {"inputs": 64, "targets": 32}, (0, 1, 20, 21, 60)),
        ("quickstart_finetune", {"inputs": 96, "targets": 12}, (5,)),
    ):
        arguments = {"mixture_or_task_name": name, "task_feature_lengths": lengths, "batch_size": 32, "seed": 5}
        batches, seen, paths = data.TrainBatches(**arguments), [], []
        for step in range(max(stops) + 30):
            if step in stops:
                paths.append(tmp_path / f"{name}-{step}")
                paths[-1].write_bytes(batches.state())
            seen.append(next(batches))
        cases.append((arguments, [str(path) for path in paths]))
        digests += [digest(seen[stop : stop + 30]) for stop in stops]
    command = [sys.executable, "-c", RESUME]
    new = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=True)
    assert [line.split()[1] for line in new.stdout.splitlines() if line.startswith("digest")] == digests


def test_a_run_goes_on_with_another_number_of_hosts_and_from_an_earlier_state():
    batches = data.TrainBatches("data_test", LENGTHS, 8)
    take(batches, 3)
    state = batches.state()
    rest = take(batches, 9)
    batches.restore(state)
    assert equal(take(batches, 9), rest)
    second_of_two = data.TrainBatches("data_test", LENGTHS, 8, shard=(1, 2))
    second_of_two.restore(state)
    assert equal(take(second_of_two, 9), [{key: rows[4:] for key, rows in batch.items()} for batch in rest])


def test_the_end_of_the_last_epoch_is_part_of_the_state():
    batches = data.TrainBatches("data_test", LENGTHS, 4, num_epochs=1)
    rest = list(batches)
    state = batches.state()
    batches = data.TrainBatches("data_test", LENGTHS, 4, num_epochs=1)
    batches.restore(state)
    assert rest and list(batches) == []


def test_a_state_is_refused_where_an_argument_differs():
    state = data.TrainBatches("data_test", LENGTHS, 8).state()
    other = data.TrainBatches("data_test", LENGTHS | {"targets": 8}, 4, seed=1, pack=False)
    with pytest.raises(ValueError, match="^data: the checkpoint was saved with other batches") as error:
        other.restore(state)
    for text in (
        "'targets': 7} then",
        "'targets': 8} now",
        "batch_size 8 then, 4 now",
        "seed 0 then, 1 now",
        "pack True then, False now",
        "INITIAL_CHECKPOINT_PATH",
    ):
        assert text in str(error.value)


def test_a_state_is_refused_where_the_text_or_a_version_differs(monkeypatch):
    batches = data.TrainBatches("data_test", LENGTHS, 8)
    state = batches.state()
    monkeypatch.setitem(batches._identity, "examples", {"data_test": "0000"})
    monkeypatch.setitem(batches._identity, "seqio", "0.0.99")
    with pytest.raises(ValueError, match=r"seqio '0\.0\..*' then, '0\.0\.99' now; examples .* now"):
        batches.restore(state)


def test_bytes_that_are_no_state_are_refused():
    with pytest.raises(ValueError, match="state: these 7 bytes are not a state of TrainBatches"):
        data.TrainBatches("data_test", LENGTHS, 8).restore(b"nothing")


# Evaluation


@pytest.mark.parametrize("batch_size", [4, 11, 16])
def test_evaluation_sees_every_example_once_whatever_the_batch_size(batch_size):
    seen = collections.Counter()
    for batch, real in data.eval_batches("data_test", LENGTHS, batch_size):
        assert set(batch) == KEYS
        assert {len(rows) for rows in batch.values()} == {batch_size}
        assert not any(rows[real:].any() for rows in batch.values())
        seen.update(examples_of({name: rows[:real] for name, rows in batch.items()}))
    assert seen == expected_examples("validation")


def test_all_hosts_evaluate_the_same_number_of_batches():
    hosts = [list(data.eval_batches("data_test", LENGTHS, 8, shard=(index, 4))) for index in range(4)]
    assert [[real for _, real in batches] for batches in hosts] == [[2, 2], [2, 1], [2, 0], [2, 0]]
    seen = collections.Counter(
        example
        for batches in hosts
        for batch, real in batches
        for example in examples_of({name: rows[:real] for name, rows in batch.items()})
    )
    assert seen == expected_examples("validation")


def test_a_mixture_is_evaluated_task_by_task_with_one_padded_batch():
    reals = [real for _, real in data.eval_batches("data_test_mixture", LENGTHS, 16, split="train")]
    assert reals == [16, 16, 16, 16, 10]


# Language models and classifiers


def test_a_language_models_rows_are_texts_shifted_by_one():
    with data.TrainBatches("data_test_text", {"targets": 12}, 4, keys=DECODER_ONLY) as batches:
        batch = next(batches)
    assert set(batch) == {*DECODER_ONLY.required, *DECODER_ONLY.packing}
    assert {rows.shape for rows in batch.values()} == {(4, 12)}
    targets, first = batch["decoder_target_tokens"], batch["decoder_positions"] == 0
    expected = np.where(first, 0, np.pad(targets, ((0, 0), (1, 0)))[:, :-1])
    np.testing.assert_array_equal(batch["decoder_input_tokens"], np.where(targets > 0, expected, 0))
    np.testing.assert_array_equal(batch["decoder_loss_weights"], targets > 0)
    assert batch["decoder_segment_ids"].max() > 1


@pytest.mark.parametrize("pack", [True, False])
def test_a_language_model_sees_every_text_whole_and_once(pack):
    options = {"keys": DECODER_ONLY, "pack": pack, "num_epochs": 1}
    seen = collections.Counter()
    for batch in data.TrainBatches("data_test_text", {"targets": 12}, 1, **options):
        (tokens,) = batch["decoder_target_tokens"]
        (segments,) = batch.get("decoder_segment_ids", batch["decoder_loss_weights"])
        seen.update(tuple(tokens[segments == segment]) for segment in set(segments) - {0})
    assert seen == collections.Counter(x for x, _ in expected_examples("train").elements())


@pytest.mark.parametrize("batch_size", [4, 16])
def test_a_classifiers_rows_are_inputs_with_a_label(batch_size):
    seen = collections.Counter()
    for batch, real in data.eval_batches("data_test_class", {"inputs": 12}, batch_size, keys=ENCODER_ONLY):
        shapes = {name: rows.shape for name, rows in batch.items()}
        assert shapes == ENCODER_ONLY.shapes(batch_size, {"inputs": 12}, packed=False)
        assert {rows.dtype for rows in batch.values()} == {np.dtype(np.int32)}
        np.testing.assert_array_equal(batch["loss_weights"], np.arange(batch_size) < real)
        assert not any(rows[real:].any() for rows in batch.values())
        for tokens, label in list(zip(batch["encoder_input_tokens"], batch["labels"], strict=True))[:real]:
            assert label == tokens[0] % 9
            seen[tuple(tokens[tokens > 0])] += 1
    assert seen == collections.Counter(x for x, _ in expected_examples("validation").elements())


@pytest.mark.parametrize(
    "name, lengths, keys", [("data_test_text", "targets", DECODER_ONLY), ("data_test_class", "inputs", ENCODER_ONLY)]
)
def test_every_kind_resumes_exactly_and_divides_among_hosts(name, lengths, keys):
    arguments = {"keys": keys, "pack": bool(keys.packing), "seed": 3}
    batches = data.TrainBatches(name, {lengths: 12}, 8, **arguments)
    take(batches, 3)
    state = batches.state()
    rest = take(batches, 9)
    second_of_two = data.TrainBatches(name, {lengths: 12}, 8, shard=(1, 2), **arguments)
    second_of_two.restore(state)
    assert equal(take(second_of_two, 9), [{key: rows[4:] for key, rows in batch.items()} for batch in rest])
    with pytest.raises(
        ValueError, match="mixture_or_task_name 'data_test_.* then, 'data_test' now; task_feature_lengths"
    ):
        data.TrainBatches("data_test", LENGTHS, 8, seed=3).restore(state)


@pytest.mark.parametrize(
    "name, lengths, keys, pack, text",
    [
        ("data_test", {"targets": 7}, DECODER_ONLY, True, "has the features inputs and targets, but DecoderOnly reads targets$"),
        ("data_test", {"inputs": 7, "targets": 7}, DECODER_ONLY, True, r'expected {"targets": TOKENS} for DecoderOnly, got'),
        ("data_test_text", LENGTHS, ENCODER_DECODER, True, "has the features targets, but EncoderDecoder reads inputs and"),
        ("data_test_text", {"inputs": 7}, ENCODER_ONLY, False, "has the features targets, but EncoderOnly reads inputs and"),
        ("data_test_class", {"inputs": 7, "targets": 1}, ENCODER_ONLY, False, r'expected {"inputs": TOKENS} for EncoderOnly'),
        ("data_test_class", {"inputs": 7}, ENCODER_ONLY, True, "pack: EncoderOnly gives one answer for a row"),
        ("data_test_two_labels", {"inputs": 7}, ENCODER_ONLY, False, r"targets: expected one class id from 0 to 8 .*, got \[3, 3\]"),
        ("data_test_no_label", {"inputs": 7}, ENCODER_ONLY, False, r"in each example of 'data_test_no_label', got \[-1\]"),
    ],
)  # fmt: skip
def test_what_a_kind_of_model_refuses(name, lengths, keys, pack, text):
    with pytest.raises(ValueError, match=text):
        data.TrainBatches(name, lengths, 8, keys=keys, pack=pack)


# Vocabularies, caches, packages


def test_the_output_vocabulary_counts_its_sentinels():
    vocabulary = data.output_vocabulary("quickstart_finetune")
    assert vocabulary.vocab_size == 2048 and vocabulary.decode(vocabulary.encode("true")) == "true"
    data.check_vocabulary("quickstart_finetune", 2048)
    with pytest.raises(ValueError, match="vocab_size: 'inputs' of 'quickstart_finetune' has ids up to 2047.*2000 rows"):
        data.check_vocabulary("quickstart_finetune", 2000)
    with pytest.raises(ValueError, match="feature: 'data_test' has no feature 'labels'; it has inputs, targets"):
        data.output_vocabulary("data_test", "labels")


def test_a_cache_is_used_where_there_is_one(tmp_path, monkeypatch):
    assert not data.use_cache("data_test_cacheable") and not data.use_cache("data_test_cacheable", False)
    for name in ("data_test_cacheable", "data_test"):
        with pytest.raises(ValueError, match=f"use_cached_tasks: no cache of '?{name}'? in the cache folders"):
            data.use_cache(name, True)
    cache = tmp_path / "data_test_cacheable"
    cache.mkdir()
    (cache / "COMPLETED").touch()
    monkeypatch.setattr(seqio.utils, "_GLOBAL_CACHE_DIRECTORIES", [str(tmp_path)])
    assert data.use_cache("data_test_cacheable") and not data.use_cache("data_test_cacheable", False)


def test_a_nightly_package_on_top_of_the_stable_one_is_refused(monkeypatch):
    data.check_packages()
    monkeypatch.setattr(seqio, "__version__", "0.0.18.dev20250227")
    with pytest.raises(ImportError, match="seqio that was imported is 0.0.18.dev2025.*, but seqio is .*seqio-nightly"):
        data.check_packages()
    monkeypatch.undo()

    def version(name):
        if name == "tensorflow-datasets":
            raise importlib.metadata.PackageNotFoundError(name)
        return seqio.__version__

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ImportError, match="tensorflow-datasets is not installed: tfds-nightly .*pip install --force"):
        data.check_packages()


def test_tensorflow_sees_no_accelerator():
    assert tf.config.get_visible_devices("GPU") == [] and tf.config.get_visible_devices("TPU") == []


# Wrong arguments


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"mixture_or_task_name": "data_tset"}, r"No Task or Mixture found with name 'data_tset'; did you mean data_t"),
        (
            {"mixture_or_task_name": "quickstart_finetun"},
            r"did you mean quickstart_finetune \(synthesizer_jax\.tasks\.quickstart\).*MIXTURE_OR_TASK_MODULE",
        ),
        ({"task_feature_lengths": {"inputs": 12}}, r'task_feature_lengths: expected {"inputs": TOKENS, "targets": T'),
        ({"task_feature_lengths": LENGTHS | {"labels": 3}}, r"task_feature_lengths: expected .*, got .*'labels': 3"),
        ({"task_feature_lengths": 12}, r"task_feature_lengths: expected .*, got 12"),
        ({"task_feature_lengths": {"inputs": 12, "targets": 0}}, r'lengths\["targets"\]: .*at least 1, got 0'),
        ({"task_feature_lengths": {"inputs": 1.5, "targets": 4}}, r'lengths\["inputs"\]: .*integer.*got 1\.5'),
        ({"batch_size": 0}, r"batch_size: expected an integer of at least 1, got 0"),
        ({"batch_size": "8"}, r"batch_size: expected an integer of at least 1, got '8'"),
        ({"shard": (0, 3)}, r"batch_size: 8 rows cannot be divided among 3 hosts"),
        ({"shard": (2, 2)}, r"shard: expected \(index, count\) with 0 <= index < count, got \(2, 2\)"),
        ({"split": "test"}, r"split: 'data_test' has no split 'test'; it has empty, train, validation"),
        ({"split": "empty"}, r"split: 'empty' of 'data_test' has no examples"),
        ({"mixture_or_task_name": "data_test_nothing"}, r"split: 'train' of 'data_test_nothing' has no examples"),
        ({"num_epochs": 0}, r"num_epochs: expected an integer of at least 1, got 0"),
        ({"seed": -1}, r"seed: expected an integer of at least 0, got -1"),
        ({"use_cached_tasks": True}, r"use_cached_tasks: no cache of 'data_test'.*leave USE_CACHED_TASKS out"),
        (
            {"mixture_or_task_name": "quickstart_span_corruption", "task_feature_lengths": LENGTHS | {"inputs": 64}},
            r"'quickstart_span_corruption' with task_feature_lengths=.*targets length",
        ),
    ],
)
def test_what_a_wrong_argument_says(change, text):
    arguments = {"mixture_or_task_name": "data_test", "task_feature_lengths": LENGTHS, "batch_size": 8} | change
    with pytest.raises(ValueError, match=text):
        data.TrainBatches(**arguments)


def test_the_module_of_a_shipped_name_is_imported():
    code = "from synthesizer_jax import data; print(data.get_mixture_or_task('quickstart_finetune').name)"
    new = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert new.stdout == "quickstart_finetune\n"


def test_evaluation_refuses_the_same_mistakes_before_the_first_batch():
    with pytest.raises(ValueError, match="split: 'data_test' has no split 'test'"):
        data.eval_batches("data_test", LENGTHS, 8, split="test")
    with pytest.raises(ValueError, match="split: 'empty' of 'data_test' has no examples"):
        data.eval_batches("data_test", LENGTHS, 8, split="empty")


def test_a_classifiers_task_is_no_text_to_be_said():
    with pytest.raises(ValueError, match="'targets' of 'quickstart_negation_class' have no end-of-sequence id"):
        data.check_model("quickstart_negation_class", t5_tiny(vocab_size=2048))
