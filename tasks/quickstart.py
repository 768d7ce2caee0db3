"""The quickstart's tasks, from text that ships with Python. Targets of the fine-tuning tasks are "true" or "false".

For encoder-decoders:

quickstart_span_corruption   T5's pretraining objective.
quickstart_negation          One sentence: does it deny something?
                             inputs "negation the value of the object is not returned"
quickstart_number            A pair: is the word of the second in the first, but in the other number?
                             inputs "number the value of the object is returned: objects"
quickstart_finetune          A mixture of the last two, one to three: the second takes longer to learn.

For a language model and for a classifier:

quickstart_lm                Sentences, each an example with "targets" alone.
quickstart_negation_class    quickstart_negation with the class's id, 0 or 1, as its target.

Negation is answered by what words there are. Number needs a comparison: which of the words counts depends on the
other part, which stands at no fixed place, and false examples ask for words as frequent as the true ones do. (Asking for
the same word would be harder for dot-product attention, not easier: without masks each word attends to itself best.)

The classes are equally frequent. Validation examples are made from text that is not in the training split. Examples are
drawn with a fixed seed, so they are the same in every process.
"""

import collections
import functools
import pathlib
import random
import re
from collections.abc import Callable

import seqio
from t5.data import postprocessors, preprocessors
from t5.evaluation import metrics

from synthesizer_jax.tasks import features, labels, quickstart_text, sources


VOCABULARY = seqio.SentencePieceVocabulary(str(pathlib.Path(__file__).with_name("quickstart.model")), extra_ids=100)
LABELS = ("false", "true")
EXAMPLES = {"train": 32768, "validation": 1024}  # of each of the two fine-tuning tasks
WORDS = (8, 12)  # least and most words of a sentence
NOUNS = 32  # pairs of singular and plural
NEGATIONS = frozenset("not no none never nothing cannot without neither nor".split())

Example = dict[str, str]


def documents(split: str) -> list[Example]:
    """A document for each topic."""
    return [{"text": " ".join(paragraphs)} for paragraphs in quickstart_text.corpus()[split].values()]


def sentences(split: str) -> list[Example]:
    """Each sentence of the text."""
    return [{"targets": sentence} for sentence in quickstart_text.sentences(split)]


def negation_examples(split: str) -> list[Example]:
    return _alternating(split, "negation", _negation)


def number_examples(split: str) -> list[Example]:
    return _alternating(split, "number", _number)


def _alternating(split: str, name: str, make: Callable[[random.Random, list[list[str]], bool], str]) -> list[Example]:
    """As many true examples as false ones; none for training that stands in validation, as stock phrases would."""
    held_out = {e["inputs"] for e in _alternating("validation", name, make)} if split == "train" else set()
    draw = random.Random(f"{name} {split}")
    texts = _texts(split)
    examples = []
    while len(examples) < EXAMPLES[split]:
        label = LABELS[len(examples) % 2]
        inputs = f"{name} {make(draw, texts, label == 'true')}"
        if inputs not in held_out:
            examples.append({"inputs": inputs, "targets": label})
    return examples


@functools.lru_cache(maxsize=None)
def _texts(split: str) -> list[list[str]]:
    """The words of each paragraph that is long enough."""
    paragraphs = [paragraph for topic in quickstart_text.corpus()[split].values() for paragraph in topic]
    return [words for words in map(_words, paragraphs) if len(words) >= WORDS[1]]


def _words(text: str) -> list[str]:
    return re.findall("[a-z]+", text.lower())


def _negation(draw: random.Random, texts: list[list[str]], label: bool) -> str:
    return " ".join(_sentence(draw, texts, lambda words: NEGATIONS.isdisjoint(words) != label))


def _number(draw: random.Random, texts: list[list[str]], label: bool) -> str:
    other = other_number()

    def asked(words):
        """The words of the other number that a true example of these words may ask for."""
        return [other[word] for word in words if word in other and other[word] not in words]

    words = _sentence(draw, texts, asked)
    word = draw.choice(asked(words))
    while not label and (word in words or other[word] in words):
        word = draw.choice(asked(_sentence(draw, texts, asked)))
    return f"{' '.join(words)}: {word}"


def _sentence(draw: random.Random, texts: list[list[str]], good: Callable[[list[str]], object]) -> list[str]:
    """A run of words of which `good` is true."""
    while True:
        text = draw.choice(texts)
        length = draw.randint(*WORDS)
        start = draw.randint(0, len(text) - length)
        words = text[start : start + length]
        if good(words):
            return words


@functools.lru_cache(maxsize=None)
def other_number() -> dict[str, str]:
    """Singular -> plural and plural -> singular of the most frequent nouns whose forms are one piece each."""
    count = collections.Counter(word for text in _texts("train") for word in text)
    pairs = [(word, f"{word}s") for word in count if len(word) > 2 and count[f"{word}s"]]
    pairs = [pair for pair in pairs if all(len(VOCABULARY.encode(word)) == 1 for word in pair)]
    pairs.sort(key=lambda pair: (-min(count[word] for word in pair), pair))
    return {word: other for pair in pairs[:NOUNS] for word, other in (pair, pair[::-1])}


OUTPUT_FEATURES = {name: seqio.Feature(vocabulary=VOCABULARY, add_eos=True) for name in ("inputs", "targets")}

seqio.TaskRegistry.add(
    "quickstart_span_corruption",
    source=sources.Examples(documents, quickstart_text.SPLITS),
    preprocessors=[
        *features.DOCUMENTS,
        preprocessors.span_corruption,
        seqio.preprocessors.append_eos_after_trim,
    ],
    output_features=OUTPUT_FEATURES,
    metric_fns=[],
)

for _name, _examples in (("quickstart_negation", negation_examples), ("quickstart_number", number_examples)):
    seqio.TaskRegistry.add(
        _name,
        source=sources.Examples(_examples, quickstart_text.SPLITS),
        preprocessors=features.TOKENIZED,
        postprocess_fn=functools.partial(postprocessors.string_label_to_class_id, label_classes=LABELS),
        output_features=OUTPUT_FEATURES,
        metric_fns=[metrics.accuracy],
    )

seqio.TaskRegistry.add(
    "quickstart_lm",
    source=sources.Examples(sentences, quickstart_text.SPLITS),
    preprocessors=features.TOKENIZED,
    output_features={"targets": OUTPUT_FEATURES["targets"]},
    metric_fns=[],
)

seqio.TaskRegistry.add(
    "quickstart_negation_class",
    source=sources.Examples(negation_examples, quickstart_text.SPLITS),
    preprocessors=features.TOKENIZED,
    output_features=OUTPUT_FEATURES
    | {"targets": seqio.Feature(vocabulary=labels.LabelVocabulary(LABELS), add_eos=False)},
    metric_fns=[metrics.accuracy],
)

seqio.MixtureRegistry.add("quickstart_finetune", [("quickstart_negation", 1), ("quickstart_number", 3)])
