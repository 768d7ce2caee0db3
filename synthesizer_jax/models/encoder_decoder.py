"""The T5 encoder-decoder, v1.0 and v1.1, over exchangeable self-attention.

Raffel et al. 2020 for the architecture; Tay et al. 2021 for the self-attention. T5 differs from the original
Transformer in pre-norm RMSNorm, no biases, a relative position bias per stack in place of added positions, and no
1/sqrt(d) on the scores. v1.1 has gated-GELU MLPs and a softmax of its own.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from synthesizer_jax.models.config import EncoderDecoderConfig
from synthesizer_jax.models.generative import Generative
from synthesizer_jax.models.transformer import (
    Context,
    DecoderLayer,
    Layer,
    Stack,
    check_packing,
    check_positions_reach,
)
from synthesizer_jax.nn.layers import Embedding
from synthesizer_jax.ops.attend import mask_as_bias


class EncoderDecoder(Generative):
    """Logits of target tokens given input tokens and the target tokens before.

    Token 0 is padding in the encoder and the start of the sequence in the decoder. Build under jit or eval_shape where
    construction time or memory matter; `synthesizer_jax.models.parameters` gives the pure view for training.
    """

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.features, rngs=rngs, param_dtype=config.param_dtype)
        self.encoder = Stack(Layer, config.encoder_layers, config.encoder_attention, False, config, rngs=rngs)
        self.decoder = Stack(DecoderLayer, config.decoder_layers, config.decoder_attention, True, config, rngs=rngs)
        self._add_head(config, rngs)

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
        as_logits: bool = True,
    ) -> Float[Array, "b q _v"]:
        """Logits [b, q, v] in float32 for encoder_input_tokens [b, k] and decoder_input_tokens [b, q].

        Segment ids and positions, as seqio packs them: ids from 1 along a row, 0 for padding; positions counting up by
        one from 0 within each segment. Dropout only with a dropout_key. as_logits=False: the vectors [b, q, e] that
        logits are made of, see `softmax`.
        """
        check_packing(
            {"encoder_segment_ids": encoder_segment_ids, "decoder_segment_ids": decoder_segment_ids},
            {"encoder_positions": encoder_positions, "decoder_positions": decoder_positions},
        )
        encoder_key, decoder_key = [None, None] if dropout_key is None else jax.random.split(dropout_key)
        encoded = self.encode(
            encoder_input_tokens, segment_ids=encoder_segment_ids, positions=encoder_positions, dropout_key=encoder_key
        )
        context = dataclasses.replace(
            self.decoder.context(decoder_input_tokens, decoder_segment_ids, decoder_positions),
            encoded=encoded,
            encoder_mask=encoder_input_tokens > 0 if encoder_segment_ids is None else None,
            encoder_segments=encoder_segment_ids,
        )
        x = self.decoder(self._embed(decoder_input_tokens, decoder_positions), context, decoder_key)
        return self._logits(x) if as_logits else x

    def attention_weights(
        self, encoder_input_tokens: Int[Array, "b k"], decoder_input_tokens: Int[Array, "b q"]
    ) -> tuple[Float[Array, "_l b h k k"], Float[Array, "_l b h q q"]]:
        """The self-attention weights of encoder and decoder, [layers, b, h, q, k] in float32: for looking at."""
        return (
            self.encoder.weights(self._embed(encoder_input_tokens), self.encoder.context(encoder_input_tokens)),
            self.decoder.weights(
                self._embed(decoder_input_tokens), self._decoder_context(encoder_input_tokens, decoder_input_tokens)
            ),
        )

    def cross_attention_weights(
        self, encoder_input_tokens: Int[Array, "b k"], decoder_input_tokens: Int[Array, "b q"]
    ) -> Float[Array, "_l b _h q k"]:
        """The cross-attention weights of the decoder, [layers, b, h, q, k] in float32: for looking at."""
        context = self._decoder_context(encoder_input_tokens, decoder_input_tokens)
        return self.decoder.over_layers(
            lambda layer, x, _: (layer(x, context, None), layer.cross_weights(x, context)),
            self._embed(decoder_input_tokens),
            None,
        )[1]

    def _decoder_context(self, encoder_tokens, decoder_tokens):
        return dataclasses.replace(
            self.decoder.context(decoder_tokens),
            encoded=self.encode(encoder_tokens),
            encoder_mask=encoder_tokens > 0,
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
        return self.encoder(
            self._embed(tokens, positions), self.encoder.context(tokens, segment_ids, positions), dropout_key
        )

    def init_cache(self, encoder_input_tokens: Int[Array, "b k"], max_length: int) -> dict:
        """What decoding up to max_length tokens with `decode_step` needs; runs the encoder."""
        check_positions_reach(self.position_embedding, max_length)
        encoded, mask = self.encode(encoder_input_tokens), encoder_input_tokens > 0
        layers = tuple(layer.init_cache(encoded, mask, max_length) for layer in self.decoder.each_layer())
        return {"layers": layers, "encoder_mask": mask, "index": jnp.zeros((), jnp.int32)}

    def _step_context(self, cache, kept):
        return Context(encoder_bias=mask_as_bias(cache["encoder_mask"][:, None, None, :]), kept=kept)
