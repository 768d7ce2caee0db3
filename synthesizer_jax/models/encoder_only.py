"""A classifier of whole sequences over exchangeable self-attention: T5's encoder, one vector, a linear head."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from synthesizer_jax.axes import EMBED, Param, contract, fan_in, zeros
from synthesizer_jax.models.config import EncoderOnlyConfig
from synthesizer_jax.models.transformer import Layer, Stack, add_positions, position_table
from synthesizer_jax.nn.layers import Embedding, values, variables


class EncoderOnly(nnx.Module):
    """Logits of the classes of a sequence of tokens. Token 0 is padding.

    Embedding and encoder are named as those of `EncoderDecoder`, from whose checkpoints they may come.
    """

    def __init__(self, config: EncoderOnlyConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.features, rngs=rngs, param_dtype=config.param_dtype)
        self.encoder = Stack(Layer, config.encoder_layers, config.encoder_attention, False, config, rngs=rngs)
        head = {
            "kernel": Param((config.features, config.num_classes), (EMBED, None), fan_in(config.features)),
            "bias": Param((config.num_classes,), (None,), zeros),
        }
        self.classifier = variables(head, rngs, config.param_dtype)
        self.position_embedding = position_table(config, rngs)

    def __call__(
        self, encoder_input_tokens: Int[Array, "b q"], *, dropout_key: Array | None = None
    ) -> Float[Array, "b c"]:
        """Logits [b, c] in float32 of c = num_classes classes for encoder_input_tokens [b, q].

        Dropout only with a dropout_key. A row without tokens has the logits of the head's bias.
        """
        x = self.encoder(self._embed(encoder_input_tokens), self.encoder.context(encoder_input_tokens), dropout_key)
        vector = _POOL[self.config.pooling](x, encoder_input_tokens > 0).astype(x.dtype)
        head = values(self.classifier)
        return contract("be,ec->bc", vector, head["kernel"].astype(x.dtype)) + head["bias"].astype(jnp.float32)

    def attention_weights(self, encoder_input_tokens: Int[Array, "b q"]) -> Float[Array, "_l b h q q"]:
        """The self-attention weights, [layers, b, h, q, k] in float32: for looking at."""
        return self.encoder.weights(self._embed(encoder_input_tokens), self.encoder.context(encoder_input_tokens))

    def _embed(self, tokens):
        return add_positions(self.embedding(tokens, self.config.compute_dtype), self.position_embedding)


def mean_pool(x: Float[Array, "b q e"], real: Bool[Array, "b q"]) -> Float[Array, "b e"]:
    """The mean of the real tokens' vectors in float32; 0 where there are none."""
    total = jnp.sum(jnp.where(real[..., None], x.astype(jnp.float32), 0), axis=1)
    return total / jnp.maximum(jnp.sum(real, axis=1, dtype=jnp.float32), 1)[:, None]


def first_pool(x: Float[Array, "b q e"], real: Bool[Array, "b q"]) -> Float[Array, "b e"]:
    """The first token's vector in float32; 0 where it is padding."""
    return jnp.where(real[:, :1], x[:, 0].astype(jnp.float32), 0)


_POOL = {"mean": mean_pool, "first": first_pool}
