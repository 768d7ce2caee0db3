"""The zoo of attention scores, one idea per file: frozen specs over pure JAX, no Flax."""

# What they have in common.
from synthesizer_jax.scores.base import Dims as Dims
from synthesizer_jax.scores.base import Lookup as Lookup
from synthesizer_jax.scores.base import Scores as Scores
from synthesizer_jax.scores.base import Spec as Spec

# The scores.
from synthesizer_jax.scores.dense import Dense as Dense
from synthesizer_jax.scores.dense import FactorizedDense as FactorizedDense
from synthesizer_jax.scores.dot_product import DotProduct as DotProduct
from synthesizer_jax.scores.kernels import Kernel as Kernel
from synthesizer_jax.scores.mixture import Mixture as Mixture
from synthesizer_jax.scores.position import RelativePositionBias as RelativePositionBias
from synthesizer_jax.scores.random import FactorizedRandom as FactorizedRandom
from synthesizer_jax.scores.random import Random as Random
from synthesizer_jax.scores.toeplitz import Toeplitz as Toeplitz
