"""The tuples of all variants that drive the properties: adding a variant is one row here.

VARIANTS are scores; MIXERS are all that a layer can be made of: the scores, and what takes attention's place.
"""

import synthesizer_jax as sj

# The longest length that the tests' scores cover; longer than the sequences, so that tables are sliced.
MAX_LENGTH = 12

VARIANTS = (
    ("V", sj.DotProduct()),
    ("V scaled", sj.DotProduct(scale=0.5)),
    ("R", sj.Random(MAX_LENGTH)),
    ("fixedR", sj.Random(MAX_LENGTH, trained=False)),
    ("FR", sj.FactorizedRandom(MAX_LENGTH, rank=3)),
    ("D", sj.Dense(MAX_LENGTH)),
    ("D authors'", sj.Dense(MAX_LENGTH, bias=False, share_w2=True)),
    ("FD", sj.FactorizedDense(MAX_LENGTH)),
    ("FD separate", sj.FactorizedDense(MAX_LENGTH, a=2, shared_hidden=False)),
    ("relative", sj.RelativePositionBias(buckets=8, max_distance=16)),
    ("R+V", sj.synthesizer("R+V", MAX_LENGTH)),
    ("D+V", sj.synthesizer("D+V", MAX_LENGTH)),
    ("R+D", sj.synthesizer("R+D", MAX_LENGTH)),
    ("FR+V", sj.synthesizer("FR[rank=3]+V", MAX_LENGTH)),
    ("FD+V", sj.synthesizer("FD+V", MAX_LENGTH)),
    ("R+FR", sj.synthesizer("R+FR", MAX_LENGTH)),
    ("R+V sum", sj.synthesizer("R+V", MAX_LENGTH, weights="sum")),
    ("R+V authors'", sj.synthesizer("R+V", MAX_LENGTH, weights="sigmoid", per_head=False)),
    (
        "D+V authors'",
        sj.synthesizer(
            "D[bias=False,share_w2=True]+V", MAX_LENGTH, weights="sigmoid", per_head=False, share_query=True
        ),
    ),
    ("nested", sj.Mixture((sj.synthesizer("R+D", MAX_LENGTH), sj.DotProduct(), sj.Random(MAX_LENGTH)))),
)

MIXERS = (
    *VARIANTS,
    ("V local", sj.MultiHead(sj.DotProduct(), keys=sj.Sparse(3))),
    ("R+V strided", sj.MultiHead(sj.synthesizer("R+V", MAX_LENGTH), keys=sj.Sparse(2, stride=4))),
)
