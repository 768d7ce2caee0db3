"""What a batch of each kind of model is made of, in seqio's names: said here, and nowhere else."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class BatchKeys:
    """The arrays of a batch, all of whole numbers: `inputs`, `targets` and `weights`, and all of `packing` or none.

    encoder_* are [b, length of "inputs"] and decoder_* [b, length of "targets"]; `labels` and `loss_weights` are [b].
    """

    kind: str  # of model, for messages
    task_features: tuple[str, ...]  # of the task, each with a length
    inputs: tuple[str, ...]  # what the model reads, in the order of its arguments
    targets: str  # what its logits are compared with
    weights: str  # 1 where a target is real, 0 at padding
    packing: tuple[str, ...]  # what the model reads besides where examples share rows; (): they can't

    @property
    def required(self) -> tuple[str, ...]:
        """The arrays of every batch."""
        return (*self.inputs, self.targets, self.weights)

    def shapes(self, rows: int, lengths: Mapping[str, int], packed: bool) -> dict[str, tuple[int, ...]]:
        """The shape of each array of a batch; lengths: of the task features."""
        sides = {"encoder": "inputs", "decoder": "targets"}
        side = {name: sides.get(name.split("_")[0]) for name in self.required + (self.packing if packed else ())}
        return {name: (rows,) if feature is None else (rows, lengths[feature]) for name, feature in side.items()}


ENCODER_DECODER = BatchKeys(
    kind="EncoderDecoder",
    task_features=("inputs", "targets"),
    inputs=("encoder_input_tokens", "decoder_input_tokens"),
    targets="decoder_target_tokens",
    weights="decoder_loss_weights",
    packing=("encoder_segment_ids", "encoder_positions", "decoder_segment_ids", "decoder_positions"),
)
DECODER_ONLY = BatchKeys(
    kind="DecoderOnly",
    task_features=("targets",),
    inputs=("decoder_input_tokens",),
    targets="decoder_target_tokens",
    weights="decoder_loss_weights",
    packing=("decoder_segment_ids", "decoder_positions"),
)
ENCODER_ONLY = BatchKeys(
    kind="EncoderOnly",
    task_features=("inputs",),
    inputs=("encoder_input_tokens",),
    targets="labels",
    weights="loss_weights",
    packing=(),
)
