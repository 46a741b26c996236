"""From text to text with a checkpoint alone: it carries its tokeniser."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from lit_transformer.checkpoint import load_checkpoint, load_weights, newest_checkpoint
from lit_transformer.decode import BEAM_SIZE, LENGTH_PENALTY, search_all
from lit_transformer.module import LitTransformer
from lit_transformer.packed import for_search
from lit_transformer.sources import is_blank, one_line
from lit_transformer.tokenizer import EOS_ID, Tokenizer


class Translator:
    """A trained model with its tokeniser.

    Args:
        checkpoint: written by `fit` or `average`; or a run's folder, for its newest one.
        device: where to decode.
        warn: takes a line about each input that is longer than the model was trained for.
        int8: on a CPU, compute with integers of 8 bits: faster, and now and then another translation.

    Raises:
        ValueError: no such checkpoint, or not one of ours; 8 bits are asked for elsewhere.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        device: str = "cpu",
        warn: Callable[[str], None] = print,
        int8: bool = False,
    ) -> None:
        checkpoint = Path(checkpoint)
        checkpoint = newest_checkpoint(checkpoint) if checkpoint.is_dir() else checkpoint
        saved = load_checkpoint(checkpoint)
        if "TranslationDataModule" not in saved or "hyper_parameters" not in saved:
            raise ValueError(f"{checkpoint} does not carry its tokeniser and configuration: use one written by `fit`")
        data = saved["TranslationDataModule"]
        self.tokenizer = Tokenizer(data["tokenizer_model"])
        self.max_length: int = data["max_length"]
        module = LitTransformer(**saved["hyper_parameters"])
        load_weights(module, saved, checkpoint)
        try:
            model = module.model.to(device).eval()
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
        self.model = for_search(model, int8)
        self.warn = warn

    def translate(
        self,
        texts: Sequence[str],
        beam_size: int = BEAM_SIZE,
        length_penalty: float = LENGTH_PENALTY,
        n_best: int = 1,
        first_line: int = 1,
    ) -> list[list[str]]:
        """n_best translations of each text, best first, in the order of the texts.

        A text is one sentence whatever it holds, newlines included.  One without a visible character gives empty
        translations.

        Args:
            first_line: number of the first text, for warnings.

        Raises:
            ValueError: a text is longer than learned positions reach.
        """
        results = [[""] * n_best for _ in texts]
        wanted = [i for i, text in enumerate(texts) if not is_blank(text)]
        sources = [[*ids, EOS_ID] for ids in self.tokenizer.encode([texts[i] for i in wanted])]
        limit = self.model.max_length
        for i, ids in zip(wanted, sources, strict=True):
            if limit and len(ids) > limit:
                raise ValueError(
                    f"line {first_line + i} has {len(ids)} tokens, the model's learned positions end at {limit}: "
                    "split the line"
                )
            if len(ids) - 1 > self.max_length:
                self.warn(
                    f"line {first_line + i} has {len(ids) - 1} subwords, the model was trained on at most "
                    f"{self.max_length}: expect little of its translation"
                )
        found = search_all(self.model, sources, beam_size=beam_size, length_penalty=length_penalty, n_best=n_best)
        for i, hypotheses in zip(wanted, found, strict=True):
            if not hypotheses[0].finished:
                subwords = len(hypotheses[0].ids)
                self.warn(f"line {first_line + i}: its translation was cut at {subwords} subwords, no end had come")
            results[i] = [self.tokenizer.decode(h.ids) for h in hypotheses]
            results[i] += [""] * (n_best - len(results[i]))
        return results

    def translate_lines(
        self, lines: Iterable[str], beam_size: int, length_penalty: float, n_best: int
    ) -> Iterator[str]:
        """n_best lines for each line, as a stream; a newline inside an output becomes a space."""
        iterator, number = iter(lines), 1
        while chunk := list(itertools.islice(iterator, 256)):
            for outputs in self.translate(chunk, beam_size, length_penalty, n_best, number):
                yield from (one_line(text) for text in outputs)
            number += len(chunk)


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
