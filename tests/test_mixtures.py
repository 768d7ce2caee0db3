"""T5's mixtures: rates, what is drawn at them, packed batches, and what is said where data is missing."""

import collections
import itertools
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
import seqio
import tensorflow as tf
from t5.data import glue_utils

from synthesizer_jax import data, tasks
from synthesizer_jax.tasks import features, mixtures

NAMES = tasks.CONTENTS[mixtures.__name__]
DRAWN = 10_000
SENTINEL = 32_099
# How the inputs of each task begin: "sentence1" and "hypothesis" tell GLUE's RTE from SuperGLUE's.
BEGIN = {
    **{f"glue_{name}": f"{name} sentence:" for name in ("cola", "sst2")},
    **{f"glue_{name}": f"{name} sentence1:" for name in ("mrpc", "stsb", "rte")},
    "glue_qqp": "qqp question1:",
    "glue_mnli": "mnli hypothesis:",
    "glue_qnli": "qnli question:",
    "super_glue_boolq": "boolq passage:",
    "super_glue_cb": "cb hypothesis:",
    "super_glue_copa": "copa choice1:",
    "super_glue_multirc": "multirc question:",
    "super_glue_record": "record query:",
    "super_glue_rte": "rte hypothesis:",
    "super_glue_wic": "wic sentence1:",
    "super_glue_wsc_simple_train": "wsc:",
    "dpr_simple": "wsc:",
}


def in_sampling_error(counts: dict, rates: dict) -> bool:
    """Whether each count lies in the central interval of its binomial distribution.

    All of them do with a probability of at least 1 - 1e-6, exactly: small rates need no normal approximation.
    """
    drawn, total = sum(counts.values()), sum(rates.values())
    outside = 1e-6 / len(rates)
    for name, rate in rates.items():
        least, most = scipy.stats.binom.interval(1 - outside, drawn, rate / total)
        if not least <= counts.get(name, 0) <= most:
            return False
    return set(counts) <= {name for name, rate in rates.items() if rate}


# Rates


def test_rates_are_t5s():
    for rates, mapping in (
        (mixtures.GLUE, glue_utils.GLUE_WEIGHT_MAPPING),
        (mixtures.SUPER_GLUE, glue_utils.SUPER_GLUE_WEIGHT_MAPPING),
    ):
        plain = {re.sub("_v[0-9]+", "", name): rate for name, rate in mapping.items()}
        assert rates == plain


def test_en_mix_is_c4_glue_super_glue_and_squad():
    """The numbers of the data sets' own cards: 88 thousand questions of SQuAD; T5 draws C4 like a million examples."""
    rest = {"c4_span_corruption": 1_000_000, "squad_allanswers": 87_599}
    assert mixtures.EN_MIX == mixtures.GLUE | mixtures.SUPER_GLUE | rest
    assert sum(mixtures.EN_MIX.values()) == 1_000_000 + 949_101 + 185_673 + 87_599


@pytest.mark.parametrize("name", NAMES)
def test_tasks_of_rate_0_are_those_that_are_only_evaluated(name):
    mixture = seqio.MixtureRegistry.get(name)
    for task in mixture.tasks:
        assert (mixture.get_rate(task) == 0) == ("train" not in task.splits), task.name
        assert task.output_features == features.TEXT_TO_TEXT
    assert "validation" in mixture.splits and "test" in mixture.splits


def numbered_tasks(monkeypatch, mixture: seqio.Mixture) -> None:
    """Each task's dataset is its number, again and again; the rest is seqio's own."""
    numbers = {task.name: number for number, task in enumerate(mixture.tasks)}

    def get_dataset(task, *args, **options):
        ids = tf.constant([numbers[task.name]], tf.int32)
        return tf.data.Dataset.from_tensors({"inputs": ids, "targets": ids}).repeat()

    monkeypatch.setattr(seqio.Task, "get_dataset", get_dataset)


@pytest.mark.parametrize("name", NAMES)
def test_tasks_are_drawn_at_their_rates(name, monkeypatch):
    """Without data, so that it can't be what is counted."""
    mixture = seqio.MixtureRegistry.get(name)
    numbered_tasks(monkeypatch, mixture)
    dataset = mixture.get_dataset({"inputs": 8, "targets": 8}, "train", seed=0, num_epochs=None)
    (numbers,) = dataset.map(lambda x: x["inputs"][0]).batch(DRAWN).take(1).as_numpy_iterator()
    counts = collections.Counter(mixture.tasks[number].name for number in numbers)
    rates = {task.name: mixture.get_rate(task) for task in mixture.tasks}
    assert in_sampling_error(counts, rates), counts
    # What t5 would count without a cache, or what the sample of 32 rows would give, is told from it.
    if name != "glue_mix":
        for record in (100_730, 32):
            assert not in_sampling_error(counts, rates | {"super_glue_record": record})
    assert not in_sampling_error(counts, dict.fromkeys(rates, 1))


