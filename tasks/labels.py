"""The labels of a classification task as a vocabulary: a label's text is one id, its place among the labels.

    seqio.Feature(vocabulary=LabelVocabulary(("false", "true")), add_eos=False)

is the "targets" of a task for a classifier: seqio.preprocessors.tokenize makes class ids of the labels' text.
"""

from collections.abc import Sequence

import seqio
import tensorflow as tf


class LabelVocabulary(seqio.Vocabulary):
    """`labels` in the order of their ids, from 0. An unknown label is an error, never another label."""

    def __init__(self, labels: Sequence[str]):
        if len(set(labels)) != len(labels) or len(labels) < 2:
            raise ValueError(f"labels: expected two or more, no two alike, got {tuple(labels)}")
        self.labels = tuple(labels)
        super().__init__()

    @property
    def _base_vocab_size(self) -> int:
        return len(self.labels)

    @property
    def bos_id(self) -> None:
        return None

    @property
    def eos_id(self) -> None:
        return None

    @property
    def unk_id(self) -> None:
        return None

    def _encode(self, s: str) -> list[int]:
        if s not in self.labels:
            raise ValueError(f"label: expected one of {self.labels}, got {s!r}")
        return [self.labels.index(s)]

    def _decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.labels[i] for i in ids)

    def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
        found = tf.where(tf.equal(tf.constant(self.labels), s))[:, 0]
        check = tf.debugging.assert_equal(tf.size(found), 1, f"expected one of the labels {self.labels}")
        with tf.control_dependencies([check] if check is not None else []):
            return tf.cast(tf.reshape(found, [1]), tf.int32)

    def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.strings.reduce_join(tf.gather(tf.constant(self.labels), ids), axis=-1, separator=" ")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LabelVocabulary) and self.labels == other.labels

    def __hash__(self) -> int:
        return hash(self.labels)

    def __str__(self) -> str:
        return f"LabelVocabulary({self.labels})"
