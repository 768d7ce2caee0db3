"""English prose that ships with Python: the text of the quickstart's tasks.

`pydoc_data.topics` holds the chapters of the language reference that `help()` prints: some 80 topics with 240 kB of
prose. It is there wherever Python is, so the quickstart needs neither network nor data files. Grammar, program code,
tables and headings are left out; markup is taken off; what stands in several topics is kept in the first of them only.

The text differs a little from one Python version to the next; it is the same on every run of one version.
Only the standard library is imported here.
"""

import functools
import re

from pydoc_data.topics import topics

# Whole topics, so that training sees neither a held-out sentence nor its neighbours: a fifth of the prose.
VALIDATION_TOPICS = (
    "attribute-references",
    "bltin-ellipsis-object",
    "calls",
    "class",
    "comparisons",
    "customization",
    "dynamic-features",
    "exceptions",
    "for",
    "identifiers",
    "import",
    "objects",
    "raise",
    "strings",
    "try",
)
SPLITS = ("train", "validation")

_ASCII = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "…": "...", "—": "-", "–": "-", "−": "-", "×": "x", "\u00a0": " "}
)
_MARKUP = re.compile(r"\*\*(.+?)\*\*|\*(?=\w)(.+?)(?<=\w)\*")
_FOOTNOTE = re.compile(r" ?\[\d+\]")
_CODE = re.compile(r"::=|>>>|\w\(.*\)\s*->|^\s*(?:\.\.\.|\||\+[-=]|@)|\s=\s|[{}\\]", re.MULTILINE)
_BULLET = re.compile(r"^(?:[*-]|\d+\.)\s+")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"(])")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|cf|vs)\.$")


@functools.lru_cache(maxsize=1)
def corpus() -> dict[str, dict[str, list[str]]]:
    """Split -> topic -> its paragraphs of prose, each on one line.

    Topics overlap: 'compound' repeats 'for'. A sentence is kept where it first stands, validation topics coming first,
    so that no sentence of the validation split is in the training split.
    """
    seen: set[str] = set()
    found: dict[str, dict[str, list[str]]] = {split: {} for split in SPLITS}
    for topic in sorted(topics, key=lambda name: (name not in VALIDATION_TOPICS, name)):
        kept = []
        for paragraph in _paragraphs(topics[topic]):
            new = [sentence for sentence in _sentences(paragraph) if sentence not in seen]
            seen.update(new)
            kept += [" ".join(new)] if new else []
        if kept:
            found["validation" if topic in VALIDATION_TOPICS else "train"][topic] = kept
    return found


def sentences(split: str) -> list[str]:
    """The sentences of a split, in the order of the text, no two alike."""
    paragraphs = [paragraph for found in corpus()[split].values() for paragraph in found]
    return list(dict.fromkeys(sentence for paragraph in paragraphs for sentence in _sentences(paragraph)))


def _paragraphs(text: str) -> list[str]:
    blocks = [block for block in re.split(r"\n\s*\n", text.translate(_ASCII)) if not _CODE.search(block)]
    return [line for line in map(_one_line, blocks) if _is_prose(line)]


def _one_line(block: str) -> str:
    """Joins the lines of a block and the words that were broken at their hyphen; takes off bullets and markup."""
    line = " ".join(line.strip() for line in block.strip().splitlines())
    line = _BULLET.sub("", re.sub(r"(?<=\w)- (?=[a-z])", "-", line))
    line = _MARKUP.sub(lambda match: match.group(1) or match.group(2), line)
    return re.sub(r"\s+", " ", _FOOTNOTE.sub("", line)).strip()


def _is_prose(line: str) -> bool:
    """Five words or more, mostly letters, from a capital letter to a full stop."""
    words = re.findall(r"[A-Za-z]{2,}", line)
    whole = re.match(r"[A-Z\"(]", line) and line.endswith((".", "!", "?", ":"))
    return bool(whole) and len(words) >= 5 and sum(map(len, words)) >= 0.65 * len(line)


def _sentences(paragraph: str) -> list[str]:
    """Splits after '.', '!' or '?' before a capital letter; an abbreviation does not end a sentence."""
    found: list[str] = []
    for piece in _SENTENCE_END.split(paragraph):
        if found and _ABBREVIATION.search(found[-1]):
            found[-1] += f" {piece}"
        else:
            found.append(piece)
    return found
