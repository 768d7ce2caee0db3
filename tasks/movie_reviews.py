"""Reviews of films: is it a good one? Targets are "negative" or "positive", with the ids 0 and 1.

movie_reviews, movie_reviews_class    sentences of Rotten Tomatoes (Pang and Lee 2005), from the files
                                      movie_reviews/rt-polarity.{pos,neg}. They have no splits: of each class the first
                                      80 % are for training, then 10 % for validation, then 10 % for test, as in Hugging
                                      Face's rotten_tomatoes.
imdb_reviews, imdb_reviews_class      whole reviews (Maas et al. 2011), from TFDS, which has the splits train and test:
                                      "validation" is the last 5 % of train, which "train" leaves out.

    movie_reviews          inputs "movie_reviews text: a gem of a film .", targets "positive"
    movie_reviews_class    for a classifier: the text alone, and the label's id.

Metric: accuracy in %.
"""

import pathlib
from collections.abc import Sequence

import tensorflow as tf

from synthesizer_jax.tasks import classification, sources

LABELS = ("negative", "positive")
FILES = ("movie_reviews/rt-polarity.neg", "movie_reviews/rt-polarity.pos")
ORIGIN = "unpack sentence polarity v1.0 of https://www.cs.cornell.edu/people/pabo/movie-review-data as movie_reviews/"
Example = dict[str, str | int]


def read_sentences(negative: pathlib.Path, positive: pathlib.Path) -> list[Example]:
    return [
        {"text": text, "label": label}
        for label, path in enumerate((negative, positive))
        for text in dict.fromkeys(line.strip() for line in _decoded(path).split("\n"))
        if text
    ]


def _decoded(path: pathlib.Path) -> str:
    """The authors' files are in Windows' code page, those that others pass on often in UTF-8."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("cp1252")


def part(split: str, examples: Sequence[Example]) -> list[Example]:
    """A split's sentences, the two classes in turn."""
    classes = [[example for example in examples if example["label"] == label] for label in range(len(LABELS))]
    wanted = []
    for one in classes:
        first, second = (int(len(one) * share + 0.5) for share in (0.8, 0.9))
        wanted.append({"train": one[:first], "validation": one[first:second], "test": one[second:]}[split])
    longest = max(map(len, wanted))
    return [one[number] for number in range(longest) for one in wanted if number < len(one)]


def sentence(example):
    return example["text"]


def review(example):
    """Without the line breaks of HTML."""
    return tf.strings.strip(tf.strings.regex_replace(example["text"], r"(\s*<br\s*/?>\s*)+", " "))


classification.add(
    "movie_reviews",
    sources.Files({split: FILES for split in ("train", "validation", "test")}, read_sentences, ORIGIN, part),
    LABELS,
    sentence,
)
classification.add(
    "imdb_reviews",
    sources.Tfds(
        "imdb_reviews/plain_text:1.0.0", {"train": "train[:95%]", "validation": "train[95%:]", "test": "test"}
    ),
    LABELS,
    review,
)
