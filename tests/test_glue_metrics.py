"""Answers of GLUE, SuperGLUE and SQuAD graded as T5 does: by hand, and beside formulas without its libraries."""

import collections
import math
import random
import re
import string

import numpy as np
import pytest
import seqio

import synthesizer_jax.tasks.mixtures  # noqa: F401  registers the tasks

ROUNDING = 1e-9  # of sums of a few hundred terms in float64, in percent


def graded(name: str, targets: list[str], answers: list[str], examples: list[dict] | None = None) -> dict[str, float]:
    """All metrics of a task."""
    task = seqio.TaskRegistry.get(name)
    examples = examples or [{}] * len(targets)
    right, said = (
        [task.postprocess_fn(text, example=e, is_target=is_target) for text, e in zip(texts, examples, strict=True)]
        for texts, is_target in ((targets, True), (answers, False))
    )
    results = [result for metric in task.metric_fns for result in metric(right, said).items()]
    assert len({metric for metric, _ in results}) == len(results)
    return dict(results)


def close(**expected: float):
    return pytest.approx(expected, abs=ROUNDING, nan_ok=True)


# By hand


def test_accuracy_takes_labels_to_the_letter():
    """What is no label is wrong, an empty answer too, and so is one with a space or another case."""
    targets = ["entailment"] * 5 + ["not_entailment"]
    answers = ["entailment", "Entailment", "", "entailment ", "neutral", "not_entailment"]
    for name in ("glue_rte", "glue_qnli", "glue_wnli", "super_glue_rte"):
        assert graded(name, targets, answers) == close(accuracy=100 * 2 / 6)
    three = ["entailment", "neutral", "contradiction", "neutral"]
    for name in ("glue_mnli", "glue_mnli_matched", "glue_mnli_mismatched"):
        assert graded(name, three, ["entailment", "neutral", "neutral", "False"]) == close(accuracy=50)
    assert graded("glue_sst2", ["positive", "negative"], ["positive", "good"]) == close(accuracy=50)
    assert graded("super_glue_copa", ["choice1", "choice2"], ["choice2", "2"]) == close(accuracy=0)
    for name in ("super_glue_boolq", "super_glue_wic"):
        assert graded(name, ["True", "False", "True", "False"], ["True", "True", "1", "False"]) == close(accuracy=50)
    assert graded("dpr_simple", ["Tom", "Bob"], ["tom", "Bob"]) == close(accuracy=50)


def test_f1_of_the_second_label_where_no_label_is_the_wrong_one():
    """3 right of the second label, 1 wrong; 1 missed, and 1 said to be nothing."""
    for name, no, yes in (("glue_mrpc", "not_equivalent", "equivalent"), ("glue_qqp", "not_duplicate", "duplicate")):
        targets = [yes] * 5 + [no] * 3
        answers = [yes, yes, yes, no, "", yes, no, "neither"]
        # "" is a missed one, "neither" a false one: precision 3 / 5, recall 3 / 5.
        assert graded(name, targets, answers) == close(f1=60, accuracy=100 * 4 / 8)
        with pytest.warns(UserWarning, match="F-score is ill-defined"):
            assert graded(name, [no, no], [no, no]) == close(f1=0, accuracy=100)
        assert graded(name, targets, [no] * 8) == close(f1=0, accuracy=100 * 3 / 8)


def test_matthews_correlation_counts_no_label_as_a_third_class():
    yes, no = "acceptable", "unacceptable"
    targets = [yes] * 6 + [no] * 4
    # TP 4, FN 2, FP 1, TN 3: (4 * 3 - 1 * 2) / sqrt(5 * 6 * 4 * 5)
    answers = [yes] * 4 + [no] * 2 + [yes] + [no] * 3
    assert graded("glue_cola", targets, answers) == close(matthews_corrcoef=100 * 10 / math.sqrt(600))
    assert graded("glue_cola", targets, [yes] * 10) == close(matthews_corrcoef=0)
    assert graded("glue_cola", targets, [""] * 10) == close(matthews_corrcoef=0)
    flipped = [no] * 6 + [yes] * 4
    assert graded("glue_cola", targets, flipped) == close(matthews_corrcoef=-100)
    # Gorodkin's R_K: 10 * 6 right - (4 * 6 + 3 * 4), over roots of 100 - (4² + 3² + 3²) and 100 - (6² + 4²)
    answers = [yes] * 4 + [no, ""] + [no] * 2 + ["", "?"]
    assert graded("glue_cola", targets, answers) == close(
        matthews_corrcoef=100 * (60 - 36) / math.sqrt((100 - 34) * (100 - 52))
    )