def begin_of(ids: np.ndarray) -> str:
    """Which kind of inputs this is."""
    if (ids > SENTINEL - 100).any():
        return "c4_span_corruption"
    text = features.VOCABULARY.decode(ids[:12].tolist())
    (begin,) = {begin for begin in BEGIN.values() if text.startswith(begin)}
    return begin


@pytest.mark.slow
def test_real_examples_are_drawn_at_their_rates(real_data):
    """en_mix without SQuAD, of which there is no data. WSC and DPR look alike and are counted together."""
    rates = {name: rate for name, rate in mixtures.EN_MIX.items() if name != "squad_allanswers"}
    mixture = seqio.Mixture("en_mix_without_squad", list(rates.items()))
    dataset = mixture.get_dataset({"inputs": 64, "targets": 32}, "train", seed=1, num_epochs=None)
    drawn = dataset.map(lambda x: x["inputs"]).take(DRAWN).as_numpy_iterator()
    counts = collections.Counter(begin_of(ids) for ids in drawn)
    by_begin = collections.Counter()
    for name, rate in rates.items():
        if rate:
            by_begin[BEGIN.get(name, name)] += rate
    assert in_sampling_error(counts, by_begin), counts


# Batches


@pytest.mark.parametrize(("name", "targets"), [("glue_mix", 84), ("super_glue_mix", 62)])
def test_packed_batches_hold_whole_examples(real_data, name, targets):
    lengths = {"inputs": 512, "targets": targets}
    with data.TrainBatches(name, lengths, 8, pack=True, seed=3) as batches:
        rows = [
            {key: ids[row] for key, ids in batch.items()} for batch in itertools.islice(batches, 4) for row in range(8)
        ]
    examples = 0
    for row in rows:
        count = row["encoder_segment_ids"].max()
        assert count == row["decoder_segment_ids"].max()
        for segment in range(1, count + 1):
            inputs, answer = (
                row[f"{side}_tokens"][row[f"{side.partition('_')[0]}_segment_ids"] == segment]
                for side in ("encoder_input", "decoder_target")
            )
            assert begin_of(inputs) in BEGIN.values()
            assert answer[-1] == 1 and (inputs[-1] == 1 or len(inputs) == 512)
            assert 1 not in inputs[:-1] and 1 not in answer[:-1]
            for side, ids in (("encoder", inputs), ("decoder", answer)):
                positions = row[f"{side}_positions"][row[f"{side}_segment_ids"] == segment]
                assert positions.tolist() == list(range(len(ids)))
        examples += count
    assert len(rows) == 32 and examples > 32


# What is said where data is missing


MISSING = """
import json, socket, sys, time
import seqio
from synthesizer_jax import data, tasks
seqio.set_tfds_data_dir_override(sys.argv[1])
asked = []
socket.socket.connect = lambda self, address: asked.append(str(address))
socket.getaddrinfo = lambda *address, **options: asked.append(str(address))
said = {}
for module in ("mixtures", "glue", "super_glue", "squad"):
    for name in tasks.CONTENTS["synthesizer_jax.tasks." + module]:
        provider = data.get_mixture_or_task(name)
        split = "train" if "train" in provider.splits else "test"
        start = time.monotonic()
        try:
            data.TrainBatches(name, {"inputs": 32, "targets": 32}, 2, split=split)
        except FileNotFoundError as error:
            said[name] = str(error), time.monotonic() - start
print(json.dumps([said, asked]))
"""


def test_missing_data_is_said_at_once_with_how_to_get_it(tmp_path):
    """Of each task and mixture, with a folder that is empty, without asking the network."""
    run = subprocess.run([sys.executable, "-c", MISSING, tmp_path], capture_output=True, text=True, check=True)
    said, asked = json.loads(run.stdout.splitlines()[-1])
    assert not asked
    modules = ("mixtures", "glue", "super_glue", "squad")
    assert set(said) == {name for module in modules for name in tasks.CONTENTS[f"synthesizer_jax.tasks.{module}"]}
    for name, (message, seconds) in said.items():
        assert seconds < 10
        (dataset,) = re.findall(rf"^no data of (\S+) in {tmp_path};", message)
        assert f"tfds build {dataset} --data_dir={tmp_path}" in message
        assert dataset in {
            task.source.tfds_dataset.name for task in seqio.get_subtasks(seqio.get_mixture_or_task(name))
        }


def test_a_mixture_of_which_one_dataset_is_missing_says_which(real_data):
    with pytest.raises(FileNotFoundError, match=r"no data of squad/v1\.1:3\.0\.0 in .*tfds build squad/v1\.1:3\.0\.0"):
        data.TrainBatches("en_mix_cotraining", {"inputs": 128, "targets": 32}, 2)
