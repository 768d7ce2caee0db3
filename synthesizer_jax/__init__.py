"""Synthesizer attention (Tay et al., ICML 2021) for JAX and Flax.

import synthesizer_jax as sj

scores = sj.synthesizer("R+V", max_length=512)
layer = sj.Attention(scores, features=512, heads=8, head_dim=64, rngs=nnx.Rngs(0))
model = sj.EncoderDecoder(sj.t5_base(attention="R+V"), rngs=nnx.Rngs(0))
"""

__version__ = "0.1.0"

# What mixes tokens: attention over any scores, and its rivals; the paper's letters for all of them.
from synthesizer_jax.mixers import DynamicConv as DynamicConv
from synthesizer_jax.mixers import LightweightConv as LightweightConv
from synthesizer_jax.mixers import Linformer as Linformer
from synthesizer_jax.mixers import Mixer as Mixer
from synthesizer_jax.mixers import MultiHead as MultiHead
from synthesizer_jax.mixers import Sparse as Sparse
from synthesizer_jax.mixers import TokenMixing as TokenMixing
from synthesizer_jax.mixers import synthesizer as synthesizer

# Attention scores.
from synthesizer_jax.scores import Dense as Dense
from synthesizer_jax.scores import Dims as Dims
from synthesizer_jax.scores import DotProduct as DotProduct
from synthesizer_jax.scores import FactorizedDense as FactorizedDense
from synthesizer_jax.scores import FactorizedRandom as FactorizedRandom
from synthesizer_jax.scores import Kernel as Kernel
from synthesizer_jax.scores import Mixture as Mixture
from synthesizer_jax.scores import Random as Random
from synthesizer_jax.scores import RelativePositionBias as RelativePositionBias
from synthesizer_jax.scores import Scores as Scores
from synthesizer_jax.scores import Spec as Spec
from synthesizer_jax.scores import Toeplitz as Toeplitz

# Declared parameters and logical axes.
from synthesizer_jax.axes import Param as Param

# Pure functions.
from synthesizer_jax.ops import Dropout as Dropout
from synthesizer_jax.ops import attend as attend
from synthesizer_jax.ops import attention_weights as attention_weights

# Flax NNX layers.
from synthesizer_jax.nn import MLP as MLP
from synthesizer_jax.nn import Attention as Attention
from synthesizer_jax.nn import Embedding as Embedding
from synthesizer_jax.nn import Fixed as Fixed
from synthesizer_jax.nn import RMSNorm as RMSNorm

# The token-mixing layer for Flax Linen: linen.Attention.
from synthesizer_jax.nn import linen as linen

# Models, their configurations and presets.
from synthesizer_jax.models import DecoderOnly as DecoderOnly
from synthesizer_jax.models import DecoderOnlyConfig as DecoderOnlyConfig
from synthesizer_jax.models import EncoderDecoder as EncoderDecoder
from synthesizer_jax.models import EncoderDecoderConfig as EncoderDecoderConfig
from synthesizer_jax.models import EncoderOnly as EncoderOnly
from synthesizer_jax.models import EncoderOnlyConfig as EncoderOnlyConfig
from synthesizer_jax.models import classifier_tiny as classifier_tiny
from synthesizer_jax.models import config_from_json as config_from_json
from synthesizer_jax.models import count_parameters as count_parameters
from synthesizer_jax.models import lm_tiny as lm_tiny
from synthesizer_jax.models import paper_c4_base as paper_c4_base
from synthesizer_jax.models import paper_classifier as paper_classifier
from synthesizer_jax.models import paper_lm1b_base as paper_lm1b_base
from synthesizer_jax.models import paper_mt_base as paper_mt_base
from synthesizer_jax.models import t5_1_1_3b as t5_1_1_3b
from synthesizer_jax.models import t5_1_1_11b as t5_1_1_11b
from synthesizer_jax.models import t5_1_1_base as t5_1_1_base
from synthesizer_jax.models import t5_1_1_large as t5_1_1_large
from synthesizer_jax.models import t5_1_1_small as t5_1_1_small
from synthesizer_jax.models import t5_1_1_tiny as t5_1_1_tiny
from synthesizer_jax.models import t5_3b as t5_3b
from synthesizer_jax.models import t5_11b as t5_11b
from synthesizer_jax.models import t5_base as t5_base
from synthesizer_jax.models import t5_large as t5_large
from synthesizer_jax.models import t5_small as t5_small
from synthesizer_jax.models import t5_tiny as t5_tiny
from synthesizer_jax.models import to_json as to_json
