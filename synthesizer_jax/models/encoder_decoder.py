"""The T5 encoder-decoder, v1.0 and v1.1, over exchangeable self-attention.

Raffel et al. 2020 for the architecture; Tay et al. 2021 for the self-attention. T5 differs from the original
Transformer in pre-norm RMSNorm, no biases, a relative position bias per stack in place of added positions, and no
1/sqrt(d) on the scores. v1.1 has gated-GELU MLPs and a softmax of its own.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from synthesizer_jax.axes import EMBED, VOCAB, Param, contract, fan_in
from synthesizer_jax.models.config import EncoderDecoderConfig
from synthesizer_jax.models.transformer import (
    Context,
    DecoderLayer,
    EncoderLayer,
    Stack,
)
from synthesizer_jax.nn.layers import Embedding, variable


class EncoderDecoder(nnx.Module):
    """Logits of target tokens given input tokens and the target tokens before.

    Token 0 is padding in the encoder and the start of the sequence in the decoder. Build under jit or eval_shape where
    construction time or memory matter; `synthesizer_jax.models.parameters` gives the pure view for training.
    """

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.features, rngs=rngs, param_dtype=config.param_dtype)
        self.encoder = Stack(EncoderLayer, config.encoder_layers, config.encoder_attention, True, config, rngs=rngs)
        self.decoder = Stack(DecoderLayer, config.decoder_layers, config.decoder_attention, False, config, rngs=rngs)
        if not config.tied_embedding:
            kernel = Param((config.features, config.vocab_size), (EMBED, VOCAB), fan_in(config.features))
            self.lm_head = variable(kernel, rngs, config.param_dtype)

    def __call__(
        self,
        encoder_input_tokens: Int[Array, "b k"],
        decoder_input_tokens: Int[Array, "b q"],
        *,
        encoder_segment_ids: Int[Array, "b k"] | None = None,
        encoder_positions: Int[Array, "b k"] | None = None,
        decoder_segment_ids: Int[Array, "b q"] | None = None,
        decoder_positions: Int[Array, "b q"] | None = None,
        dropout_key: Array | None = None,
    ) -> Float[Array, "b q v"]:
        """Logits [b, q, v] in float32 for encoder_input_tokens [b, k] and decoder_input_tokens [b, q].

        Segment ids and positions, as seqio packs them: ids from 1 along a row, 0 for padding; positions counting up by
        one from 0 within each segment. Dropout only with a dropout_key.
        """
        if (encoder_segment_ids is None) != (decoder_segment_ids is None):
            raise ValueError(
                "encoder_segment_ids, decoder_segment_ids: expected both or neither; a packed batch has both"
            )
        positions = {"encoder_positions": encoder_positions, "decoder_positions": decoder_positions}
        missing = [name for name, value in positions.items() if value is None]
        if encoder_segment_ids is not None and missing:
            raise ValueError(
                f"{' and '.join(missing)}: expected beside segment ids, the positions within each segment from 0; "
                "seqio's packing gives them"
            )
        encoder_key, decoder_key = [None, None] if dropout_key is None else jax.random.split(dropout_key)
        context = self._decoder_context(
            encoder_input_tokens,
            decoder_input_tokens,
            encoder_segment_ids,
            encoder_positions,
            decoder_segment_ids,
            decoder_positions,
            encoder_key,
        )
        return self._logits(self.decoder(self._embed(decoder_input_tokens), context, decoder_key))

    def attention_weights(
        self, encoder_input_tokens: Int[Array, "b k"], decoder_input_tokens: Int[Array, "b q"]
    ) -> tuple[Float[Array, "_l b h k k"], Float[Array, "_l b h q q"]]:
        """The self-attention weights of encoder and decoder, [layers, b, h, q, k] in float32: for looking at."""
        own = self._encoder_context(encoder_input_tokens, None, None)
        context = self._decoder_context(encoder_input_tokens, decoder_input_tokens)
        return (
            self.encoder.weights(self._embed(encoder_input_tokens), own),
            self.decoder.weights(self._embed(decoder_input_tokens), context),
        )

    def encode(
        self,
        tokens: Int[Array, "b k"],
        *,
        segment_ids: Int[Array, "b k"] | None = None,
        positions: Int[Array, "b k"] | None = None,
        dropout_key: Array | None = None,
    ) -> Float[Array, "b k e"]:
        """The encoder's output [b, k, e]; what stands at padding has no meaning and is seen by nobody."""
        return self.encoder(self._embed(tokens), self._encoder_context(tokens, segment_ids, positions), dropout_key)

    def init_cache(self, encoder_input_tokens: Int[Array, "b k"], max_length: int) -> dict:
        """What decoding up to max_length tokens with `decode_step` needs; runs the encoder."""
        encoded = self.encode(encoder_input_tokens)
        _, layers = self.decoder.over_layers(
            lambda layer, carry, _: (carry, layer.init_cache(encoded, max_length)), None, None
        )
        return {"layers": layers, "encoder_mask": encoder_input_tokens > 0, "index": jnp.zeros((), jnp.int32)}

    def decode_step(self, tokens: Int[Array, "b s"], cache: dict) -> tuple[Float[Array, "b s v"], dict]:
        """Logits [b, s, v] after the next s tokens [b, s] (the very first is 0), and the cache with them."""
        index = cache["index"]
        positions = index + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        context = Context(
            bias=self.decoder.cached_bias(tokens.shape[1], cache["layers"], positions),
            shared=self.decoder.shared_values(),
            encoder_mask=cache["encoder_mask"],
        )
        x, layers = self.decoder.over_layers(
            lambda layer, x, layer_cache: layer.step(x, layer_cache, context), self._embed(tokens), cache["layers"]
        )
        logits = self._logits(self.decoder.final_norm(x))
        return logits, cache | {"layers": layers, "index": index + tokens.shape[1]}

    def _encoder_context(self, tokens, segment_ids, positions):
        return Context(
            key_mask=tokens > 0 if segment_ids is None else None,
            segments=segment_ids,
            positions=positions,
            bias=_bias(self.encoder, tokens, segment_ids, positions),
            shared=self.encoder.shared_values(),
        )

    def _decoder_context(
        self,
        encoder_tokens,
        decoder_tokens,
        encoder_segments=None,
        encoder_positions=None,
        decoder_segments=None,
        decoder_positions=None,
        dropout_key=None,
    ):
        return Context(
            segments=decoder_segments,
            positions=decoder_positions,
            bias=_bias(self.decoder, decoder_tokens, decoder_segments, decoder_positions),
            shared=self.decoder.shared_values(),
            encoded=self.encode(
                encoder_tokens, segment_ids=encoder_segments, positions=encoder_positions, dropout_key=dropout_key
            ),
            encoder_mask=encoder_tokens > 0 if encoder_segments is None else None,
            encoder_segments=encoder_segments,
        )

    def _embed(self, tokens):
        return self.embedding(tokens, self.config.compute_dtype)

    def _logits(self, x):
        if self.config.tied_embedding:
            return self.embedding.attend(x * self.config.features**-0.5)
        return contract("bqe,ev->bqv", x, self.lm_head[...].astype(x.dtype))


def _bias(stack, tokens, segment_ids, positions):
    # Within a segment, slots in the row and positions differ by a constant, so that packed rows share one bias.
    return stack.bias(tokens.shape[1], tokens.shape[1], positions if segment_ids is None else None)
