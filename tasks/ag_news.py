"""AG News (Zhang et al. 2015): news by topic.

ag_news          inputs "ag_news text: Wall St. falls Stocks fell on Monday ...", targets "Business"
ag_news_class    for a classifier: the text alone, and the label's id.

The text is the title and the description. Labels in the order of their ids: World, Sports, Business, Sci/Tech. TFDS has
the splits train and test: "validation" is the last 5 % of train, which "train" leaves out. Metric: accuracy in %.
"""

import tensorflow as tf

from synthesizer_jax.tasks import classification, sources

LABELS = ("World", "Sports", "Business", "Sci/Tech")


def text(example):
    return tf.strings.strip(tf.strings.join([example["title"], example["description"]], separator=" "))


classification.add(
    "ag_news",
    sources.Tfds("ag_news_subset:1.0.0", {"train": "train[:95%]", "validation": "train[95%:]", "test": "test"}),
    LABELS,
    text,
)
