"""A classification of texts as two tasks: for an encoder-decoder, which writes the label, and for a classifier.

With the name "my_texts" and the labels ("bad", "good"):

my_texts          inputs "my_texts text: What a film!", targets "good"
my_texts_class    inputs "What a film!", targets the label's id, 1

Metric: accuracy in %; an answer that is no label is wrong.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import seqio
import tensorflow as tf
from t5.data import postprocessors
from t5.evaluation import metrics

from synthesizer_jax.tasks import features

Text = Callable[[Mapping[str, tf.Tensor]], tf.Tensor]


def add(name: str, source: seqio.DataSource, labels: Sequence[str], text: Text) -> None:
    """Registers both tasks; the source's examples have a "label", its place among `labels`. `text` makes their text."""
    seqio.TaskRegistry.add(
        name,
        source=source,
        preprocessors=[
            functools.partial(labelled, prefix=f"{name} text: ", labels=labels, text=text),
            *features.TOKENIZED,
        ],
        postprocess_fn=functools.partial(postprocessors.string_label_to_class_id, label_classes=labels),
        output_features=features.TEXT_TO_TEXT,
        metric_fns=[metrics.accuracy],
    )
    seqio.TaskRegistry.add(
        f"{name}_class",
        source=source,
        preprocessors=[functools.partial(labelled, prefix="", labels=labels, text=text), *features.TOKENIZED],
        output_features=features.classes(labels),
        metric_fns=[metrics.accuracy],
    )


@seqio.map_over_dataset
def labelled(example: Mapping[str, tf.Tensor], prefix: str, labels: Sequence[str], text: Text) -> dict[str, tf.Tensor]:
    return {
        "inputs": tf.strings.join([prefix, text(example)]),
        "targets": tf.gather(tf.constant(list(labels)), example["label"]),
    }
