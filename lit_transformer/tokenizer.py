"""The shared subword vocabulary: sentencepiece BPE that gives back every text as it was, and the special ids.

One exception: U+2581 is sentencepiece's own mark for a space and comes back as a space.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

PAD_ID, UNK_ID, BOS_ID, EOS_ID = 0, 1, 2, 3

# sentencepiece skips longer training lines without a word; we raise its limit and count what is beyond.
MAX_LINE_BYTES = 65536
# What sentencepiece writes into its pieces: space mark, unknown mark, and the decoder's sign for unknown.
RESERVED = "\u2585"  # lines with it are skipped by the trainer too, silently
PIECE_MARKS = ("\u2581", RESERVED, " \u2047 ")


class Tokenizer:
    """Text to ids of one shared vocabulary and back.

    Attributes:
        vocab_size: entries, special ids included.
        fingerprint: short hash of the pieces with their ids, scores and kinds.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size: int = self._pieces.vocab_size()
        digest = hashlib.sha256()
        for i in range(self.vocab_size):  # not of the file: that also holds the trainer's own settings
            kind = [getattr(self._pieces, f"is_{kind}")(i) for kind in ("byte", "control", "unknown", "unused")]
            digest.update(f"{i}\t{self._pieces.id_to_piece(i)}\t{self._pieces.get_score(i)}\t{kind}\n".encode())
        self.fingerprint = digest.hexdigest()[:16]
        expected = {"pad": PAD_ID, "unk": UNK_ID, "bos": BOS_ID, "eos": EOS_ID}
        found = {name: getattr(self._pieces, f"{name}_id")() for name in expected}
        if found != expected:
            raise ValueError(f"special ids are {found}, must be {expected}: train the tokeniser with `prepare`")

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> tuple[Tokenizer, int]:
        """Learn a vocabulary of exactly `vocab_size` entries.

        Returns:
            The tokeniser, and the number of lines left out, too long or holding U+2585.

        Raises:
            ValueError: no usable line, or text too small or too varied for the size asked for.
        """
        taken = skipped = 0
        failure: BaseException | None = None

        def usable() -> Iterator[str]:
            nonlocal taken, skipped, failure
            try:
                for line in lines:
                    if len(line.encode()) > MAX_LINE_BYTES or RESERVED in line:
                        skipped += 1
                    elif line.strip():
                        taken += 1
                        yield line
            except BaseException as error:  # sentencepiece would turn any of them into a RuntimeError of its own
                failure = error
                raise

        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=usable(),
                model_writer=model,
                vocab_size=vocab_size,
                model_type="bpe",
                normalization_rule_name="identity",
                byte_fallback=True,
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                character_coverage=0.9995,  # rarer characters are spelt in bytes instead of filling the vocabulary
                max_sentence_length=MAX_LINE_BYTES,
                num_threads=2,  # stands in the model file, so it is the same on every machine
                pad_id=PAD_ID,
                unk_id=UNK_ID,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                minloglevel=2,
            )
        except RuntimeError as error:
            if failure:
                raise failure from None
            if not taken:
                raise ValueError(
                    f"no line to train a tokeniser on: {skipped} lines are longer than {MAX_LINE_BYTES} bytes or hold "
                    "U+2585, the others are blank"
                ) from error
            reason = str(error).split("] ")[-1].strip() or "at least 260 are needed for bytes and special ids"
            raise ValueError(f"vocab_size = {vocab_size} does not suit these {taken} lines: {reason}") from error
        return cls(model.getvalue()), skipped

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Raises ValueError where the file is no sentencepiece model of ours."""
        try:
            return cls(path.read_bytes())
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{path} is not a tokeniser of ours: {error}") from error

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special ids."""
        return self._pieces.encode(list(texts))

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The same as arrays of int32, without an object for each id."""
        return self._pieces.encode(list(texts), out_type="numpy")

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special ids are left out."""
        return self._pieces.decode([i for i in ids if i not in (PAD_ID, BOS_ID, EOS_ID)])
