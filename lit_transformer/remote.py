"""Text that others publish: WMT14's Parquet files and sacreBLEU's test sets, each kept in its own library's cache.

Looking for files never uses a network; fetching them does, once, and only `prepare` does that.
"""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SACREBLEU = "sacrebleu:"
PARQUET_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
CONNECT_SECONDS = 20.0  # without an answer there is no network


class NotFetched(ValueError):
    """The text is not on this machine yet."""


def parquet_files(dataset: str, src_lang: str, tgt_lang: str) -> dict[str, list[Path]]:
    """The Parquet files of each split, of a folder or of what has been fetched from the Hugging Face hub.

    Args:
        dataset: a folder that holds de-en/train-00000-of-00003.parquet and so on, or a dataset's name on the hub.

    Raises:
        NotFetched: the name of a dataset that has not been fetched.
        ValueError: no such folder, pair of languages or split, or a file of a split is missing.
    """
    root = Path(dataset).expanduser()
    if not root.is_dir():
        if not is_on_the_hub(dataset):
            raise ValueError(
                f"dataset = {dataset!r}: no such folder; it must hold {tgt_lang}-{src_lang}/train-*.parquet, "
                "validation-*.parquet and test-*.parquet"
            )
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            patterns = _patterns(src_lang, tgt_lang)
            root = Path(snapshot_download(dataset, repo_type="dataset", allow_patterns=patterns, local_files_only=True))
        except LocalEntryNotFoundError as error:
            raise NotFetched(f"{dataset} is not here yet: run `lit-transformer prepare`") from error
    pairs = [f"{tgt_lang}-{src_lang}", f"{src_lang}-{tgt_lang}"]  # hub: the other language first, English last
    folder = next((root / pair for pair in pairs if (root / pair).is_dir()), None)
    if folder is None:
        there = ", ".join(sorted(entry.name for entry in root.iterdir() if entry.is_dir())) or "no folder"
        raise ValueError(f"dataset = {dataset!r}: {root} holds {there}, and neither {pairs[0]} nor {pairs[1]}")
    return {split: _shards(folder, name) for split, name in PARQUET_SPLITS.items()}


def _shards(folder: Path, name: str) -> list[Path]:
    files = sorted(folder.glob(f"{name}-*.parquet")) or sorted(folder.glob(f"{name}.parquet"))
    if not files:
        raise ValueError(f"{folder} holds no {name}-*.parquet")
    for number, file in enumerate(files):
        given = re.fullmatch(rf"{name}-(\d+)-of-(\d+)\.parquet", file.name)
        if given and (int(given[1]), int(given[2])) != (number, len(files)):
            wanted = {f"{name}-{n:0{len(given[1])}}-of-{given[2]}.parquet" for n in range(int(given[2]))}
            missing, stray = sorted(wanted - {f.name for f in files}), [f.name for f in files if f.name not in wanted]
            words = f"lacks {missing[0]}" if missing else f"holds {stray[0]}"
            there = len(files) - len(stray)
            raise ValueError(f"{folder} {words} beside {there} of the {len(wanted)} files of its kind")
    return files


def is_on_the_hub(dataset: str) -> bool:
    """Whether it can be the name of a dataset there, and is no folder here."""
    return not Path(dataset).expanduser().is_dir() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", dataset) is not None


def _patterns(src_lang: str, tgt_lang: str) -> list[str]:
    return [f"{pair}/*.parquet" for pair in (f"{src_lang}-{tgt_lang}", f"{tgt_lang}-{src_lang}")]


