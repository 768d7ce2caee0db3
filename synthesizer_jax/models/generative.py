"""What models that make tokens one by one have in common: their embedding and logits, and the steps of decoding."""

import abc

from flax import nnx
from jaxtyping import Array, Float, Int

from synthesizer_jax.models.config import ModelConfig
from synthesizer_jax.models.transformer import (
    Context,
    Stack,
    add_positions,
    check_positions_reach,
    computed_once,
    lm_head,
    next_positions,
    position_table,
    softmax_factors,
    token_logits,
)
from synthesizer_jax.nn.layers import Embedding


class Generative(nnx.Module):
    """A model with a causal stack `decoder`, whose caches and steps these are."""

    config: ModelConfig
    embedding: Embedding
    decoder: Stack

    def _add_head(self, config: ModelConfig, rngs: nnx.Rngs):
        """What comes after the stacks."""
        self.lm_head = lm_head(config, rngs)
        self.position_embedding = position_table(config, rngs)
        self.columns = nnx.data(None)  # the embedding's transpose, in decoding

    @abc.abstractmethod
    def _step_context(self, cache: dict, kept: Int[Array, ""] | None) -> Context:
        """What a step's layers are told."""

    def softmax(self, x: Float[Array, "b q e"]) -> tuple[Float[Array, "b q e"], Float[Array, "v e"]]:
        """What logits are the products of: vectors and the rows of a table, made of the vectors x of as_logits=False."""
        return softmax_factors(x, self.embedding, self.lm_head)

    def for_decoding(self) -> "Generative":
        """This model with what each step reads made once, before a loop over steps; to be called under the same jit.

        Without it a step takes the layers out of their stack and transposes the embedding itself: on CPUs half of its cost.
        """
        graph, state = nnx.split(self)
        model = nnx.merge(graph, state)
        model.decoder = self.decoder.unstacked()
        if self.lm_head is None:
            model.columns = nnx.Variable(computed_once(self.embedding.embedding[...].T))
        return model

    def grow_cache(self, cache: dict, max_length: int) -> dict:
        """The cache with room for max_length tokens in all."""
        check_positions_reach(self.position_embedding, max_length)
        return cache | {"layers": self.decoder.grow_caches(cache["layers"], max_length)}

    def decode_step(self, tokens: Int[Array, "b s"], cache: dict) -> tuple[Float[Array, "b s v"], dict]:
        """Logits [b, s, v] after the next s tokens [b, s] (the very first is 0), and the cache with them."""
        x, cache = self._step(tokens, cache, None)
        return self._logits(x), cache

    def prefill(self, tokens: Int[Array, "b s"], cache: dict, kept: Int[Array, ""] | None = None) -> dict:
        """The cache with the first `kept` of the next s tokens [b, s], None: with all, in one pass and without logits."""
        return self._step(tokens, cache, kept)[1]

    def _step(self, tokens, cache, kept):
        index = cache["index"]
        x, layers = self.decoder.step(
            self._embed(tokens, next_positions(index, tokens)), cache["layers"], index, self._step_context(cache, kept)
        )
        return x, cache | {"layers": layers, "index": index + (tokens.shape[1] if kept is None else kept)}

    def _embed(self, tokens, positions=None):
        return add_positions(self.embedding(tokens, self.config.compute_dtype), self.position_embedding, positions)

    def _logits(self, x):
        columns = None if self.columns is None else self.columns[...]
        return token_logits(x, self.embedding, self.lm_head, columns)
