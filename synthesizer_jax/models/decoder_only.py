"""A language model over exchangeable self-attention: T5's layers, causal, without cross-attention.

Tay et al. 2021 (Synthesizer section 4.1) train one on LM1B.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from synthesizer_jax.models.config import DecoderOnlyConfig
from synthesizer_jax.models.transformer import (
    Context,
    Layer,
    Stack,
    add_positions,
    check_packing,
    check_positions_reach,
    computed_once,
    lm_head,
    next_positions,
    position_table,
    softmax_factors,
    token_logits,
)
from synthesizer_jax.nn.layers import Embedding


class DecoderOnly(nnx.Module):
    """Logits of each token given the tokens before.

    Its input is the text shifted to the right by one: token 0 is the start of a sequence, and padding after its end,
    which no token before it sees.
    """

    def __init__(self, config: DecoderOnlyConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.features, rngs=rngs, param_dtype=config.param_dtype)
        self.decoder = Stack(Layer, config.decoder_layers, config.decoder_attention, True, config, rngs=rngs)
        self.lm_head = lm_head(config, rngs)
        self.position_embedding = position_table(config, rngs)
        self.columns = nnx.data(None)  # the embedding's transpose, in decoding

    def __call__(
        self,
        decoder_input_tokens: Int[Array, "b q"],
        *,
        decoder_segment_ids: Int[Array, "b q"] | None = None,
        decoder_positions: Int[Array, "b q"] | None = None,
        dropout_key: Array | None = None,
        as_logits: bool = True,
    ) -> Float[Array, "b q _v"]:
        """Logits [b, q, v] in float32 for decoder_input_tokens [b, q].

        Segment ids and positions, as seqio packs them: ids from 1 along a row, 0 for padding; positions counting up by
        one from 0 within each segment. Dropout only with a dropout_key. as_logits=False: the vectors [b, q, e] that
        logits are made of, see `softmax`.
        """
        check_packing({"decoder_segment_ids": decoder_segment_ids}, {"decoder_positions": decoder_positions})
        context = self.decoder.context(decoder_input_tokens, decoder_segment_ids, decoder_positions)
        x = self.decoder(self._embed(decoder_input_tokens, decoder_positions), context, dropout_key)
        return self._logits(x) if as_logits else x

    def softmax(self, x: Float[Array, "b q e"]) -> tuple[Float[Array, "b q e"], Float[Array, "v e"]]:
        """What logits are the products of: vectors and the rows of a table, made of the vectors x of as_logits=False."""
        return softmax_factors(x, self.embedding, self.lm_head)

    def attention_weights(self, decoder_input_tokens: Int[Array, "b q"]) -> Float[Array, "_l b h q q"]:
        """The self-attention weights, [layers, b, h, q, k] in float32: for looking at."""
        return self.decoder.weights(self._embed(decoder_input_tokens), self.decoder.context(decoder_input_tokens))

    def init_cache(self, batch: int, max_length: int) -> dict:
        """What decoding up to max_length tokens, those of a prompt included, with `decode_step` needs."""
        check_positions_reach(self.position_embedding, max_length)
        dtype = self.config.compute_dtype
        layers = tuple(layer.init_cache(batch, max_length, dtype) for layer in self.decoder.each_layer())
        return {"layers": layers, "index": jnp.zeros((), jnp.int32)}

    def for_decoding(self) -> "DecoderOnly":
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
            self._embed(tokens, next_positions(index, tokens)), cache["layers"], index, Context(kept=kept)
        )
        return x, cache | {"layers": layers, "index": index + (tokens.shape[1] if kept is None else kept)}

    def _embed(self, tokens, positions=None):
        return add_positions(self.embedding(tokens, self.config.compute_dtype), self.position_embedding, positions)

    def _logits(self, x):
        columns = None if self.columns is None else self.columns[...]
        return token_logits(x, self.embedding, self.lm_head, columns)
