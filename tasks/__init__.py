"""seqio tasks and mixtures, one module per benchmark; importing a module registers its names.

Give the module as MIXTURE_OR_TASK_MODULE on the command line. The tasks use seqio and t5 only, nothing else of
synthesizer_jax, and work with any library that takes seqio tasks.
"""

# Module -> the names that it registers. The table is read without importing them, which would take seconds.
CONTENTS = {
    "synthesizer_jax.tasks.quickstart": (
        "quickstart_span_corruption",
        "quickstart_negation",
        "quickstart_number",
        "quickstart_finetune",
        "quickstart_lm",
        "quickstart_negation_class",
    ),
    "synthesizer_jax.tasks.c4": ("c4_span_corruption", "c4_prefix_lm", "c4_lm"),
    "synthesizer_jax.tasks.glue": (
        "glue_cola",
        "glue_sst2",
        "glue_mrpc",
        "glue_stsb",
        "glue_qqp",
        "glue_qnli",
        "glue_rte",
        "glue_wnli",
        "glue_mnli",
        "glue_mnli_matched",
        "glue_mnli_mismatched",
        "glue_ax",
        "glue_wnli_simple_eval",
    ),
    "synthesizer_jax.tasks.super_glue": (
        "super_glue_boolq",
        "super_glue_cb",
        "super_glue_copa",
        "super_glue_multirc",
        "super_glue_record",
        "super_glue_rte",
        "super_glue_wic",
        "super_glue_axb",
        "super_glue_axg",
        "super_glue_wsc_simple_train",
        "super_glue_wsc_simple_eval",
        "dpr_simple",
    ),
    "synthesizer_jax.tasks.squad": ("squad_allanswers",),
    "synthesizer_jax.tasks.mixtures": ("glue_mix", "super_glue_mix", "en_mix_cotraining"),
}
