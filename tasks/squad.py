"""SQuAD 1.1 (Rajpurkar et al. 2016) as T5 casts it to text; t5's own format and metrics.

squad_allanswers  inputs "question: Who asked ? context: Tom asked Bob . ", targets "Tom", the first of the answers;
                  punctuation stands between spaces. Metrics: exact match and F1, with the best of all answers.
"""

import seqio
from t5.data import postprocessors, preprocessors
from t5.evaluation import metrics

from synthesizer_jax.tasks import features, sources

seqio.TaskRegistry.add(
    "squad_allanswers",
    source=sources.Tfds("squad/v1.1:3.0.0", splits=("train", "validation")),
    preprocessors=[preprocessors.squad, *features.TOKENIZED],
    postprocess_fn=postprocessors.qa,
    output_features=features.TEXT_TO_TEXT,
    metric_fns=[metrics.squad],
)
