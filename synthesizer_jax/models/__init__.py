"""Models and their configurations."""

# Configurations: what defines a model, the presets, and their JSON form.
from synthesizer_jax.models.config import DecoderOnlyConfig as DecoderOnlyConfig
from synthesizer_jax.models.config import EncoderDecoderConfig as EncoderDecoderConfig
from synthesizer_jax.models.config import EncoderOnlyConfig as EncoderOnlyConfig
from synthesizer_jax.models.config import ModelConfig as ModelConfig
from synthesizer_jax.models.config import classifier_tiny as classifier_tiny
from synthesizer_jax.models.config import config_from_json as config_from_json
from synthesizer_jax.models.config import lm_tiny as lm_tiny
from synthesizer_jax.models.config import paper_c4_base as paper_c4_base
from synthesizer_jax.models.config import paper_classifier as paper_classifier
from synthesizer_jax.models.config import paper_lm1b_base as paper_lm1b_base
from synthesizer_jax.models.config import paper_mt_base as paper_mt_base
from synthesizer_jax.models.config import t5_1_1_3b as t5_1_1_3b
from synthesizer_jax.models.config import t5_1_1_11b as t5_1_1_11b
from synthesizer_jax.models.config import t5_1_1_base as t5_1_1_base
from synthesizer_jax.models.config import t5_1_1_large as t5_1_1_large
from synthesizer_jax.models.config import t5_1_1_small as t5_1_1_small
from synthesizer_jax.models.config import t5_1_1_tiny as t5_1_1_tiny
from synthesizer_jax.models.config import t5_3b as t5_3b
from synthesizer_jax.models.config import t5_11b as t5_11b
from synthesizer_jax.models.config import t5_base as t5_base
from synthesizer_jax.models.config import t5_large as t5_large
from synthesizer_jax.models.config import t5_small as t5_small
from synthesizer_jax.models.config import t5_tiny as t5_tiny
from synthesizer_jax.models.config import to_json as to_json

# Models.
from synthesizer_jax.models.decoder_only import DecoderOnly as DecoderOnly
from synthesizer_jax.models.encoder_decoder import EncoderDecoder as EncoderDecoder
from synthesizer_jax.models.encoder_only import EncoderOnly as EncoderOnly

# Their parameters as pure trees.
from synthesizer_jax.models.parameters import count_parameters as count_parameters
