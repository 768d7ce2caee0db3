"""A language model over exchangeable self-attention: T5's layers, causal, without cross-attention.

Tay et al. 2021 (Synthesizer section 4.1) train one on LM1B.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from synthesizer_jax.models.config import DecoderOnlyConfig
from synthesizer_jax.models.generative import Generative
from synthesizer_jax.models.transformer import (
    Context,
    Layer,
    Stack,
    check_packing,
    check_positions_reach,
)
from synthesizer_jax.nn.layers import Embedding


class DecoderOnly(Generative):
    """Logits of each token given the tokens before.

    Its input is the text shifted to the right by one: token 0 is the start of a sequence, and padding after its end,
    which no token before it sees.
    """

    def __init__(self, config: DecoderOnlyConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.features, rngs=rngs, param_dtype=config.param_dtype)
        self.decoder = Stack(Layer, config.decoder_layers, config.decoder_attention, True, config, rngs=rngs)
        self._add_head(config, rngs)

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

    def attention_weights(self, decoder_input_tokens: Int[Array, "b q"]) -> Float[Array, "_l b h q q"]:
        """The self-attention weights, [layers, b, h, q, k] in float32: for looking at."""
        return self.decoder.weights(self._embed(decoder_input_tokens), self.decoder.context(decoder_input_tokens))

    def init_cache(self, batch: int, max_length: int) -> dict:
        """What decoding up to max_length tokens, those of a prompt included, with `decode_step` needs."""
        check_positions_reach(self.position_embedding, max_length)
        dtype = self.config.compute_dtype
        layers = tuple(layer.init_cache(batch, max_length, dtype) for layer in self.decoder.each_layer())
        return {"layers": layers, "index": jnp.zeros((), jnp.int32)}

    def _step_context(self, cache, kept):
        return Context(kept=kept)
