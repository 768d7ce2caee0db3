"""The quickstart's tasks, from text that ships with Python. Targets of the fine-tuning tasks are "true" or "false".

quickstart_span_corruption   T5's pretraining objective.
quickstart_order             One sentence: are its words in order, or shuffled?
                             inputs "order: the value of the object is returned"
quickstart_fragment          A pair: are the words of the first, in order, a part of the second?
                             inputs "fragment: the object is returned sentence: the value of the object is returned"
quickstart_finetune          A mixture of the last two, half and half.

The classes are equally frequent. Sentences of the validation split are not in the training split. Examples are drawn
with a fixed seed, so they are the same in every process.
"""

import functools
import pathlib
import random
import re
from collections.abc import Callable, Iterator, Sequence

import seqio
import tensorflow as tf
from t5.data import postprocessors, preprocessors
from t5.evaluation import metrics

from synthesizer_jax.tasks import quickstart_text

VOCABULARY = seqio.SentencePieceVocabulary(str(pathlib.Path(__file__).with_name("quickstart.model")), extra_ids=100)
LABELS = ("false", "true")
EXAMPLES = {"train": 16384, "validation": 1024}  # of each of the two fine-tuning tasks
WORDS = (6, 10)  # least and most words of a sentence
FRAGMENT = 4  # words

Example = dict[str, str]


class _Source(seqio.DataSource):
    """Examples from a function of the split. (seqio's FunctionDataSource warns of shuffling whenever it is used.)"""

    def __init__(self, examples: Callable[[str], Sequence[Example]]):
        super().__init__(splits=quickstart_text.SPLITS)
        self._examples = functools.lru_cache(maxsize=None)(examples)

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return False

    def list_shards(self, split: str) -> list[str]:
        return [split]

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        examples = self._examples(split)
        dataset = tf.data.Dataset.from_tensor_slices({name: [e[name] for e in examples] for name in examples[0]})
        return dataset.shuffle(len(examples), seed=seed, reshuffle_each_iteration=True) if shuffle else dataset


def documents(split: str) -> list[Example]:
    """A document for each topic."""
    return [{"text": " ".join(paragraphs)} for paragraphs in quickstart_text.corpus()[split].values()]


def order_examples(split: str) -> list[Example]:
    return list(_alternating(split, "order", _order))


def fragment_examples(split: str) -> list[Example]:
    return list(_alternating(split, "fragment", _fragment))


def _alternating(split: str, seed: str, make: Callable[..., str]) -> Iterator[Example]:
    """As many true examples as false ones."""
    draw = random.Random(f"{seed} {split}")
    sentences = [_words(sentence) for sentence in quickstart_text.sentences(split)]
    sentences = [words for words in sentences if len(words) >= WORDS[0]]
    for index in range(EXAMPLES[split]):
        label = LABELS[index % 2]
        yield {"inputs": make(draw, sentences, label == "true"), "targets": label}


def _words(sentence: str) -> list[str]:
    return re.findall("[a-z]+", sentence.lower())


def _order(draw: random.Random, sentences: list[list[str]], label: bool) -> str:
    words = _part(draw, draw.choice(sentences), draw.randint(*WORDS))
    shuffled = list(words)
    while not label and shuffled == words:
        draw.shuffle(shuffled)
    return f"order: {' '.join(shuffled)}"


def _fragment(draw: random.Random, sentences: list[list[str]], label: bool) -> str:
    words = _part(draw, draw.choice(sentences), draw.randint(*WORDS))
    fragment = _part(draw, words, FRAGMENT)
    while not label and set(fragment) <= set(words):
        fragment = _part(draw, draw.choice(sentences), FRAGMENT)
    return f"fragment: {' '.join(fragment)} sentence: {' '.join(words)}"


def _part(draw: random.Random, words: list[str], length: int) -> list[str]:
    start = draw.randint(0, max(0, len(words) - length))
    return words[start : start + length]


OUTPUT_FEATURES = {name: seqio.Feature(vocabulary=VOCABULARY, add_eos=True) for name in ("inputs", "targets")}

seqio.TaskRegistry.add(
    "quickstart_span_corruption",
    source=_Source(documents),
    preprocessors=[
        functools.partial(preprocessors.rekey, key_map={"inputs": None, "targets": "text"}),
        seqio.preprocessors.tokenize,
        seqio.CacheDatasetPlaceholder(),
        preprocessors.span_corruption,
        seqio.preprocessors.append_eos_after_trim,
    ],
    output_features=OUTPUT_FEATURES,
    metric_fns=[],
)

for _name, _examples in (("quickstart_order", order_examples), ("quickstart_fragment", fragment_examples)):
    seqio.TaskRegistry.add(
        _name,
        source=_Source(_examples),
        preprocessors=[
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        postprocess_fn=functools.partial(postprocessors.string_label_to_class_id, label_classes=LABELS),
        output_features=OUTPUT_FEATURES,
        metric_fns=[metrics.accuracy],
    )

seqio.MixtureRegistry.add("quickstart_finetune", ["quickstart_order", "quickstart_fragment"], default_rate=1.0)