def test_similarities_are_correlated_and_no_number_is_minus_one():
    targets = ["1.0", "2.0", "3.0", "4.0"]
    assert graded("glue_stsb", targets, ["2.0", "4.0", "6.0", "8"]) == close(
        pearson_corrcoef=100, spearman_corrcoef=100
    )
    # Deviations (-1.5, -.5, .5, 1.5) and (1, -1, 1, -1) / 2 about 2: -1 / (sqrt(5) * 1); ranks with ties are the same.
    assert graded("glue_stsb", targets, ["2.5", "1.5", "2.5", "1.5"]) == close(
        pearson_corrcoef=-100 / math.sqrt(5), spearman_corrcoef=-100 / math.sqrt(5)
    )
    for nothing in ("", "three", "3,0", "<unk>"):
        assert graded("glue_stsb", targets, ["1", "2", "3", nothing]) == graded(
            "glue_stsb", targets, ["1", "2", "3", "-1.0"]
        )


def test_similarities_that_are_all_alike_have_no_correlation():
    """As in t5: a model that always says the same gets NaN, which is not 0; so does one that says "nan" once."""
    targets = ["1.0", "2.0", "3.0", "4.0"]
    nothing = close(pearson_corrcoef=math.nan, spearman_corrcoef=math.nan)
    with pytest.warns(RuntimeWarning, match="constant"):
        assert graded("glue_stsb", targets, ["2.5"] * 4) == nothing
    assert graded("glue_stsb", targets, ["1.0", "2.0", "nan", "4.0"]) == nothing


def test_cbs_f1_is_the_mean_of_the_three_labels():
    entailed, denied, open_ = "entailment", "contradiction", "neutral"
    targets = [entailed] * 3 + [denied] * 2 + [open_]
    answers = [entailed, entailed, denied, denied, "", denied]
    # entailment: 2 of 2 said, 2 of 3 there, F1 4 / 5; contradiction: 1 of 3, 1 of 2, F1 2 / 5; neutral: 0.
    assert graded("super_glue_cb", targets, answers) == close(
        mean_3class_f1=100 * (4 / 5 + 2 / 5) / 3, accuracy=100 * 3 / 6
    )


def test_multirc_is_graded_by_answer_and_by_question():
    questions = [7, 7, 9, 9, 9, 4]
    examples = [{"idx/paragraph": 0, "idx/question": np.int32(q), "idx/answer": i} for i, q in enumerate(questions)]
    targets = ["True", "False", "True", "True", "False", "True"]
    answers = ["True", "False", "True", "False", "maybe", "True"]
    # "maybe" is taken for True: TP 3, FP 1, FN 1. Questions 7 and 4 are all right.
    assert graded("super_glue_multirc", targets, answers, examples) == close(f1=75, exact_match=100 * 2 / 3)
    shuffled = [3, 5, 0, 2, 4, 1]  # a question's answers need not stand together
    assert graded(
        "super_glue_multirc", *([rows[i] for i in shuffled] for rows in (targets, answers, examples))
    ) == close(f1=75, exact_match=100 * 2 / 3)


