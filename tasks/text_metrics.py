"""Metrics of what a model says against references, in the units of the papers' tables: 100 is full agreement.

bleu_1             BLEU of single words over the corpus, with its brevity penalty (sacreBLEU).
rouge_l            F1 of the longest common subsequence (rouge_score), the mean over examples.
meteor             METEOR (NLTK), the mean over examples; "meteor_exact_stem" where NLTK has no WordNet, see there.
cider              CIDEr-D, the mean over examples; full agreement is 1000.
embedding_average  Cosine of the average word vectors, the mean over examples; left out where there are no vectors.

Each takes `targets`, for each example a reference or a list of them, and `predictions`, a text for each, and returns
{name: value}. With several references the best one counts; CIDEr takes their mean, BLEU the words of any. A text without
words agrees with nothing. Words are what white space separates, in the case that they have: right for text whose
punctuation is set apart, such as PersonaChat's, and what nlg-eval does. Embeddings split "i'm" besides.
"""

import collections
import itertools
import math
import os
import pathlib
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import sacrebleu
from absl import logging
from nltk.corpus import wordnet
from nltk.tokenize import NLTKWordTokenizer, WhitespaceTokenizer
from nltk.translate import meteor_score
from rouge_score import rouge_scorer

from synthesizer_jax.tasks import sources

Targets = Sequence[str] | Sequence[Sequence[str]]


def bleu_1(targets: Targets, predictions: Sequence[str]) -> dict[str, float]:
    references = _references(targets, predictions)
    # force: no warning that the text looks tokenized, which it is.
    bleu = sacrebleu.BLEU(max_ngram_order=1, tokenize="none", force=True)
    return {"bleu_1": bleu.corpus_score(predictions, list(itertools.zip_longest(*references))).score}


def rouge_l(targets: Targets, predictions: Sequence[str]) -> dict[str, float]:
    """The plain mean; t5's `rouge` draws bootstrap samples, so its values differ from run to run."""
    references = _references(targets, predictions)
    scorer = rouge_scorer.RougeScorer(["rougeL"], tokenizer=WhitespaceTokenizer())
    scores = (scorer.score_multi(of_one, text) for of_one, text in zip(references, predictions, strict=True))
    return {"rouge_l": _mean_in_percent(score["rougeL"].fmeasure for score in scores)}


# METEOR


class _NoSynonyms:
    def synsets(self, word: str) -> tuple:
        return ()


def meteor(targets: Targets, predictions: Sequence[str]) -> dict[str, float]:
    """METEOR with the parameters of Lavie & Agarwal (2007): 0.9, 3, 0.5. An example of m words scores 1 - 0.5 / m^3 at
    most. In lower case.

    Words are matched as they are, then by stem (Porter), then as synonyms of WordNet. Where NLTK finds no WordNet
    (`python -m nltk.downloader wordnet` gets it), nothing is matched as synonyms and the metric has the name of what it
    is, "meteor_exact_stem". It is lower: of answers that repeat what was said in PersonaChat 10.5 instead of 11.4, and
    would differ more if NLTK did not look up the stems that are left, of which few are words. Neither compares with
    METEOR 1.5 of nlg-eval and coco-caption, which matches paraphrases besides, has other parameters, and gives less.
    """
    references = _references(targets, predictions)
    name, synonyms = "meteor", wordnet
    try:
        wordnet.ensure_loaded()
    except (LookupError, OSError):  # none, or one without all of its files
        name, synonyms = "meteor_exact_stem", _NoSynonyms()
    scores = (
        meteor_score.meteor_score([reference.split() for reference in of_one], text.split(), wordnet=synonyms)
        for of_one, text in zip(references, predictions, strict=True)
    )
    return {name: _mean_in_percent(scores)}


# CIDEr

NGRAMS = 4
SIGMA = 6.0  # words: of the Gaussian in the difference of lengths

Counts = list[collections.Counter]  # of a text's n-grams, for n = 1 ... NGRAMS
Vectors = list[dict[tuple[str, ...], float]]


def cider(targets: Targets, predictions: Sequence[str]) -> dict[str, float]:
    """CIDEr-D (Vedantam et al. 2015, section 8), which nlg-eval and coco-caption report as CIDEr; without stemming.

    For a prediction c and references s_j, with g_n(.) = count * log(N / df) over n-grams, df the number of the N
    examples of which a reference has the n-gram, and l the number of words:

        10 * mean_n mean_j exp(-(l_c - l_j)^2 / 2 sigma^2) * min(g_n(c), g_n(s_j)) . g_n(s_j) / |g_n(c)| |g_n(s_j)|

    N and df come from the references given, those of the evaluated examples: a part of a split has other values than
    the whole, and a single example has 0.
    """
    references = [[_ngrams(text) for text in of_one] for of_one in _references(targets, predictions)]
    frequency = collections.Counter(ngram for of_one in references for ngram in _of_any(of_one))
    examples = len(references)

    def vectors(counts: Counts) -> Vectors:
        rarity = {ngram: math.log(examples / max(1, frequency[ngram])) for of_n in counts for ngram in of_n}
        return [{ngram: count * rarity[ngram] for ngram, count in of_n.items()} for of_n in counts]

    def similarity(prediction: Counts, reference: Counts) -> float:
        longer = prediction[0].total() - reference[0].total()
        cosines = map(_clipped_cosine, vectors(prediction), vectors(reference))
        return math.exp(-(longer**2) / (2 * SIGMA**2)) * sum(cosines) / NGRAMS

    def score(prediction: Counts, of_one: list[Counts]) -> float:
        return 10 * sum(similarity(prediction, reference) for reference in of_one) / len(of_one)

    return {"cider": _mean_in_percent(map(score, map(_ngrams, predictions), references))}


