"""One Billion Word benchmark (Chelba et al. 2013): sentences for a language model.

lm1b    "targets" alone, a sentence each.

TFDS has the splits train and test. "validation" is the last 1 % of train, which "train" leaves out; "test" is all of
TFDS's, the corpus's held-out sentences. Metrics: perplexity_per_word, which papers report, and perplexity_per_subword
(perplexity.py).
"""

import functools

import seqio
from t5.data import preprocessors

from synthesizer_jax.tasks import features, perplexity, sources

seqio.TaskRegistry.add(
    "lm1b",
    source=sources.Tfds("lm1b:1.1.0", {"train": "train[:99%]", "validation": "train[99%:]", "test": "test"}),
    preprocessors=[functools.partial(preprocessors.rekey, key_map={"targets": "text"}), *features.TOKENIZED],
    postprocess_fn=perplexity.scored,
    output_features=features.TEXT,
    metric_fns=[perplexity.perplexities],
)
