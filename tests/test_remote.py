"""WMT14's Parquet files, from a folder and from a hub of the tests' own, and sacreBLEU's test sets."""

import gzip
import hashlib
import http.server
import io
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hub import Hub
from sacrebleu.dataset import DATASETS

from lit_transformer import remote
from lit_transformer.__main__ import main
from lit_transformer.corpus import prepare
from lit_transformer.remote import NotFetched, parquet_files, parquet_pairs, test_set_files
from lit_transformer.sources import CorpusConfig, open_source
from lit_transformer.store import Store

test_set_files.__test__ = False
PAIRS = [(f"a small house {i}", f"ein kleines Haus {i}") for i in range(60)]  # English, German
HELD_OUT = {"validation": [("good morning", "guten Morgen")], "test": [("good night", "gute Nacht")]}


def write(path: Path, rows, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"translation": [row and {"de": row[1], "en": row[0]} for row in rows]})
    pyarrow.parquet.write_table(table, path, **options)
    return path


@pytest.fixture
def wmt(tmp_path) -> Path:
    """A folder as the hub has it, the training text in two files."""
    folder = tmp_path / "wmt14"
    for split, rows in HELD_OUT.items():
        write(folder / f"de-en/{split}-00000-of-00001.parquet", rows)
    for number in range(2):
        write(
            folder / f"de-en/train-{number:05}-of-00002.parquet",
            PAIRS[30 * number : 30 * (number + 1)],
            row_group_size=7,
        )
    (folder / "README.md").write_text("configs")
    return folder


def config(wmt, **options) -> CorpusConfig:
    return CorpusConfig(
        **{"source": "wmt14", "dataset": str(wmt), "src_lang": "en", "tgt_lang": "de", "vocab_size": 300, **options}
    )


def read(config: CorpusConfig) -> dict[str, list]:
    return {split: list(part.pairs(Counter())) for split, part in open_source(config).items()}


# A folder


@pytest.mark.parametrize("languages", [("en", "de"), ("de", "en")])
def test_a_folder_gives_its_pairs_in_either_direction(wmt, languages):
    order = slice(None) if languages == ("en", "de") else slice(None, None, -1)
    expected = {"train": PAIRS, "valid": HELD_OUT["validation"], "test": HELD_OUT["test"]}
    found = read(config(wmt, src_lang=languages[0], tgt_lang=languages[1]))
    assert found == {split: [pair[order] for pair in rows] for split, rows in expected.items()}


def test_a_folder_named_the_other_way_round_or_with_whole_splits_is_read_too(wmt):
    (wmt / "de-en").rename(wmt / "en-de")
    (wmt / "en-de/test-00000-of-00001.parquet").rename(wmt / "en-de/test.parquet")
    assert read(config(wmt))["test"] == HELD_OUT["test"]


def test_it_becomes_the_store_that_the_same_text_in_files_becomes(wmt, tmp_path):
    names = {"train": PAIRS, "valid": HELD_OUT["validation"], "test": HELD_OUT["test"]}
    files = {}
    for split, rows in names.items():
        files[split] = [str(tmp_path / f"{split}.{side}") for side in (0, 1)]
        for side, file in enumerate(files[split]):
            Path(file).write_text("".join(f"{row[side]}\n" for row in rows))
    plain = CorpusConfig(source="files", src_lang="en", tgt_lang="de", vocab_size=300, **files)
    stores = [Store(prepare(one, tmp_path / "root", lambda line: None)) for one in (config(wmt), plain)]
    assert stores[0].folder.name.startswith("wmt14-en-de-")
    assert stores[0].fingerprint == stores[1].fingerprint
    reports = [store.meta["report"] for store in stores]
    assert reports[0]["fingerprints"]["cleaned"] == reports[1]["fingerprints"]["cleaned"]
    assert reports[0]["fingerprints"]["raw"] != reports[1]["fingerprints"]["raw"]


def test_the_store_does_not_depend_on_where_the_folder_lies(wmt, tmp_path):
    first = prepare(config(wmt), tmp_path / "root", lambda line: None)
    elsewhere = wmt.rename(tmp_path / "elsewhere")
    said = []
    assert prepare(config(elsewhere), tmp_path / "root", said.append) == first
    assert said == [f"corpus: {first} is up to date"]


