"""Trains the quickstart's SentencePiece vocabulary, quickstart.model, on the quickstart's training text.

    python -m synthesizer_jax.tasks.train_quickstart_vocabulary [OUTPUT]

The model in this folder was made so, from Python 3.11's text. It serves other versions as well: every printable ASCII
character is a piece. 1,948 pieces and the 100 sentinels that seqio adds make 2,048 rows of embedding.
"""

import io
import pathlib
import string
import sys
import tempfile

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from synthesizer_jax.tasks import quickstart_text

PIECES = 1948  # incl. padding 0, end 1, unknown 2
OUTPUT = pathlib.Path(__file__).with_name("quickstart.model")


def train(sentences: list[str], pieces: int = PIECES) -> bytes:
    """The serialised model: unigram, ids as T5's.

    The only normalisation is from a no-break space to a space: SentencePiece's own table would take 240 kB, and without
    any the library prints a line whenever it reads the model.
    """
    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        rules.write("A0\t20\n")
        rules.flush()
        _train(sentences, pieces, model, rules.name)
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    proto.normalizer_spec.ClearField("normalization_rule_tsv")  # a path on this machine
    return proto.SerializeToString()


def _train(sentences: list[str], pieces: int, model: io.BytesIO, rules: str) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="unigram",
        vocab_size=pieces,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        normalization_rule_tsv=rules,
        character_coverage=1.0,
        required_chars=string.digits + string.ascii_letters + string.punctuation,
        max_sentence_length=100_000,  # bytes; longer ones would be left out
        num_threads=1,  # the order of sums, and so the model, would depend on it
        minloglevel=2,
    )


if __name__ == "__main__":
    output = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    output.write_bytes(train(quickstart_text.sentences("train")))
    print(f"{output}: {PIECES} pieces, {output.stat().st_size:,} bytes")
