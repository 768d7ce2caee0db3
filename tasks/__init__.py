"""seqio tasks and mixtures, one module per benchmark; importing a module registers its names.

The command line finds a task's module by the task's name; elsewhere import it. The tasks use seqio and t5 only, nothing
else of synthesizer_jax, and work with any library that takes seqio tasks.
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
    "synthesizer_jax.tasks.wmt14": ("wmt14_en_de", "wmt14_en_fr", "wmt_t2t_en_de"),
    "synthesizer_jax.tasks.multi30k": ("multi30k_en_de", "multi30k_de_en", "multi30k_en_fr", "multi30k_fr_en"),
    "synthesizer_jax.tasks.lm1b": ("lm1b",),
    "synthesizer_jax.tasks.cnn_dailymail": ("cnn_dailymail",),
    "synthesizer_jax.tasks.ag_news": ("ag_news", "ag_news_class"),
    "synthesizer_jax.tasks.movie_reviews": (
        "movie_reviews",
        "movie_reviews_class",
        "imdb_reviews",
        "imdb_reviews_class",
    ),
    "synthesizer_jax.tasks.lm_text": (
        "wikitext2",
        "wikitext2_span_corruption",
        "tiny_shakespeare",
        "tiny_shakespeare_span_corruption",
    ),
    "synthesizer_jax.tasks.personachat": ("personachat", "personachat_personas"),
}