def test_missing_sentences_and_newlines_inside_are_counted(wmt, tmp_path):
    rows = [("one\ntwo", "eins\r\nzwei"), (None, "nichts"), None, ("a\rb\u2028c\x85d", "x"), *PAIRS]
    for number, part in enumerate((rows[:3], rows[3:])):
        write(wmt / f"de-en/train-{number:05}-of-00002.parquet", part)
    notes = Counter()
    found = list(open_source(config(wmt))["train"].pairs(notes))
    assert found[:4] == [("one two", "eins zwei"), ("", "nichts"), ("", ""), ("a\rb\u2028c\x85d", "x")]
    assert notes == {
        "missing sentences read as empty": 3,
        "sentences with newlines inside, made spaces": 2,
    }
    report = Store(prepare(config(wmt), tmp_path / "root", lambda line: None)).meta["report"]
    assert report["train"]["dropped"] == {"blank": 2}
    assert report["notes"] == notes


def test_how_much_has_been_read_grows_to_one(wmt):
    part = open_source(config(wmt))["train"]
    shares = [part.share_read() for _ in part.pairs(Counter())] + [part.share_read()]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[-1] == 1


def refused(wmt, root: Path, **options) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        prepare(config(wmt, **options), root, lambda line: None)
    assert not [entry for entry in root.glob("*") if entry.name != ".lock"], "something half-written stays"
    assert not [entry for entry in root.glob(".*") if entry.name not in (".lock", ".digests.json")]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ({"de": ["x"], "en": ["y"]}, "de: string, en: string"),
        ({"translation": ["x"]}, "translation: string"),
        ({"translation": [{"de": "x", "fr": "y"}]}, "translation: struct<de: string, fr: string>"),
        ({"translation": [{"de": 1, "en": "y"}]}, "translation: struct<de: int64, en: string>"),
        ({"translation": [["x", "y"]]}, "translation: list<element: string>"),
    ],
)
@pytest.mark.parametrize("split", ["train-00001-of-00002", "test-00000-of-00001"])
def test_a_file_of_another_schema_is_refused_by_name(wmt, tmp_path, table, found, split):
    path = wmt / f"de-en/{split}.parquet"
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    message = refused(wmt, tmp_path / "root")
    assert message.startswith(f"{path} holds {found}; it must hold translation: struct<de: string, en: string>")


