"""GLUE, SuperGLUE and SQuAD: T5's text formats by hand, every row beside t5's own, targets that score 100 %."""

import itertools
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from synthesizer_jax import tasks
from synthesizer_jax.tasks import c4, glue, mixtures, squad, super_glue

MODULES = (glue, super_glue, squad)
NAMES = [name for module in MODULES for name in tasks.CONTENTS[module.__name__]]
NOUN_IS_TARGET = ("super_glue_wsc_simple_eval", "glue_wnli_simple_eval")  # whatever the label


def test_the_contents_page_lists_what_importing_registers():
    program = (
        "import importlib, json, sys, seqio\n"
        "before, registered = set(), {}\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    names = seqio.TaskRegistry.names() | seqio.MixtureRegistry.names()\n"
        "    registered[module], before = sorted(names - before), names\n"
        "print(json.dumps(registered))"
    )
    modules = [module.__name__ for module in (c4, *MODULES, mixtures)]
    new = subprocess.run([sys.executable, "-c", program, *modules], capture_output=True, text=True, check=True)
    assert json.loads(new.stdout.splitlines()[-1]) == {name: sorted(tasks.CONTENTS[name]) for name in modules}


class _Downloads:
    """What TFDS asks for files: paths that are not there."""

    def download(self, urls):
        return tf.nest.map_structure(lambda url: "nowhere", urls)

    download_and_extract = download


def test_splits_are_those_that_tfds_makes():
    """The builders' code is asked, not the folder of data, where splits are missing."""
    for module, builder in ((glue, tfds.text.glue.Glue), (super_glue, tfds.text.super_glue.SuperGlue)):
        for name, splits in module.SPLITS.items():
            made = builder(config=name, data_dir="/nonexistent")._split_generators(_Downloads())
            assert splits == tuple(str(split.name) for split in made), name
            assert str(builder.builder_configs[name].version) == module.VERSION, name


# Formats, written by hand as the T5 paper's appendix D has them; the sentences are ours

NLI = {"premise": "Tom runs.", "hypothesis": "Tom moves.", "idx": 7}
PAIR = {"sentence1": "Tom runs.", "sentence2": "Tom moves.", "idx": 7}
COPA = {"premise": "Tom fell.", "choice1": "He ran.", "choice2": "He sat.", "question": "cause", "idx": 7}
MULTIRC = {
    "paragraph": "<b>Sent 1: </b>Tom ran.<br><b>Sent 2: </b>He fell.<br>",
    "question": "Who ran?",
    "answer": "Tom",
    "idx": {"paragraph": 1, "question": 2, "answer": 3},
}
RECORD = {
    "passage": "It rained.\n@highlight\nTom ran\n@highlight\nAnn fell",
    "query": "@placeholder was fast",
    "entities": ["Tom", "Ann"],
    "answers": ["Tom"],
    "idx": {"passage": 1, "query": 2},
}
WSC = {
    "text": "Mitchell asked Tom if he could lend some money.",
    "span1_text": "Tom",
    "span1_index": 2,
    "span2_text": "he",
    "span2_index": 4,
    "idx": 5,
}
WNLI = {"sentence1": "The fish ate the worm. It was tasty.", "sentence2": "The worm was tasty.", "idx": 1}
DPR = {"sentence": "Bob asked Tom if he, being poor, can lend it.", "pronoun": "he", "candidates": ["Bob", "Tom"]}
SQUAD = {
    "id": "a",
    "title": "T",
    "context": "Tom (5) ran.",
    "question": "Who ran?",
    "answers": {"text": ["Tom (5)", "Tom"], "answer_start": [0, 0]},
}
IS_ENTAILED = {0: "entailment", 1: "not_entailment", -1: "<unk>"}
OF_THREE = {0: "entailment", 1: "neutral", 2: "contradiction", -1: "<unk>"}
OF_CB = {0: "entailment", 1: "contradiction", 2: "neutral", -1: "<unk>"}
IS_TRUE = {0: "False", 1: "True", -1: "<unk>"}
RECORD_TEXT = "record query: @placeholder was fast entities: Tom, Ann passage: It rained. Tom ran. Ann fell"
RTE_TEXT = "rte hypothesis: Tom moves. premise: Tom runs."
WSC_TEXT = "wsc: Mitchell asked Tom if *he* could lend some money."

