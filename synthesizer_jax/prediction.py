"""A trained model on today's devices: its answers and scores for any number of examples, in padded batches.

What a model answers: an encoder-decoder the target tokens of its inputs, a language model the continuation of a text, a
classifier one class. Every host goes through the same examples in the same batches, of which it places its own part.
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
from synthesizer_jax.models import DecoderOnlyConfig, EncoderOnlyConfig, ModelConfig
from synthesizer_jax.models.parameters import Tree, bind

PROMPT = "prompt"  # of a language model: tokens that its answer begins with

Example = TypeVar("Example")
Features = Callable[[Example], Mapping[str, np.ndarray]]  # an example's model features, in seqio's names


@dataclasses.dataclass(frozen=True)
class Predictor:
    """A model, the sizes of its batches and what it may say."""

    config: ModelConfig
    trained: Tree  # laid out on `mesh`
    fixed: Tree
    mesh: jax.sharding.Mesh
    batch_size: int  # rounded up to a multiple of the devices that share a batch
    lengths: Mapping[str, int]  # tokens of the task's features; shorter examples are padded
    eos_id: int | None  # None for a classifier
    vocab_size: int  # ids, or classes, from here on are never produced
    rules: sharding.Rules = sharding.Rules()  # where they differ from sharding.RULES

    def predict(self, examples: Iterable[Example], features: Features) -> Iterator[tuple[Example, np.ndarray]]:
        """Each example with what the model answers, ids.

        To encoder_input_tokens: tokens [length of "targets"], or a class [1]. To `prompt`, a language model's: the
        prompt and what follows it, [length of "targets"].
        """
        return self._in_batches(examples, features, *self._answering())

    def lower(self) -> jax.stages.Lowered:
        """What `predict` does to a batch, to be compiled; the parameters may be jax.ShapeDtypeStructs with shardings."""
        widths, _ = self._answering()
        split = sharding.batch_sharding(self.mesh)
        batch = {
            name: jax.ShapeDtypeStruct((self.batch_size, width), jnp.int32, sharding=split)
            for name, width in widths.items()
        }

        def answer(trained, fixed, batch):
            return dataclasses.replace(self, trained=trained, fixed=fixed)._answering()[1](batch)

        with sharding.on(self.mesh, self.rules):
            return jax.jit(answer).lower(self.trained, self.fixed, batch)

    def _answering(self):
        """(widths of what a batch is made of, batch -> answers)."""
        if isinstance(self.config, DecoderOnlyConfig):
            return {PROMPT: self.lengths["targets"]}, self._continue
        answer = self._classify if isinstance(self.config, EncoderOnlyConfig) else self._decode
        return {"encoder_input_tokens": self.lengths["inputs"]}, answer

    def score(self, examples: Iterable[Example], features: Features) -> Iterator[tuple[Example, np.ndarray]]:
        """Each example with the log-likelihood of its target, summed over the target's tokens."""
        shapes = self.config.batch.shapes(1, self.lengths, packed=False)
        widths = {name: shape[1] if len(shape) > 1 else None for name, shape in shapes.items()}
        return self._in_batches(examples, features, widths, self._score)

    def _in_batches(self, examples, features, widths, function):
        """The last batch is filled up with its last row, not with padding, which would decode to the very end."""
        shards = sharding.batch_shards(self.mesh)
        size = -(-self.batch_size // shards) * shards
        examples = iter(examples)
        while chunk := list(itertools.islice(examples, size)):
            rows = [features(example) for example in chunk]
            rows += rows[-1:] * (size - len(rows))
            batch = {name: np.stack([_padded(row[name], width) for row in rows]) for name, width in widths.items()}
            with sharding.on(self.mesh, self.rules):
                yield from zip(chunk, np.asarray(function(self._place(batch))), strict=False)

    def _place(self, batch):
        split = sharding.batch_sharding(self.mesh)
        return {name: jax.make_array_from_callback(rows.shape, split, rows.__getitem__) for name, rows in batch.items()}

    def _decode(self, batch):
        limits = (self.lengths["targets"], self.eos_id, self.vocab_size)
        return _decode(self.config, *limits, self.trained, self.fixed, batch["encoder_input_tokens"])

    def _continue(self, batch):
        return _continue(self.config, self.eos_id, self.vocab_size, self.trained, self.fixed, batch[PROMPT])

    def _classify(self, batch):
        return _classify(self.config, self.vocab_size, self.trained, self.fixed, batch["encoder_input_tokens"])

    def _score(self, batch):
        return _score(self.config, self.trained, self.fixed, batch)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _decode(config, max_length, eos_id, vocab_size, trained, fixed, inputs):
    model = bind(config, trained, fixed).for_decoding()
    options = {"batch": inputs.shape[0], "max_length": max_length, "eos_id": eos_id, "vocab_size": vocab_size}
    return _on_every_host(greedy(model.decode_step, model.init_cache(inputs, 1), grow=model.grow_cache, **options))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _continue(config, eos_id, vocab_size, trained, fixed, prompt):
    model = bind(config, trained, fixed).for_decoding()
    batch, max_length = prompt.shape
    options = {"batch": batch, "max_length": max_length, "eos_id": eos_id, "vocab_size": vocab_size}
    cheaper = {"grow": model.grow_cache, "read": model.prefill}
    return _on_every_host(greedy(model.decode_step, model.init_cache(batch, 1), prompt=prompt, **cheaper, **options))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _classify(config, classes, trained, fixed, inputs):
    logits = bind(config, trained, fixed)(inputs)[:, :classes]
    return _on_every_host(jnp.argmax(logits, axis=-1).astype(jnp.int32)[:, None])


@functools.partial(jax.jit, static_argnums=0)
def _score(config, trained, fixed, batch):
    keys = config.batch
    logits = bind(config, trained, fixed)(*(batch[name] for name in keys.inputs))
    targets = batch[keys.targets]
    log_likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    log_likelihood = jnp.where(batch[keys.weights] > 0, log_likelihood, 0)
    return _on_every_host(jnp.sum(log_likelihood, axis=tuple(range(1, targets.ndim))))


def _on_every_host(array):
    return jax.lax.with_sharding_constraint(array, jax.sharding.PartitionSpec())


def _padded(ids: np.ndarray, width: int | None) -> np.ndarray:
    """Ids of a row; width None: one number."""
    if width is None:
        return np.asarray(ids, np.int32)
    return np.pad(np.asarray(ids[:width], np.int32), (0, width - len(ids[:width])))