def test_record_counts_a_query_once_and_takes_its_best_answer():
    def example(passage, query, *answers):
        return {
            "idx/passage": np.int32(passage),
            "idx/query": np.int32(query),
            "answers": [a.encode() for a in answers],
        }

    first, second, third = example(0, 0, "The U.S.", "America"), example(0, 1, "Ann Lee"), example(1, 1, "Bob")
    examples = [first, first, second, third]  # a row for each right answer
    targets = ["The U.S.", "America", "Ann Lee", "Bob"]
    # "us" is right without article, points and case; the row after it is not looked at; "Ann" has F1 2 / 3.
    assert graded("super_glue_record", targets, ["us", "wrong", "Ann", ""], examples) == close(
        em=100 / 3, f1=100 * (1 + 2 / 3) / 3
    )
    assert graded("super_glue_record", targets, ["wrong", "us", "Ann Lee", "bob!"], examples) == close(
        em=200 / 3, f1=200 / 3
    )


def test_squad_takes_the_best_of_all_answers():
    examples = [{"answers": [b"the red car ", b"car "]}, {"answers": ["café".encode()]}, {"answers": [b"1 , 000 "]}]
    targets = ["the red car ", "café", "1 , 000 "]
    assert graded("squad_allanswers", targets, ["a car", "cafe", "1 000"], examples) == close(em=200 / 3, f1=200 / 3)
    # "red bus" shares a word of two with "red car".
    assert graded("squad_allanswers", targets, ["red bus", "Café.", ""], examples) == close(em=100 / 3, f1=50)


@pytest.mark.parametrize("name", ["super_glue_wsc_simple_eval", "glue_wnli_simple_eval"])
def test_schemas_are_graded_by_whether_the_noun_is_named(name):
    def example(noun, label):
        return {"targets_pretokenized": noun.encode(), "label": np.int64(label)}

    cases = (
        ("the fuzzy bunny", 1, "Bunny", True),
        ("bunny", 1, "a fuzzy bunny", True),
        ("Bob", 1, "Bob's hat", False),
        ("Bob's hat", 1, "his bob's hat", True),
        ("Bob", 0, "Tom", True),
        ("Bob", 0, "bob", False),
        ("Bob", 1, "", False),
        ("Bob", 0, "", False),
        ("Bob", 0, "the", False),
    )
    for noun, label, answer, right in cases:
        assert graded(name, [noun], [answer], [example(noun, label)]) == {"accuracy": 100.0 * right}, (noun, answer)
    nouns, _, answers, right = zip(*cases, strict=True)
    examples = [example(noun, label) for noun, label, *_ in cases]
    assert graded(name, nouns, answers, examples) == close(accuracy=100 * sum(right) / len(right))


# Beside formulas


def accuracy(targets, answers):
    return sum(t == a for t, a in zip(targets, answers, strict=True)) / len(targets)


def f1(targets, answers, positive):
    both, said, there = (
        sum(t == positive and a == positive for t, a in zip(targets, answers, strict=True)),
        answers.count(positive),
        targets.count(positive),
    )
    return 2 * both / (said + there) if said + there else 0.0


def opposite_for_no_label(targets, answers, labels):
    return [a if a in labels else labels[1 - labels.index(t)] for t, a in zip(targets, answers, strict=True)]


def matthews(targets, answers):
    """Gorodkin 2004 as the correlation of indicator vectors, the mean over classes taken out."""
    classes = sorted({*targets, *answers})
    one, two = (np.array([[x == c for c in classes] for x in rows], float) for rows in (targets, answers))
    one, two = one - one.mean(0), two - two.mean(0)
    return (one * two).sum() / math.sqrt((one * one).sum() * (two * two).sum())


def pearson(one, two):
    one, two = np.array(one) - np.mean(one), np.array(two) - np.mean(two)
    return one @ two / math.sqrt((one @ one) * (two @ two))


def ranks(values):
    """Equal values share the mean of their places."""
    return [sum(v < x for v in values) + (values.count(x) + 1) / 2 for x in values]


def words(text):
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def overlap(answer, target):
    shared = sum((collections.Counter(words(answer)) & collections.Counter(words(target))).values())
    return 2 * shared / (len(words(answer)) + len(words(target))) if shared else 0.0


