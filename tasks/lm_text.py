"""Any text files as language-model data, and some well-known ones.

In a module of your own, which MIXTURE_OR_TASK_MODULE names on the command line:

    from synthesizer_jax.tasks import lm_text
    lm_text.add("my_text", train="/data/news-*.txt.gz", validation="/data/held_out.txt")

registers two tasks:

my_text                    for a language model: "targets" alone. Texts, each with its end, are joined and cut, so that
                           examples are "targets" tokens long.
my_text_span_corruption    for an encoder-decoder: T5's objective over the same texts.

Each line is a text; with documents=True the lines up to an empty one are. Metrics of the first: perplexity_per_word and
perplexity_per_subword (perplexity.py). T5's vocabulary knows no newline: within a text it becomes a space.

Registered here:

wikitext2           WikiText-2 (Merity et al. 2017), raw, a text for each paragraph and heading; from
                    wikitext-2-raw/wiki.{train,valid,test}.raw.
tiny_shakespeare    Karpathy's excerpt, a text for each speech, of which the first 90 % are for training, then 5 % for
                    validation, then 5 % for test; from tinyshakespeare/input.txt.
"""

import functools
import os
import pathlib
from collections.abc import Mapping, Sequence

import seqio
import tensorflow as tf
from t5.data import preprocessors

from synthesizer_jax.tasks import features, perplexity, sources

Paths = str | Sequence[str]


def add(
    name: str,
    *,
    train: Paths | None = None,
    validation: Paths | None = None,
    test: Paths | None = None,
    documents: bool = False,
) -> None:
    """Registers `name` and `name`_span_corruption over text files in UTF-8, which may be larger than memory.

    train, validation, test: a path or several, which may be patterns ("part-*.txt") and end in ".gz"; relative ones
    start at today's folder.
    """
    given = {"train": train, "validation": validation, "test": test}
    files = {split: _absolute(paths) for split, paths in given.items() if paths}
    if not files:
        raise ValueError(f'{name!r}: expected files, got none; give them as train="a.txt", validation="b.txt"')
    add_source(name, sources.Lines(files, "correct the path", documents))


def _absolute(paths: Paths) -> list[str]:
    return [path if "://" in path else os.path.abspath(path) for path in ([paths] if isinstance(paths, str) else paths)]


def add_source(name: str, source: seqio.DataSource) -> None:
    """Registers both tasks over examples with "text"."""
    seqio.TaskRegistry.add(
        name,
        source=source,
        preprocessors=[
            functools.partial(preprocessors.rekey, key_map={"targets": "text"}),
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            join_and_cut,
        ],
        postprocess_fn=perplexity.scored,
        output_features=features.TEXT,
        metric_fns=[perplexity.perplexities],
    )
    seqio.TaskRegistry.add(
        f"{name}_span_corruption",
        source=source,
        preprocessors=[
            *features.DOCUMENTS,
            preprocessors.span_corruption,
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features=features.TEXT_TO_TEXT,
        metric_fns=[],
    )


def join_and_cut(
    dataset: tf.data.Dataset, sequence_length: Mapping[str, int], output_features: Mapping[str, seqio.Feature]
) -> tf.data.Dataset:
    """Texts with their ends, 128 after one another, in pieces of "targets" tokens. No token is lost."""
    dataset = seqio.preprocessors.append_eos(dataset, output_features)
    dataset = preprocessors.reduce_concat_tokens(dataset, feature_key="targets", batch_size=128)
    return preprocessors.split_tokens(dataset, max_tokens_per_segment=sequence_length["targets"])


def read_speeches(path: pathlib.Path) -> list[dict[str, str]]:
    speeches = path.read_text(encoding="utf-8-sig").split("\n\n")
    return [{"text": speech.strip()} for speech in speeches if speech.strip()]


def part(split: str, examples: Sequence[dict[str, str]]) -> Sequence[dict[str, str]]:
    first, second = (int(len(examples) * share) for share in (0.9, 0.95))
    return {"train": examples[:first], "validation": examples[first:second], "test": examples[second:]}[split]


add_source(
    "wikitext2",
    sources.Lines(
        {
            split: [f"wikitext-2-raw/wiki.{name}.raw"]
            for split, name in (("train", "train"), ("validation", "valid"), ("test", "test"))
        },
        "unpack wikitext-2-raw-v1.zip",
    ),
)
add_source(
    "tiny_shakespeare",
    sources.Files(
        {split: ["tinyshakespeare/input.txt"] for split in ("train", "validation", "test")},
        read_speeches,
        "get data/tinyshakespeare/input.txt of https://github.com/karpathy/char-rnn as tinyshakespeare/input.txt",
        part,
    ),
)