def fetch_dataset(dataset: str, src_lang: str, tgt_lang: str) -> None:
    """Bring a dataset's Parquet files of a pair of languages into the hub library's cache; goes on where it stopped.

    Raises:
        ValueError: no network, or no such dataset; says what to fetch elsewhere and where to put it.
    """
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        HfApi().dataset_info(dataset, timeout=CONNECT_SECONDS)  # the download's own first question has no time limit
        snapshot_download(dataset, repo_type="dataset", allow_patterns=_patterns(src_lang, tgt_lang))
    except (OSError, httpx2.HTTPError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ValueError(
            f"dataset = {dataset!r} cannot be fetched ({reason[0]}). Where there is a network: hf download {dataset} "
            f"--repo-type dataset --include '{tgt_lang}-{src_lang}/*' '{src_lang}-{tgt_lang}/*' --local-dir wmt14; "
            "bring the folder wmt14 here, and give its path as data.dataset"
        ) from error


def parquet_pairs(
    file: Path, src_lang: str, tgt_lang: str, notes: Counter[str]
) -> Iterator[tuple[list[tuple[str, str]], float]]:
    """Pairs of a Parquet file in WMT14's layout, some thousand at a time, and the share of the file read with them.

    Args:
        notes: counts newlines inside sentences, which become spaces, and missing sentences, which become empty.

    Raises:
        ValueError: no Parquet file, damaged, or of another schema.
    """
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            _check_schema(file, parquet.schema_arrow, src_lang, tgt_lang)
            for batch in parquet.iter_batches(batch_size=5000, columns=["translation"]):
                column = batch.column(0)
                # `flatten` and not `field`: a row without a translation has none in either language.
                sides = dict(zip([f.name for f in column.type], column.flatten(), strict=True))
                both = (_lines(sides[lang].to_pylist(), notes) for lang in (src_lang, tgt_lang))
                row += len(column)
                yield list(zip(*both, strict=True)), row / parquet.metadata.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file}: no Parquet file, or damaged, after row {row} ({reason})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 in one of the rows up to {row} ({error.reason})") from error


def _lines(texts: list[str | None], notes: Counter[str]) -> Iterator[str]:
    for text in texts:
        if text is None:
            notes["missing sentences read as empty"] += 1
            text = ""
        if "\n" in text:
            notes["sentences with newlines inside, made spaces"] += 1
            text = text.replace("\r\n", " ").replace("\n", " ")
        yield text


def _check_schema(file: Path, schema: Any, src_lang: str, tgt_lang: str) -> None:
    import pyarrow

    found = schema.field("translation").type if "translation" in schema.names else pyarrow.null()
    fields = {field.name: field.type for field in found} if pyarrow.types.is_struct(found) else {}
    if any(fields.get(lang) not in (pyarrow.string(), pyarrow.large_string()) for lang in (src_lang, tgt_lang)):
        columns = ", ".join(f"{name}: {kind}" for name, kind in zip(schema.names, schema.types, strict=True))
        raise ValueError(
            f"{file} holds {columns or 'no column'}; it must hold translation: struct<{tgt_lang}: string, "
            f"{src_lang}: string>, as WMT14's files do"
        )


def test_set_files(entry: str, src_lang: str, tgt_lang: str, fetch: bool) -> tuple[Path, Path, int]:
    """Source and first reference of "sacrebleu:SET" from sacreBLEU's own cache, and how many references there are.

    Args:
        fetch: let sacreBLEU download what is not there, and check it.

    Raises:
        NotFetched: not there, and not to be fetched.
        ValueError: no such set, not in this pair of languages, or it cannot be fetched.
    """
    from sacrebleu.dataset import DATASETS

    name, pair = entry.removeprefix(SACREBLEU), f"{src_lang}-{tgt_lang}"
    if name not in DATASETS:
        near = (
            ", ".join(sorted(known for known in DATASETS if known.startswith(name[:5])))
            or "those of `sacrebleu --list`"
        )
        raise ValueError(f"{entry}: sacreBLEU knows no test set {name!r}; it knows {near}")
    dataset = DATASETS[name]
    if pair not in dataset.langpairs:
        raise ValueError(f"{entry}: not in {pair}; sacreBLEU has it in {', '.join(sorted(dataset.langpairs))}")
    src = Path(dataset._get_txt_file_path(pair, "src"))

    def references() -> list[Path]:
        return sorted(src.parent.glob(f"{src.name.removesuffix('src')}ref*")) if src.is_file() else []

    if not references():
        if not fetch:
            raise NotFetched(f"{entry} is not here yet: run `lit-transformer prepare`")
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(CONNECT_SECONDS)
        try:
            dataset.get_files(pair)
        except (OSError, SystemExit, EOFError) as error:  # it ends the program where a checksum is wrong
            reason = "not what it should be" if isinstance(error, SystemExit) else error
            raise ValueError(
                f"{entry} cannot be fetched ({reason}): run `sacrebleu -t {name} -l {pair} --echo src` where there is "
                f"a network, and bring what it made in ~/.sacrebleu/{name} to {src.parent}"
            ) from error
        finally:
            socket.setdefaulttimeout(before)
    return src, references()[0], len(references())
