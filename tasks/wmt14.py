"""WMT 2014 translation: newstest2013 for validation, newstest2014 for test.

wmt14_en_de       inputs "translate English to German: That is good.", targets "Das ist gut."
wmt14_en_fr       the same into French.
wmt_t2t_en_de     English to German with Tensor2Tensor's training set, which the Synthesizer paper uses.

Metrics: sacrebleu with sacrebleu_signature, and t5_bleu (translation.py).
"""

from synthesizer_jax.tasks import sources, translation

SPLITS = ("train", "validation", "test")

translation.add("wmt14_en_de", sources.Tfds("wmt14_translate/de-en:1.0.0", SPLITS), "en", "de")
translation.add("wmt14_en_fr", sources.Tfds("wmt14_translate/fr-en:1.0.0", SPLITS), "en", "fr")
translation.add("wmt_t2t_en_de", sources.Tfds("wmt_t2t_translate/de-en:1.0.0", SPLITS), "en", "de")
