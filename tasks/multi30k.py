"""Multi30k (Elliott et al. 2016): 29,000 captions of pictures with their translations, a small corpus for translation.

multi30k_en_de, multi30k_de_en, multi30k_en_fr, multi30k_fr_en
    inputs "translate English to German: A man sleeps.", targets "Ein Mann schläft."

The files are those of task 1, `raw`, in multi30k/: {train,val,test_2016_flickr}.{en,de,fr}.gz. The split "test" is
Flickr's of 2016. Metrics: sacrebleu with sacrebleu_signature, and t5_bleu (translation.py).
"""

import functools
import gzip
import pathlib

from synthesizer_jax.tasks import sources, translation

FILES = {"train": "train", "validation": "val", "test": "test_2016_flickr"}
ORIGIN = "get data/task1/raw of https://github.com/multi30k/dataset as multi30k/"


def read_pairs(one: str, other: str, one_path: pathlib.Path, other_path: pathlib.Path) -> list[dict[str, str]]:
    """Each line of a gz file with the same line of another, under the two languages' codes."""
    texts = [_lines(path) for path in (one_path, other_path)]
    if len(texts[0]) != len(texts[1]):
        raise ValueError(
            f"expected as many lines in {one_path} as in {other_path}, got {len(texts[0])} and {len(texts[1])}; "
            "get both anew from one place"
        )
    return [{one: text, other: translated} for text, translated in zip(*texts, strict=True)]


def _lines(path: pathlib.Path) -> list[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8-sig", newline="\n") as file:  # no other character ends a line
            return [line.strip() for line in file]
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path}: expected a whole gz file, got: {error}; get it anew") from error


for _other in ("de", "fr"):
    for _source, _target in (("en", _other), (_other, "en")):
        translation.add(
            f"multi30k_{_source}_{_target}",
            sources.Files(
                {split: [f"multi30k/{name}.{code}.gz" for code in (_source, _target)] for split, name in FILES.items()},
                functools.partial(read_pairs, _source, _target),
                ORIGIN,
            ),
            _source,
            _target,
        )
