"""GLUE (Wang et al. 2019) as T5 casts it to text; t5's own formats, answers and metrics, to the token.

glue_cola             inputs "cola sentence: The car drove the man home on.", targets "unacceptable" | "acceptable"
glue_sst2             "sst2 sentence: a quiet delight" -> "negative" | "positive"
glue_mrpc             "mrpc sentence1: ... sentence2: ..." -> "not_equivalent" | "equivalent"
glue_stsb             "stsb sentence1: ... sentence2: ..." -> "3.8", the similarity rounded to a fifth
glue_qqp              "qqp question1: ... question2: ..." -> "not_duplicate" | "duplicate"
glue_mnli             "mnli hypothesis: ... premise: ..." -> "entailment" | "neutral" | "contradiction"; its splits for
                      evaluation are validation_matched, validation_mismatched, and the same of test
glue_mnli_matched     The two kinds of validation and test alone, as splits named "validation" and "test", so that a
glue_mnli_mismatched  mixture is evaluated on them.
glue_qnli             "qnli question: ... sentence: ..." -> "entailment" | "not_entailment"
glue_rte              "rte sentence1: ... sentence2: ..." -> "entailment" | "not_entailment"
glue_wnli             "wnli sentence1: ... sentence2: ..." -> "not_entailment" | "entailment"
glue_wnli_simple_eval WNLI's evaluation splits in the form of super_glue_wsc_simple_eval: "wsc: The cup fell off the
                      table when *it* shook." -> "the table"
glue_ax               The diagnostic set in the form of MNLI: a test split alone, without labels and metrics.

Test splits have no labels: their targets are "<unk>". An answer that is none of the labels counts as wrong, and as -1
in STS-B. In glue_wnli_simple_eval right is an answer that names the noun of the row where the row's label is true, or
does not where it is false; the targets are that noun whatever the label, so they are not the right answers.
"""

import seqio
import tensorflow_datasets as tfds
from t5.data import glue_utils, postprocessors, preprocessors
from t5.evaluation import metrics

from synthesizer_jax.tasks import features, sources

VERSION = "2.0.0"  # t5 asks for 1.0.0: the same rows, QQP from an address that is gone
SPLITS = {
    name: ("train", "validation", "test") for name in ("cola", "sst2", "mrpc", "stsb", "qqp", "qnli", "rte", "wnli")
} | {
    "mnli": ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched"),
    "mnli_matched": ("validation", "test"),
    "mnli_mismatched": ("validation", "test"),
    "ax": ("test",),
}

for _name, _splits in SPLITS.items():
    _config = tfds.text.glue.Glue.builder_configs[_name]
    seqio.TaskRegistry.add(
        f"glue_{_name}",
        source=sources.Tfds(f"glue/{_name}:{VERSION}", splits=_splits),
        preprocessors=[glue_utils.get_glue_text_preprocessor(_config), *features.TOKENIZED],
        postprocess_fn=glue_utils.get_glue_postprocess_fn(_config),
        output_features=features.TEXT_TO_TEXT,
        metric_fns=glue_utils.get_glue_metric(_name),
    )

seqio.TaskRegistry.add(
    "glue_wnli_simple_eval",
    source=sources.Tfds(f"glue/wnli:{VERSION}", splits=("validation", "test")),
    preprocessors=[preprocessors.wnli_simple, *features.TOKENIZED],
    postprocess_fn=postprocessors.wsc_simple,
    output_features=features.TEXT_TO_TEXT,
    metric_fns=[metrics.accuracy],
)