def test_large_strings_are_strings(wmt):
    schema = pyarrow.schema({"translation": pyarrow.struct({n: pyarrow.large_string() for n in ("cs", "de", "en")})})
    rows = [{"translation": {"cs": "c", "de": "d", "en": "e"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), wmt / "de-en/test-00000-of-00001.parquet")
    assert read(config(wmt))["test"] == [("e", "d")]


@pytest.mark.parametrize("damage", ["empty", "short", "no parquet", "middle", "not utf-8"])
def test_a_damaged_file_is_refused_by_name(wmt, tmp_path, damage):
    path = wmt / "de-en/train-00001-of-00002.parquet"
    whole = path.read_bytes()
    if damage == "not utf-8":
        column = pyarrow.array([b"gut", b"schl\xff\xfe"]).view(pyarrow.string())
        table = pyarrow.table({"translation": pyarrow.StructArray.from_arrays([column, column], ["de", "en"])})
        pyarrow.parquet.write_table(table, path)
    else:
        middle = whole[:4] + bytes(200) + whole[204:]
        path.write_bytes({"empty": b"", "short": whole[:-100], "no parquet": b"PAR0" * 99, "middle": middle}[damage])
    message = refused(wmt, tmp_path / "root")
    assert message.startswith(f"{path}: ")
    assert ("not UTF-8" if damage == "not utf-8" else "damaged") in message


def test_a_split_without_a_row_is_refused(wmt, tmp_path):
    schema = pyarrow.schema({"translation": pyarrow.struct({name: pyarrow.string() for name in ("de", "en")})})
    path = wmt / "de-en/validation-00000-of-00001.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([], schema), path)
    assert refused(wmt, tmp_path / "root") == f"{path}: no row"


def test_what_a_folder_lacks_is_named(wmt, tmp_path):
    root = tmp_path / "root"
    assert "holds de-en, and neither fr-en nor en-fr" in refused(wmt, root, tgt_lang="fr")
    assert "no such folder; it must hold de-en/train-*.parquet" in refused(tmp_path / "nowhere", root)
    (wmt / "de-en/train-00000-of-00002.parquet").unlink()
    assert "lacks train-00000-of-00002.parquet beside 1 of the 2 files" in refused(wmt, root)
    write(wmt / "de-en/train-00000-of-00002.parquet", PAIRS[:30])
    stray = write(wmt / "de-en/train-00007-of-00002.parquet", PAIRS[:3])
    assert "holds train-00007-of-00002.parquet beside 2 of the 2 files" in refused(wmt, root)
    stray.unlink()
    (wmt / "de-en/train-00000-of-00002.parquet").unlink()
    (wmt / "de-en/validation-00000-of-00001.parquet").unlink()
    (wmt / "de-en/train-00001-of-00002.parquet").rename(wmt / "de-en/train-00000-of-00001.parquet")
    assert "holds no validation-*.parquet" in refused(wmt, root)


# The hub


def prepared(url: str, home: Path, *more: str) -> subprocess.CompletedProcess:
    """The command with a hub at that address and a cache of its own."""
    options = ["--data.source", "wmt14", "--data.src_lang", "en", "--data.tgt_lang", "de", "--data.vocab_size", "300"]
    return subprocess.run(
        [sys.executable, "-m", "lit_transformer", "prepare", *options, "--data.root", str(home / "data"), *more],
        env={**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_a_dataset_is_fetched_once_and_then_read_without_a_network(wmt, tmp_path):
    write(wmt / "fr-en/train-00000-of-00001.parquet", PAIRS)  # not asked for, so not fetched
    with Hub("wmt/wmt14", wmt) as hub:
        first = prepared(hub.url, tmp_path)
        assert first.returncode == 0, first.stderr
        fetched = {line.split("/")[-1] for line in hub.asked if line.startswith("GET") and "/resolve/" in line}
        assert fetched == {path.name for path in (wmt / "de-en").iterdir()}
        assert not [line for line in hub.asked if "fr-en" in line]
        hub.asked.clear()
        again = prepared(hub.url, tmp_path)
        assert "is up to date" in again.stderr
        assert not hub.asked
    without = prepared("http://127.0.0.1:9", tmp_path, "--data.max_length", "99")
    assert without.returncode == 0, without.stderr
    report = Store(Path(without.stdout.splitlines()[-1])).meta["report"]
    assert report["train"]["read"] == len(PAIRS)


def test_without_a_network_one_line_says_what_to_fetch_where_to_put_it_and_how_to_go_on(tmp_path):
    done = prepared("http://127.0.0.1:9", tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("lit-transformer prepare: error: dataset = 'wmt/wmt14' cannot be fetched (")
    for words in ("hf download wmt/wmt14 --repo-type dataset", "'de-en/*'", "--local-dir wmt14", "data.dataset"):
        assert words in error
    assert [entry.name for entry in (tmp_path / "data").iterdir()] == [".lock"]


@pytest.fixture
def hub_at(monkeypatch, tmp_path):
    """Point the hub's library, in this process, at an address and an empty cache."""

    def point(url: str) -> None:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    return point


def test_a_hub_that_never_answers_is_given_up(hub_at, monkeypatch):
    monkeypatch.setattr(remote, "CONNECT_SECONDS", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hub_at(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ValueError, match=r"cannot be fetched .*timed out"):
            remote.fetch_dataset("wmt/wmt14", "en", "de")


def test_a_dataset_that_the_hub_does_not_have_is_named(hub_at, wmt):
    with Hub("wmt/wmt14", wmt) as hub:
        hub_at(hub.url)
        with pytest.raises(ValueError, match=r"dataset = 'wmt/wmt15' cannot be fetched"):
            remote.fetch_dataset("wmt/wmt15", "en", "de")


def test_looking_for_a_dataset_asks_nobody(hub_at, wmt):
    with Hub("wmt/wmt14", wmt) as hub:
        hub_at(hub.url)
        with pytest.raises(NotFetched, match=r"wmt/wmt14 is not here yet: run `lit-transformer prepare`"):
            parquet_files("wmt/wmt14", "en", "de")
        assert not hub.asked


# sacreBLEU's test sets


@pytest.fixture
def test_set(tmp_path, monkeypatch):
    """wmt14/full as sacreBLEU would have it in a cache of its own."""
    dataset = DATASETS["wmt14/full"]
    monkeypatch.setattr(dataset, "_outdir", str(tmp_path / "sacrebleu"))
    monkeypatch.setattr(dataset, "_rawdir", str(tmp_path / "sacrebleu/raw"))
    return dataset


test_set.__test__ = False


def in_cache(test_set, pair: str = "en-de", src: str = "a\u2028b\nc\n", ref: str = "x\ny\n") -> None:
    for field, text in (("src", src), ("ref", ref)):
        path = Path(test_set._get_txt_file_path(pair, field))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, newline="")


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_test_set_takes_the_place_of_a_split(wmt, tmp_path, test_set, split):
    in_cache(test_set)
    store = Store(prepare(config(wmt, **{split: ["sacrebleu:wmt14/full"]}), tmp_path / "root", lambda line: None))
    assert store.text(split, "src") == ["a\u2028b", "c"]
    assert store.text(split, "tgt") == ["x", "y"]
    other = {"valid": "test", "test": "valid"}[split]
    assert store.text(other, "src") == [HELD_OUT["validation" if other == "valid" else "test"][0][0]]


def test_a_test_set_stands_beside_files(tmp_path, test_set):
    in_cache(test_set)
    train = tmp_path / "train.tsv"
    train.write_text("".join(f"{src}\t{tgt}\n" for src, tgt in PAIRS))
    files = CorpusConfig(
        source="files", src_lang="en", tgt_lang="de", train=[str(train)], valid=["sacrebleu:wmt14/full"], vocab_size=300
    )
    assert Store(prepare(files, tmp_path / "root", lambda line: None)).text("valid", "tgt") == ["x", "y"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test": ["sacrebleu:wmt99"]}, "sacreBLEU knows no test set 'wmt99'"),
        ({"test": ["sacrebleu:wmt14/full"], "dataset_pair": "xx"}, "not in en-xx; sacreBLEU has it in cs-en, de-en,"),
        ({"train": ["sacrebleu:wmt14/full"]}, "train = .'sacrebleu:wmt14/full'.: sacrebleu:SET is both sides"),
        ({"test": ["sacrebleu:wmt14/full", "x"]}, "stands alone, as valid or test"),
    ],
)
def test_a_wrong_test_set_is_refused_by_name(wmt, tmp_path, options, message):
    if pair := options.pop("dataset_pair", None):
        with pytest.raises(ValueError, match=message):
            test_set_files(options["test"][0], "en", pair, fetch=False)
    else:
        with pytest.raises(ValueError, match=message):
            prepare(config(wmt, **options), tmp_path / "root", lambda line: None)


def test_a_set_with_several_references_says_so(tmp_path, monkeypatch):
    dataset = DATASETS["wmt21"]
    monkeypatch.setattr(dataset, "_outdir", str(tmp_path))
    for field in ("src", "ref:C", "ref:A", "docid"):  # as it names them; which there are stands in the downloaded file
        Path(dataset._get_txt_file_path("en-de", field)).write_text(f"{field}\n")
    train = tmp_path / "train.tsv"
    train.write_text("".join(f"{src}\t{tgt}\n" for src, tgt in PAIRS))
    part = open_source(
        CorpusConfig(source="files", src_lang="en", tgt_lang="de", train=[str(train)], valid=["sacrebleu:wmt21"])
    )
    notes = Counter()
    assert list(part["valid"].pairs(notes)) == [("src", "ref:A")]
    assert notes == {"references of a test set beyond its first, not used": 1}


@pytest.fixture
def archive(tmp_path):
    """sacreBLEU's download of wmt14/full, with one sentence in it, on a server of this machine."""
    sgm = {
        name: f'<{kind} setid="x">\n<doc docid="1" origlang="en">\n<seg id="1">{text}</seg>\n</doc>\n</{kind}>\n'
        for name, kind, text in (("src", "srcset", "good morning"), ("ref", "refset", "guten Morgen"))
    }
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for paths in DATASETS["wmt14/full"].langpairs.values():
            for path, text in zip(paths, sgm.values(), strict=True):
                entry = tarfile.TarInfo(path)
                entry.size = len(text.encode())
                tar.addfile(entry, io.BytesIO(text.encode()))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(raw.getvalue())

        def log_message(self, *_):
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/full.tgz", hashlib.md5(raw.getvalue()).hexdigest()
    server.shutdown()
    server.server_close()


def test_a_test_set_is_fetched_and_checked_by_sacrebleu(test_set, archive, monkeypatch, capsys):
    url, md5 = archive
    monkeypatch.setattr(test_set, "data", [url])
    monkeypatch.setattr(test_set, "md5", ["0" * 32])
    with pytest.raises(ValueError, match=r"sacrebleu:wmt14/full cannot be fetched \(not what it should be\)"):
        test_set_files("sacrebleu:wmt14/full", "en", "de", fetch=True)
    for left in Path(test_set._rawdir).iterdir():
        left.unlink()
    monkeypatch.setattr(test_set, "md5", [md5])
    src, ref, references = test_set_files("sacrebleu:wmt14/full", "en", "de", fetch=True)
    assert (src.read_text(), ref.read_text(), references) == ("good morning\n", "guten Morgen\n", 1)


def test_without_a_network_a_test_set_says_where_it_would_be(test_set, monkeypatch):
    with pytest.raises(NotFetched, match="sacrebleu:wmt14/full is not here yet"):
        test_set_files("sacrebleu:wmt14/full", "en", "de", fetch=False)
    monkeypatch.setattr(test_set, "data", ["http://127.0.0.1:9/full.tgz"])
    before = socket.getdefaulttimeout()
    with pytest.raises(ValueError, match=r"cannot be fetched .*refused") as caught:
        test_set_files("sacrebleu:wmt14/full", "en", "de", fetch=True)
    assert f"bring what it made in ~/.sacrebleu/wmt14/full to {test_set._outdir}" in str(caught.value)
    assert socket.getdefaulttimeout() == before


def test_the_message_names_a_command_that_exists():
    """What is told to do elsewhere is what the library's own program understands."""
    program = Path(sys.executable).with_name("hf")
    said = subprocess.run([program, "download", "--help"], capture_output=True, text=True, check=True).stdout
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    assert all(option in plain for option in ("--repo-type", "--include", "--local-dir"))


def test_rows_come_with_the_share_of_the_file(wmt):
    path = wmt / "de-en/train-00000-of-00002.parquet"
    parts = list(parquet_pairs(path, "de", "en", Counter()))
    assert [row for rows, _ in parts for row in rows] == [(de, en) for en, de in PAIRS[:30]]
    assert parts[-1][1] == 1


DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="needs real text, ../shared/data, beside the repository")
def test_real_text_in_wmt14s_layout_is_prepared_trained_on_and_tested_as_wmt14_would_be(tmp_path):
    def lines(name):
        raw = (gzip.decompress((DATA / f"{name}.{lang}.gz").read_bytes()).decode() for lang in ("en", "de"))
        return list(zip(*(text.split("\n")[:-1] for text in raw), strict=True))

    folder, run = tmp_path / "wmt14", tmp_path / "run"
    train, test = lines("multi30k/train"), lines("newstest/newstest2014.en-de")
    for number in range(3):
        write(folder / f"de-en/train-{number:05}-of-00003.parquet", train[number::3])
    # An untrained model writes to the limit: of validation a part will do.
    write(folder / "de-en/validation-00000-of-00001.parquet", lines("newstest/newstest2013.en-de")[:100])
    write(folder / "de-en/test-00000-of-00001.parquet", test)
    small = {
        "data.dataset": folder, "data.root": tmp_path / "data", "data.vocab_size": 2000, "data.num_workers": 0,
        "data.tokens_per_update": 500, "model.num_layers": 1, "model.d_model": 32, "model.d_ff": 64,
        "model.num_heads": 2, "model.d_k": 16, "model.d_v": 16, "model.warmup": 20, "model.bleu_every": 0,
        "trainer.max_steps": 40, "trainer.accelerator": "cpu", "trainer.devices": 1, "run.dir": run,
        "run.checkpoint_every": 10,
    }  # fmt: skip
    conf = ["--config", str(Path(__file__).parents[1] / "conf/base.yaml")]
    assert main(["fit", *conf, *(str(word) for key, value in small.items() for word in (f"--{key}", value))]) == 0
    result = json.loads((run / "result.json").read_text())
    store = Store(next((tmp_path / "data").glob("wmt14-en-de-*")))
    assert (result["data"], result["text"]) == (store.fingerprint, store.meta["report"]["fingerprints"])
    assert store.text("test", "tgt") == [de for _, de in test]
    assert store.meta["report"]["train"]["read"] == len(train) == 29_000
    assert main(["test", str(run), "--average", "2", "--beam_size", "1"]) == 0
    [outputs] = run.glob("hypotheses.test*.txt")
    assert outputs.read_bytes().count(b"\n") == len(test) == 3003
    [row] = run.glob("table2*.md")
    assert "27.3" in row.read_text(), "this is newstest2014, so the paper's figures stand beside it"
