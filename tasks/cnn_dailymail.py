"""CNN / Daily Mail (See et al. 2017): an article's highlights as its summary.

cnn_dailymail    inputs "summarize: (CNN)The world's biggest ...", targets the highlights.

Metrics: ROUGE-1, ROUGE-2 and ROUGE-L of summaries (rouge1, rouge2, rougeLsum): F measures in %, with their settings in
rouge_signature. ROUGE-Lsum compares sentence by sentence. A model's text has no newlines, as T5's vocabulary has none,
so sentences are told from one another by their full stops, too. T5's own metric looks for " . ", which version 3.4.0 of
the data does not have: it would take the whole prediction for one sentence.
"""

import functools
import importlib.metadata
import re
from collections.abc import Sequence

import seqio
from rouge_score import rouge_scorer
from t5.data import preprocessors

from synthesizer_jax.tasks import features, sources

ROUGE = ("rouge1", "rouge2", "rougeLsum")
SIGNATURE = (
    f"rouge_score {importlib.metadata.version('rouge-score')}, F measure, mean over examples, no stemming, sentences "
    "end at newlines and at .!? before a space"
)
_NO_END = ("[A-Za-z]", "Mr", "Mrs", "Ms", "Dr")  # initials ("U.S. forces", "2 a.m. on Monday") and titles
_END = re.compile("(?<=[.!?])" + "".join(rf"(?<!\b{word}\.)" for word in _NO_END) + r"""(["'”’)\]]*)\s+(?![a-z])""")


def sentences(text: str) -> list[str]:
    return [
        sentence for line in text.splitlines() for sentence in _END.sub(r"\1\n", line).split("\n") if sentence.strip()
    ]


def rouge(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float | seqio.metrics.Text]:
    scorer = rouge_scorer.RougeScorer(ROUGE)
    scores = [
        scorer.score(target="\n".join(sentences(target)), prediction="\n".join(sentences(prediction)))
        for target, prediction in zip(targets, predictions, strict=True)
    ]
    means = {name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE}
    return means | {"rouge_signature": seqio.metrics.Text(SIGNATURE)}


seqio.TaskRegistry.add(
    "cnn_dailymail",
    source=sources.Tfds("cnn_dailymail:3.4.0", ("train", "validation", "test")),
    preprocessors=[
        functools.partial(preprocessors.summarize, article_key="article", summary_key="highlights"),
        *features.TOKENIZED,
    ],
    output_features=features.TEXT_TO_TEXT,
    metric_fns=[rouge],
)