# name, a row, its inputs, label -> targets
FORMATS = (
    (
        "glue_cola",
        {"sentence": "Tom run.", "idx": 3},
        "cola sentence: Tom run.",
        {0: "unacceptable", 1: "acceptable", -1: "<unk>"},
    ),
    ("glue_sst2", {"sentence": "so dull ", "idx": 3}, "sst2 sentence: so dull ", {0: "negative", 1: "positive"}),
    ("glue_mrpc", PAIR, "mrpc sentence1: Tom runs. sentence2: Tom moves.", {0: "not_equivalent", 1: "equivalent"}),
    (
        "glue_stsb",
        PAIR,
        "stsb sentence1: Tom runs. sentence2: Tom moves.",
        {0.0: "0.0", 1.41: "1.4", 2.0: "2.0", 4.75: "4.8", 5.0: "5.0", -1.0: "-1.0"},
    ),
    (
        "glue_qqp",
        {"question1": "Who?", "question2": "Why?", "idx": 7},
        "qqp question1: Who? question2: Why?",
        {0: "not_duplicate", 1: "duplicate"},
    ),
    *((name, NLI, "mnli hypothesis: Tom moves. premise: Tom runs.", OF_THREE) for name in NAMES if "_mnli" in name),
    ("glue_ax", NLI, "mnli hypothesis: Tom moves. premise: Tom runs.", OF_THREE),
    (
        "glue_qnli",
        {"question": "Who?", "sentence": "Tom.", "idx": 7},
        "qnli question: Who? sentence: Tom.",
        IS_ENTAILED,
    ),
    ("glue_rte", PAIR, "rte sentence1: Tom runs. sentence2: Tom moves.", IS_ENTAILED),
    ("glue_wnli", PAIR, "wnli sentence1: Tom runs. sentence2: Tom moves.", {0: "not_entailment", 1: "entailment"}),
    ("glue_wnli_simple_eval", WNLI, "wsc: The fish ate the worm. *It* was tasty.", {0: "The worm", 1: "The worm"}),
    (
        "super_glue_boolq",
        {"question": "is it", "passage": "It is.", "idx": 7},
        "boolq passage: It is. question: is it",
        IS_TRUE,
    ),
    ("super_glue_cb", NLI, "cb hypothesis: Tom moves. premise: Tom runs.", OF_CB),
    (
        "super_glue_copa",
        COPA,
        "copa choice1: He ran. choice2: He sat. premise: Tom fell. question: cause",
        {0: "choice1", 1: "choice2"},
    ),
    (
        "super_glue_multirc",
        MULTIRC,
        "multirc question: Who ran? answer: Tom paragraph: Sent 1: Tom ran. Sent 2: He fell. ",
        IS_TRUE,
    ),
    ("super_glue_record", RECORD, RECORD_TEXT, {None: "Tom"}),
    ("super_glue_record", RECORD | {"answers": tf.constant([], tf.string)}, RECORD_TEXT, {None: "<unk>"}),
    ("super_glue_rte", NLI, RTE_TEXT, IS_ENTAILED),
    ("super_glue_axg", NLI, RTE_TEXT, IS_ENTAILED),
    ("super_glue_axb", PAIR, RTE_TEXT, IS_ENTAILED),
    (
        "super_glue_wic",
        PAIR | {"word": "run", "start1": 4, "end1": 8, "start2": 4, "end2": 9},
        "wic sentence1: Tom runs. sentence2: Tom moves. word: run",
        IS_TRUE,
    ),
    ("super_glue_wsc_simple_train", WSC, WSC_TEXT, {1: "Tom"}),
    ("super_glue_wsc_simple_eval", WSC, WSC_TEXT, {0: "Tom", 1: "Tom", -1: "Tom"}),
    ("dpr_simple", DPR, "wsc: Bob asked Tom if *he*, being poor, can lend it.", {0: "Bob", 1: "Tom"}),
    ("squad_allanswers", SQUAD, "question: Who ran ? context: Tom ( 5 ) ran . ", {None: "Tom ( 5 ) "}),
)


def texts(name: str, row: dict) -> list[dict]:
    """What the task makes of a row, before it is tokenised."""
    dataset = tf.data.Dataset.from_tensors(row)
    steps = seqio.TaskRegistry.get(name).preprocessors
    for step in itertools.takewhile(lambda step: step is not seqio.preprocessors.tokenize, steps):
        dataset = step(dataset)
    return list(dataset.as_numpy_iterator())


@pytest.mark.parametrize(("name", "row", "inputs", "targets"), FORMATS, ids=[name for name, *_ in FORMATS])
def test_the_text_is_t5s(name, row, inputs, targets):
    for label, target in targets.items():
        (made,) = texts(name, row if label is None else row | {"label": label})
        assert (made["inputs"].decode(), made["targets"].decode()) == (inputs, target)


def test_every_task_has_its_format_written_down():
    assert {name for name, *_ in FORMATS} == set(NAMES)


