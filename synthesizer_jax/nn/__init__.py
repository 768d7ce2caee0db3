"""Flax NNX layers over the score specs."""

from synthesizer_jax.nn.attention import Attention as Attention
from synthesizer_jax.nn.layers import Embedding as Embedding
from synthesizer_jax.nn.layers import Fixed as Fixed
from synthesizer_jax.nn.layers import MLP as MLP
from synthesizer_jax.nn.layers import RMSNorm as RMSNorm
