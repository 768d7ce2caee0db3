"""From examples with a task's features to rows of what a kind of model reads."""

from collections.abc import Mapping

import seqio
import tensorflow as tf

from synthesizer_jax.data.providers import TARGETS
from synthesizer_jax.models.batch import DECODER_ONLY, ENCODER_DECODER, ENCODER_ONLY, BatchKeys


class LabelFeatureConverter(seqio.FeatureConverter):
    """For classifiers: an example's "inputs" and its class id to encoder_input_tokens, labels and loss_weights.

    {"inputs": [7, 8, 1], "targets": [2]} with {"inputs": 4, "targets": 1} gives
    {"encoder_input_tokens": [7, 8, 1, 0], "labels": 2, "loss_weights": 1}.
    """

    TASK_FEATURES = {
        "inputs": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32),
        TARGETS: seqio.FeatureConverter.FeatureSpec(dtype=tf.int32),
    }
    MODEL_FEATURES = {
        "encoder_input_tokens": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32),
        "labels": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32, rank=0),
        "loss_weights": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32, rank=0),
    }
    PACKING_FEATURE_DTYPES = None  # seqio refuses to pack then

    def _convert_features(self, ds, task_feature_lengths):
        def convert(example):
            label = tf.reshape(tf.ensure_shape(example[TARGETS], [1]), [])
            weight = tf.ones([], tf.int32)
            return {"encoder_input_tokens": example["inputs"], "labels": label, "loss_weights": weight}

        return self._pack_or_pad(ds, {"inputs": task_feature_lengths["inputs"]}).map(convert, tf.data.AUTOTUNE)

    def get_model_feature_lengths(self, task_feature_lengths):
        return {"encoder_input_tokens": task_feature_lengths["inputs"], "labels": 1, "loss_weights": 1}


_CONVERTERS = {
    ENCODER_DECODER: seqio.EncDecFeatureConverter,
    DECODER_ONLY: seqio.LMFeatureConverter,
    ENCODER_ONLY: LabelFeatureConverter,
}


def feature_converter(keys: BatchKeys, pack: bool = False) -> seqio.FeatureConverter:
    """From the task's features to those of a kind of model."""
    return _CONVERTERS[keys](pack=pack)


def model_dataset(
    dataset: tf.data.Dataset, lengths: Mapping[str, int], keys: BatchKeys, pack: bool = False
) -> tf.data.Dataset:
    """Rows of model features from examples with the task's features."""
    whole = dict(lengths) | ({TARGETS: 1} if keys == ENCODER_ONLY else {})  # a label is never cut, nor padded
    return feature_converter(keys, pack)(dataset, whole)
