"""C4, English (Raffel et al. 2020): the text that the paper's pretrained models are pretrained on.

For encoder-decoders:

c4_span_corruption   T5's objective: 15 % of the tokens are hidden, in spans of 3 tokens on average; documents are
                     joined and cut, so that every example fills "inputs". With 512 tokens of inputs, targets have 114.
                     inputs "Thank you <extra_id_0> me to your party <extra_id_1> week."
                     targets "<extra_id_0> for inviting <extra_id_1> last <extra_id_2>"
c4_prefix_lm         Each document, cut to "inputs" tokens, in two parts at a random place: the second follows from the
                     first.
                     inputs "Thank you for inviting", targets "me to your party last week."

For a language model:

c4_lm                "targets" alone: documents, each with its end, are joined and cut, so that every example is
                     "targets" tokens long (t5's full_lm). Metrics: perplexity_per_word and perplexity_per_subword
                     (perplexity.py).

The first two are t5's c4_v220_span_corruption and c4_v220_prefix_lm, to the token with the same seed.
"""

import functools

import seqio
from t5.data import preprocessors

from synthesizer_jax.tasks import features, perplexity, sources

SOURCE = sources.Tfds("c4/en:2.2.0", splits=("train", "validation"))  # T5's version of it

for _name, _objective in (
    ("c4_span_corruption", preprocessors.span_corruption),
    ("c4_prefix_lm", preprocessors.prefix_lm),
):
    seqio.TaskRegistry.add(
        _name,
        source=SOURCE,
        preprocessors=[*features.DOCUMENTS, _objective, seqio.preprocessors.append_eos_after_trim],
        output_features=features.TEXT_TO_TEXT,
        metric_fns=[],
    )

seqio.TaskRegistry.add(
    "c4_lm",
    source=SOURCE,
    preprocessors=[
        functools.partial(preprocessors.rekey, key_map={"targets": "text"}),
        *features.DOCUMENTS[1:],
        preprocessors.full_lm,
    ],
    postprocess_fn=perplexity.scored,
    output_features=features.TEXT,
    metric_fns=[perplexity.perplexities],
)
