"""A trained model on today's devices: tokens and scores for any number of examples, in padded batches.

Every host goes through the same examples in the same batches, of which it places its own part.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax import sharding
from synthesizer_jax.decoding import greedy
from synthesizer_jax.models import EncoderDecoderConfig
from synthesizer_jax.models.parameters import Tree, bind

Example = TypeVar("Example")
Features = Callable[[Example], Mapping[str, np.ndarray]]  # an example's model features, in seqio's names


@dataclasses.dataclass(frozen=True)
class Predictor:
    """A model, the sizes of its batches and the tokens that it may say."""

    config: EncoderDecoderConfig
    trained: Tree  # laid out on `mesh`
    fixed: Tree
    mesh: jax.sharding.Mesh
    batch_size: int  # rounded up to a multiple of the devices that share a batch
    input_length: int  # tokens; shorter examples are padded
    target_length: int
    eos_id: int
    vocab_size: int  # ids from here on are never produced

    def predict(self, examples: Iterable[Example], features: Features) -> Iterator[tuple[Example, np.ndarray]]:
        """Each example with the tokens that the model answers to its encoder_input_tokens, [target_length]."""
        widths = {"encoder_input_tokens": self.input_length}
        return self._in_batches(examples, features, widths, self._decode)

    def score(self, examples: Iterable[Example], features: Features) -> Iterator[tuple[Example, np.ndarray]]:
        """Each example with the log-likelihood of its decoder_target_tokens, summed over them."""
        targets = ("decoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights")
        widths = {"encoder_input_tokens": self.input_length} | dict.fromkeys(targets, self.target_length)
        return self._in_batches(examples, features, widths, self._score)

    def _in_batches(self, examples, features, widths, function):
        """The last batch is filled up with its last row, not with padding, which would decode to the very end."""
        size = -(-self.batch_size // self._shards) * self._shards
        examples = iter(examples)
        while chunk := list(itertools.islice(examples, size)):
            rows = [features(example) for example in chunk]
            rows += rows[-1:] * (size - len(rows))
            batch = {name: np.stack([_padded(row[name], width) for row in rows]) for name, width in widths.items()}
            with jax.set_mesh(self.mesh):
                yield from zip(chunk, np.asarray(function(self._place(batch))), strict=False)

    @property
    def _shards(self) -> int:
        return self.mesh.shape[sharding.DATA] * self.mesh.shape[sharding.FSDP]

    def _place(self, batch):
        split = sharding.batch_sharding(self.mesh)
        return {name: jax.make_array_from_callback(rows.shape, split, rows.__getitem__) for name, rows in batch.items()}

    def _decode(self, batch):
        limits = (self.target_length, self.eos_id, self.vocab_size)
        return _decode(self.config, *limits, self.trained, self.fixed, batch["encoder_input_tokens"])

    def _score(self, batch):
        return _score(self.config, self.trained, self.fixed, batch)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _decode(config, max_length, eos_id, vocab_size, trained, fixed, inputs):
    model = bind(config, trained, fixed)
    cache = model.init_cache(inputs, max_length)
    options = {"batch": inputs.shape[0], "max_length": max_length, "eos_id": eos_id, "vocab_size": vocab_size}
    return _on_every_host(greedy(model.decode_step, cache, **options))


@functools.partial(jax.jit, static_argnums=0)
def _score(config, trained, fixed, batch):
    logits = bind(config, trained, fixed)(batch["encoder_input_tokens"], batch["decoder_input_tokens"])
    targets = batch["decoder_target_tokens"]
    log_likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return _on_every_host(jnp.sum(log_likelihood, axis=-1, where=batch["decoder_loss_weights"] > 0))


def _on_every_host(array):
    return jax.lax.with_sharding_constraint(array, jax.sharding.PartitionSpec())


def _padded(ids: np.ndarray, width: int) -> np.ndarray:
    return np.pad(np.asarray(ids[:width], np.int32), (0, width - len(ids[:width])))
