"""The zoo of token mixers, one idea per file: frozen specs over pure JAX, no Flax."""

# What they have in common.
from synthesizer_jax.mixers.mixer import Mixer as Mixer
from synthesizer_jax.mixers.mixer import Surroundings as Surroundings

# The mixers.
from synthesizer_jax.mixers.convolution import DynamicConv as DynamicConv
from synthesizer_jax.mixers.convolution import LightweightConv as LightweightConv
from synthesizer_jax.mixers.linformer import Linformer as Linformer
from synthesizer_jax.mixers.multi_head import MultiHead as MultiHead
from synthesizer_jax.mixers.multi_head import Sparse as Sparse
from synthesizer_jax.mixers.token_mixing import TokenMixing as TokenMixing

# The paper's letters, and names in their manner, for all of the zoo.
from synthesizer_jax.mixers.notation import synthesizer as synthesizer