def _ngrams(text: str) -> Counts:
    words = text.split()
    return [
        collections.Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))
        for n in range(1, NGRAMS + 1)
    ]


def _of_any(of_one: list[Counts]) -> set[tuple[str, ...]]:
    return {ngram for counts in of_one for of_n in counts for ngram in of_n}


def _clipped_cosine(prediction: dict, reference: dict) -> float:
    """The prediction's weights count up to the reference's, so that repeating a word does not pay."""
    norms = math.hypot(*prediction.values()) * math.hypot(*reference.values())
    common = prediction.keys() & reference.keys()
    return math.fsum(min(prediction[n], reference[n]) * reference[n] for n in common) / norms if norms else 0.0


# Embeddings

VECTORS = "glove/glove.6B.300d.txt"
HOW = (
    f"give word vectors in GloVe's text format as {VECTORS} in the folder that {sources.ENVIRONMENT} names; they are in "
    "https://nlp.stanford.edu/data/glove.6B.zip"
)


def embedding_average(targets: Targets, predictions: Sequence[str]) -> dict[str, float]:
    """Cosine of the average word vectors (Liu et al. 2016), with the vectors of nlg-eval (Sharma et al. 2017).

    As Liu et al. do, and other than nlg-eval, which gives it the mean of all vectors: a word without a vector is left
    out. A prediction without any counts 0, an example whose references have none does not count.

    Where there are no vectors, a line says how to give them, and the metric is not among the results.
    """
    references = _references(targets, predictions)
    path = pathlib.Path(os.environ.get(sources.ENVIRONMENT, ""), VECTORS)
    if sources.ENVIRONMENT not in os.environ or not path.is_file():
        logging.warning("embedding_average is left out: %s", HOW)
        return {}
    split = NLTKWordTokenizer().tokenize
    texts = [*predictions, *itertools.chain.from_iterable(references)]
    words = {text: split(text) for text in texts}
    vectors = read_vectors(path, set(itertools.chain.from_iterable(words.values())))
    directions = {text: _direction([vectors[word] for word in words[text] if word in vectors]) for text in texts}
    scores = [
        max(_cosine(directions[text], directions[one]) for one in of_one if directions[one] is not None)
        for of_one, text in zip(references, predictions, strict=True)
        if any(directions[one] is not None for one in of_one)
    ]
    return {"embedding_average": _mean_in_percent(scores)} if scores else {}


def read_vectors(path: str | os.PathLike, words: Collection[str]) -> dict[str, np.ndarray]:
    """The vectors of these words, of those that the file has; a word and its numbers on a line, the first line counts."""
    wanted = {word.encode(): word for word in words}
    found: dict[str, np.ndarray] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            word, _, values = line.partition(b" ")
            if wanted.get(word, "") in found or word not in wanted:
                continue
            try:
                found[wanted[word]] = np.array([float(value) for value in values.split()])
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: expected a word and numbers: {error}; {HOW}") from error
    sizes = {vector.size for vector in found.values()}
    if len(sizes) > 1 or 0 in sizes:
        raise ValueError(f"{path}: expected as many numbers on each line, got {sorted(sizes)}; {HOW}")
    return found


def _direction(vectors: list[np.ndarray]) -> np.ndarray | None:
    """The average, of length 1; None where it has no direction."""
    total = np.sum(vectors, axis=0)
    length = np.linalg.norm(total)
    return total / length if length else None


def _cosine(one: np.ndarray | None, other: np.ndarray) -> float:
    return 0.0 if one is None else float(one @ other)


# Arguments and results


def _references(targets: Targets, predictions: Sequence[str]) -> list[list[str]]:
    """A list of references for each example."""
    if len(targets) != len(predictions) or not len(targets):
        raise ValueError(
            f"targets: expected one for each prediction, at least one; got {len(targets)} and {len(predictions)} predictions"
        )
    references = [[target] if isinstance(target, str) else list(target) for target in targets]
    if not all(references):
        raise ValueError(f"targets: expected a reference for each example, number {references.index([])} has none")
    return references


def _mean_in_percent(scores: Iterable[float]) -> float:
    scores = list(scores)
    return 100 * math.fsum(scores) / len(scores)


DIALOGUE = (bleu_1, rouge_l, meteor, cider, embedding_average)
