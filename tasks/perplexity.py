"""Perplexity of a language model per word and per subword, so that models with different vocabularies can be compared.

Both are exp of the nats of all texts, divided by the number of their words or subwords. The end of each sentence (or
document) counts as one of either, as is the convention for LM1B. Words are what white space parts. Only what was scored
is counted: of an example that was cut to its length the words that begin before the cut and the end that was put there;
`examples_cut` says how many those were. perplexity_per_subword is the same number as the `perplexity` per token that
every language model has in an evaluation.

    seqio.TaskRegistry.add(..., postprocess_fn=perplexity.scored, metric_fns=[perplexity.perplexities])
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import seqio

from synthesizer_jax.tasks import features

Scored = Mapping[str, int]
SPACE = "\u2581"  # SentencePiece's sign for the white space before a word


def scored(
    text: str,
    *,
    example: Mapping[str, Any],
    is_target: bool,
    vocabulary: seqio.SentencePieceVocabulary = features.VOCABULARY,
) -> str | Scored:
    """Of a target: how many words and subwords a model's score of it is about, and whether it was cut."""
    if not is_target:
        return text
    ids = [int(i) for i in example["targets"]]
    ends = ids.count(vocabulary.eos_id)
    one_text = "targets_pretokenized" in example  # and not several that were joined
    cut = one_text and len(vocabulary.encode(text)) + 1 > len(ids)
    if one_text and not cut:
        words = len(text.split())
    else:
        words = sum(vocabulary.tokenizer.id_to_piece(i).count(SPACE) for i in ids if i != vocabulary.eos_id)
    return {"words": words + ends, "subwords": len(ids), "cut": int(cut)}


def perplexities(targets: Sequence[Scored], scores: Sequence[float]) -> dict[str, float]:
    """perplexity_per_word, perplexity_per_subword, and what they are about; `scores` are log-likelihoods in nats."""
    nats = -math.fsum(map(float, scores))
    words, subwords, cut = (sum(target[name] for target in targets) for name in ("words", "subwords", "cut"))
    return {
        "perplexity_per_word": _exp(nats / words),
        "perplexity_per_subword": _exp(nats / subwords),
        "words": words,
        "subwords": subwords,
        "examples_cut": cut,
    }


def _exp(nats: float) -> float:
    return math.inf if nats >= 700 else math.exp(nats)
