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
}
