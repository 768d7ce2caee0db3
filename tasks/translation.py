"""Translation in T5's words, "translate English to German: That is good.", and its two BLEUs.

sacrebleu   SacreBLEU's default, with its signature in sacrebleu_signature: the number that papers compare.
t5_bleu     T5's own, which differs in its tokenizer: to compare with T5 and with papers that build on it.
"""

import functools
from collections.abc import Sequence

import seqio
from sacrebleu.metrics import BLEU
from t5.data import preprocessors
from t5.evaluation import metrics

from synthesizer_jax.tasks import features


def add(name: str, source: seqio.DataSource, source_language: str, target_language: str) -> None:
    """Registers a task; the source's examples have a text under each language's code, "en", "de"."""
    translate = functools.partial(
        preprocessors.translate, source_language=source_language, target_language=target_language
    )
    seqio.TaskRegistry.add(
        name,
        source=source,
        preprocessors=[translate, *features.TOKENIZED],
        output_features=features.TEXT_TO_TEXT,
        metric_fns=[sacrebleu, t5_bleu],
    )


def sacrebleu(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float | seqio.metrics.Text]:
    metric = BLEU()
    score = metric.corpus_score(list(predictions), [list(targets)]).score
    return {"sacrebleu": score, "sacrebleu_signature": seqio.metrics.Text(metric.get_signature().format())}


def t5_bleu(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    return {"t5_bleu": metrics.bleu(targets, predictions)["bleu"]}
