"""SuperGLUE (Wang et al. 2019) as T5 casts it to text; t5's own formats, answers and metrics, to the token.

super_glue_boolq    inputs "boolq passage: ... question: ...", targets "False" | "True"
super_glue_cb       "cb hypothesis: ... premise: ..." -> "entailment" | "contradiction" | "neutral"
super_glue_copa     "copa choice1: ... choice2: ... premise: ... question: cause" -> "choice1" | "choice2"
super_glue_multirc  "multirc question: ... answer: ... paragraph: ..." -> "False" | "True", a row for each answer.
                    Metrics: F1 over all answers, and the share of questions whose answers are all right.
super_glue_record   "record query: ... @placeholder ... entities: a, b, c passage: ..." -> an entity. A row for each
                    right entity, also in validation, where a query counts once: SQuAD's exact match and F1, with the
                    best of its entities.
super_glue_rte      "rte hypothesis: ... premise: ..." -> "entailment" | "not_entailment"
super_glue_wic      "wic sentence1: ... sentence2: ... word: ..." -> "False" | "True"
super_glue_axb      The diagnostic sets in the form of RTE: a test split alone, without metrics, as in t5.
super_glue_axg

Winograd's schemas, for which T5 trains to name the noun:

super_glue_wsc_simple_train  "wsc: Bob asked Tom if *he* could lend some money." -> "Tom". Rows whose noun is the right
                             one (259 of 554).
super_glue_wsc_simple_eval   All rows of validation and test. Right is an answer that names the noun of the row where
                             the row's label is true, or does not where it is false; the targets are that noun whatever
                             the label, so they are not the right answers.
dpr_simple                   Definite Pronoun Resolution (Rahman and Ng 2012) in the same form, more to train on.

Test splits but AX-b's and AX-g's have no labels: their targets are "<unk>".
"""

import functools

import seqio
import tensorflow_datasets as tfds
from t5.data import glue_utils, postprocessors, preprocessors
from t5.evaluation import metrics

from synthesizer_jax.tasks import features, sources

VERSION = "1.0.2"
SPLITS = {
    name: ("train", "validation", "test") for name in ("boolq", "cb", "copa", "multirc", "record", "rte", "wic")
} | {"axb": ("test",), "axg": ("test",)}
# AX-b names its sentences as GLUE does.
AXB_AS_RTE = functools.partial(
    preprocessors.rekey,
    key_map={"premise": "sentence1", "hypothesis": "sentence2", "label": "label", "idx": "idx"},
)


def _source(name: str, splits: tuple[str, ...]) -> sources.Tfds:
    return sources.Tfds(f"super_glue/{name}:{VERSION}", splits=splits)


for _name, _splits in SPLITS.items():
    _config = tfds.text.super_glue.SuperGlue.builder_configs[_name]
    seqio.TaskRegistry.add(
        f"super_glue_{_name}",
        source=_source(_name, _splits),
        preprocessors=[
            *([AXB_AS_RTE] if _name == "axb" else []),
            glue_utils.get_glue_text_preprocessor(_config),
            *features.TOKENIZED,
        ],
        postprocess_fn=glue_utils.get_glue_postprocess_fn(_config),
        output_features=features.TEXT_TO_TEXT,
        metric_fns=glue_utils.get_super_glue_metric(_name),
    )

seqio.TaskRegistry.add(
    "super_glue_wsc_simple_train",
    source=_source("wsc.fixed", ("train",)),
    preprocessors=[
        functools.partial(preprocessors.wsc_simple, correct_referent_only=True),
        *features.TOKENIZED,
    ],
    output_features=features.TEXT_TO_TEXT,
    metric_fns=[],
)

seqio.TaskRegistry.add(
    "super_glue_wsc_simple_eval",
    source=_source("wsc.fixed", ("validation", "test")),
    preprocessors=[
        functools.partial(preprocessors.wsc_simple, correct_referent_only=False),
        *features.TOKENIZED,
    ],
    postprocess_fn=postprocessors.wsc_simple,
    output_features=features.TEXT_TO_TEXT,
    metric_fns=[metrics.accuracy],
)

seqio.TaskRegistry.add(
    "dpr_simple",
    source=sources.Tfds("definite_pronoun_resolution:1.1.0", splits=("train", "test")),
    preprocessors=[preprocessors.definite_pronoun_resolution_simple, *features.TOKENIZED],
    output_features=features.TEXT_TO_TEXT,
    metric_fns=[metrics.accuracy],
)
