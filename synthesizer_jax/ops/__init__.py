"""Pure functions on arrays."""

from synthesizer_jax.ops.attend import Dropout as Dropout
from synthesizer_jax.ops.attend import attend as attend
from synthesizer_jax.ops.attend import attention_weights as attention_weights
