"""The paper's tables of costs (Synthesizer, Tables 1 and 4) with ours beside them, as Markdown: docs/costs.md.

    python benchmarks/costs.py > docs/costs.md

Nothing is computed or allocated but shapes: it takes seconds on any machine.
"""

from synthesizer_jax.analysis.costs import table_1, table_4

print(
    f"""# Costs

Made by `python benchmarks/costs.py`; any configuration's own: `python -m synthesizer_jax costs`.

## Table 1: parameters of one head, without value and output projections

{table_1()}

## Table 4: the C4 set-up (T5 base, 512 input and 114 target tokens)

{table_4()}

Parameters are those of the whole model. FLOPs are those of matrix products, 2 for a multiplication and an addition, in a
forward pass over one example, over its 626 tokens. The paper does not say of what its TFLOPs are; relative is to its, and
to our, Transformer. The cache is float32's; with bfloat16 it is half.
"""
)
