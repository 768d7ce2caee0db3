"""What the tasks share: features over T5's vocabulary, and the preprocessors that every task ends with.

seqio.TaskRegistry.add(
    "my_task",
    source=sources.Tfds("glue/rte:2.0.0", splits=("train", "validation")),
    preprocessors=[make_inputs_and_targets_text, *features.TOKENIZED],
    output_features=features.TEXT_TO_TEXT,
    metric_fns=[...],
)
"""

import functools
from collections.abc import Sequence

import seqio
from t5.data import preprocessors

from synthesizer_jax.tasks.labels import LabelVocabulary
from synthesizer_jax.tasks.vocabulary import T5Vocabulary

VOCABULARY = T5Vocabulary()

# Of an encoder-decoder; "inputs" may be missing until a preprocessor such as span_corruption makes them.
TEXT_TO_TEXT = {
    "inputs": seqio.Feature(vocabulary=VOCABULARY, add_eos=True, required=False),
    "targets": seqio.Feature(vocabulary=VOCABULARY, add_eos=True),
}
# Of a language model.
TEXT = {"targets": TEXT_TO_TEXT["targets"]}

# Text of documents as targets, for an objective such as span corruption, which makes the inputs.
DOCUMENTS = (
    functools.partial(preprocessors.rekey, key_map={"inputs": None, "targets": "text"}),
    seqio.preprocessors.tokenize,
    seqio.CacheDatasetPlaceholder(),
)

TOKENIZED = (
    seqio.preprocessors.tokenize,
    seqio.CacheDatasetPlaceholder(),
    seqio.preprocessors.append_eos_after_trim,
)


def classes(labels: Sequence[str]) -> dict[str, seqio.Feature]:
    """Of a classifier: text, and one of these labels, whose place among them is its id."""
    return TEXT_TO_TEXT | {"targets": seqio.Feature(vocabulary=LabelVocabulary(labels), add_eos=False)}