def test_rows_keep_what_the_answers_are_graded_by():
    (row,) = texts("super_glue_multirc", MULTIRC | {"label": 1})
    assert (row["idx/paragraph"], row["idx/question"], row["idx/answer"]) == (1, 2, 3)
    both = texts("super_glue_record", RECORD | {"answers": ["Tom", "Tommy"]})
    assert [row["targets"] for row in both] == [b"Tom", b"Tommy"]
    for row in both:
        assert (row["idx/passage"], row["idx/query"], list(row["answers"])) == (1, 2, [b"Tom", b"Tommy"])
    assert texts("super_glue_wsc_simple_train", WSC | {"label": 0}) == []
    (row,) = texts("super_glue_wsc_simple_eval", WSC | {"label": 0})
    assert (row["label"], row["idx"]) == (0, 5)
    (row,) = texts("squad_allanswers", SQUAD)
    assert list(row["answers"]) == [b"Tom ( 5 ) ", b"Tom"]


# Every row


def rows_by_dataset_info(folder: pathlib.Path) -> dict[str, dict[str, int]]:
    """task -> split -> rows that the task makes, from what the data says of itself."""
    counts = {}
    for name in (name for name in NAMES if name != "squad_allanswers"):
        task = seqio.TaskRegistry.get(name)
        path = folder / task.source.tfds_dataset.name.replace(":", "/")
        info = json.loads((path / "dataset_info.json").read_text())
        there = {split["name"]: sum(map(int, split["shardLengths"])) for split in info["splits"]}
        counts[name] = {split: rows for split, rows in there.items() if split in task.splits}
    for split in counts["super_glue_record"]:  # a row for each right answer
        counts["super_glue_record"][split] = sum(len(row["answers"]) for row in raw(folder, "record", split))
    rows = raw(folder, "wsc.fixed", "train")  # those whose noun is the right one
    counts["super_glue_wsc_simple_train"]["train"] = sum(int(row["label"]) for row in rows)
    return counts


def raw(folder: pathlib.Path, config: str, split: str):
    builder = tfds.builder_from_directory(folder / "super_glue" / config / super_glue.VERSION)
    return builder.as_dataset(split=split).as_numpy_iterator()


@pytest.mark.slow
def test_every_row_is_that_of_t5s_own_task(shared):
    """Token ids, text and all that answers are graded by, of every row that there is; and what the metrics say."""
    program = pathlib.Path(__file__).with_name("glue_beside_t5.py")
    run = subprocess.run([sys.executable, program, shared], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["rest"] == []  # no task of either library is left out
    mixed = set(mixtures.EN_MIX) - {"c4_span_corruption", "squad_allanswers"}
    assert set(found["en_mix"]) == mixed | {"c4_v020_unsupervised", "squad_v010_allanswers"}
    expected = rows_by_dataset_info(shared / "tfds")
    assert found["rows"] == expected
    assert sum(sum(splits.values()) for splits in expected.values()) > 150_000
    without = {"glue_ax", "super_glue_axb", "super_glue_axg", "super_glue_wsc_simple_train", "squad_allanswers"}
    assert set(found["metrics"]) == set(NAMES) - without
    assert all(0 < value < 100 for values in found["metrics"].values() for value in values.values())


def evaluated(name: str, split: str) -> dict[str, float]:
    """The metrics of targets given as answers: token ids, decoded and graded as a model's are."""
    evaluator = seqio.Evaluator(
        name, seqio.EncDecFeatureConverter(pack=False), eval_split=split, async_compute_metrics=False
    )
    model = {seqio.metrics.ModelOutputType.PREDICTION: targets_as_answers}
    computed, _ = evaluator.evaluate(compute_metrics=True, step=0, model_fns=model)
    return {metric: float(value) for metric, value in computed.result()[name].items()}


def targets_as_answers(dataset):
    return [(int(i), example["decoder_target_tokens"].tolist()) for i, example in dataset.as_numpy_iterator()]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("squad_allanswers", *NOUN_IS_TARGET)])
def test_targets_given_as_answers_score_100(real_data, name):
    task = seqio.TaskRegistry.get(name)
    if not task.metric_fns:
        assert name in ("glue_ax", "super_glue_axb", "super_glue_axg", "super_glue_wsc_simple_train")
        return
    (split, *_) = [s for s in task.splits if s != "train" and task.source.missing(s) is None]
    for metric, value in evaluated(name, split).items():
        assert value == pytest.approx(100, abs=1e-9), metric  # rounding of a sum of up to 5,000 terms


@pytest.mark.parametrize("name", NOUN_IS_TARGET)
def test_nouns_given_as_answers_score_the_share_of_true_labels(real_data, name):
    """In one row of WNLI t5's preprocessor finds no noun, and an empty answer is never right."""
    dataset = seqio.TaskRegistry.get(name).get_dataset(None, "validation", shuffle=False)
    true = [row["label"] == 1 and row["targets_pretokenized"] != b"" for row in dataset.as_numpy_iterator()]
    assert evaluated(name, "validation") == {"accuracy": pytest.approx(100 * np.mean(true), abs=1e-9)}
    assert 0.3 < np.mean(true) < 0.5
