"""T5's mixtures: many tasks at once, each drawn in proportion to its number of training examples.

glue_mix             GLUE but WNLI, whose training set T5 leaves out for Winograd's schemas. T5's lengths: "inputs" 512,
                     "targets" 84.
super_glue_mix       SuperGLUE, Winograd's schemas with Definite Pronoun Resolution. 512 and 62.
en_mix_cotraining    T5's en_mix: C4's span corruption, drawn as often as a task of a million examples, with GLUE,
                     SuperGLUE and SQuAD. The Synthesizer paper goes on with it after C4 alone, for GLUE and SuperGLUE.
                     512 and 114.

The rates are the numbers of examples of the full official training sets, whatever the folder of data holds. Counted in
the folder, a sample would mix in other proportions without a word. They are those of t5's weight mappings. t5's own
en_mix counts (rate_num_examples): the examples of a task's cache, which for the full sets are these numbers, or without
a cache the rows of its source, then 100,730 for ReCoRD, where a row with several right answers is as many examples, and
554 for WSC, of which 259 are trained on. Its rate of C4 is the same million, and RTE is in it twice, as here: GLUE's
and SuperGLUE's.

Tasks of rate 0 are there to be evaluated: they have no training split, and evaluating a mixture goes through each of
its tasks that has the split.

On samples these rates can be far off: of 32 rows of ReCoRD three quarters of super_glue_mix would be drawn. Other rates
make another mixture, in a module of one's own:

    rates = mixtures.SUPER_GLUE | {"super_glue_record": 32}
    seqio.MixtureRegistry.add("my_mix", list(rates.items()))
"""

import seqio

from synthesizer_jax.tasks import c4, glue, squad, super_glue  # noqa: F401  registers the tasks

GLUE = {
    "glue_cola": 8_551,
    "glue_sst2": 67_349,
    "glue_mrpc": 3_668,
    "glue_stsb": 5_749,
    "glue_qqp": 363_849,
    "glue_mnli": 392_702,
    "glue_qnli": 104_743,
    "glue_rte": 2_490,
    "glue_mnli_matched": 0,
    "glue_mnli_mismatched": 0,
    "glue_ax": 0,
}
SUPER_GLUE = {
    "super_glue_boolq": 9_427,
    "super_glue_cb": 250,
    "super_glue_copa": 400,
    "super_glue_multirc": 27_243,
    "super_glue_record": 138_854,
    "super_glue_rte": 2_490,
    "super_glue_wic": 5_428,
    "super_glue_wsc_simple_train": 259,
    "dpr_simple": 1_322,
    "super_glue_wsc_simple_eval": 0,
    "super_glue_axb": 0,
    "super_glue_axg": 0,
}
EN_MIX = {"c4_span_corruption": 1_000_000} | GLUE | SUPER_GLUE | {"squad_allanswers": 87_599}

for _name, _rates in (("glue_mix", GLUE), ("super_glue_mix", SUPER_GLUE), ("en_mix_cotraining", EN_MIX)):
    seqio.MixtureRegistry.add(_name, list(_rates.items()))