def drawn(labels, rows=300, seed=0):
    """Targets, and answers of which 70 % are right, 15 % another label and 15 % none."""
    draw = random.Random(seed)
    targets = [draw.choice(labels) for _ in range(rows)]
    kinds = draw.choices("rln", (70, 15, 15), k=rows)
    choices = {"l": labels, "n": ("", "no label", labels[0].upper())}
    return targets, [t if kind == "r" else draw.choice(choices[kind]) for t, kind in zip(targets, kinds, strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_metrics_agree_with_their_formulas(seed):
    labels = ["unacceptable", "acceptable"]
    targets, answers = drawn(labels, seed=seed)
    none_as_one = [a if a in labels else None for a in answers]
    numbered = [["unacceptable", "acceptable", None].index(a) for a in none_as_one]
    assert graded("glue_cola", targets, answers) == close(
        matthews_corrcoef=100 * matthews([labels.index(t) for t in targets], numbered)
    )

    labels = ["not_duplicate", "duplicate"]
    targets, answers = drawn(labels, seed=seed)
    assert graded("glue_qqp", targets, answers) == close(
        f1=100 * f1(targets, opposite_for_no_label(targets, answers, labels), "duplicate"),
        accuracy=100 * accuracy(targets, answers),
    )

    labels = ["entailment", "contradiction", "neutral"]
    targets, answers = drawn(labels, seed=seed)
    assert graded("super_glue_cb", targets, answers) == close(
        mean_3class_f1=100 * np.mean([f1(targets, answers, label) for label in labels]),
        accuracy=100 * accuracy(targets, answers),
    )


@pytest.mark.parametrize("seed", range(3))
def test_correlations_agree_with_their_formulas(seed):
    """In fifths, so that most values are tied; "none" stands for -1."""
    targets, answers = drawn([f"{fifths / 5:.1f}" for fifths in range(26)], seed=seed)
    one, two = ([float(x) if re.fullmatch(r"\d\.\d", x) else -1.0 for x in rows] for rows in (targets, answers))
    assert graded("glue_stsb", targets, answers) == close(
        pearson_corrcoef=100 * pearson(one, two), spearman_corrcoef=100 * pearson(ranks(one), ranks(two))
    )


@pytest.mark.parametrize("seed", range(3))
def test_grouped_metrics_agree_with_their_formulas(seed):
    draw = random.Random(seed)
    labels = ["False", "True"]
    targets, answers = drawn(labels, seed=seed)
    questions = [draw.randrange(120) for _ in targets]
    examples = [{"idx/question": q} for q in questions]
    opposite = opposite_for_no_label(targets, answers, labels)
    wrong = {q for q, t, a in zip(questions, targets, answers, strict=True) if t != a}
    assert graded("super_glue_multirc", targets, answers, examples) == close(
        f1=100 * f1(targets, opposite, "True"), exact_match=100 * (1 - len(wrong) / len(set(questions)))
    )

    names = ["The Tom Fox", "tom", "Ann Fox", "Ann-Lee", "U.S.", "an elk", "Ann"]
    queries = [(draw.randrange(9), draw.randrange(9)) for _ in range(200)]
    accepted = {query: draw.sample(names, draw.randint(1, 3)) for query in queries}
    examples = [{"idx/passage": p, "idx/query": q, "answers": [a.encode() for a in accepted[p, q]]} for p, q in queries]
    answers = [draw.choice((*names, "", "Ann Tom")) for _ in queries]
    first = dict(reversed(list(zip(queries, answers, strict=True))))
    exact = [max(words(a) == words(t) for t in accepted[query]) for query, a in first.items()]
    shared = [max(overlap(a, t) for t in accepted[query]) for query, a in first.items()]
    assert graded("super_glue_record", ["-"] * 200, answers, examples) == close(
        em=100 * np.mean(exact), f1=100 * np.mean(shared)
    )


def test_grading_leaves_answers_as_they_are():
    """A task's metrics get the same answers one after the other. (t5's F1 would write into an array.)"""
    answers = [-1, -1, 1]
    for metric in seqio.TaskRegistry.get("glue_mrpc").metric_fns:
        metric([1, 0, 1], answers)
        assert answers == [-1, -1, 1]
