"""Shards: the same text whatever their size and however often their preparation is killed."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from ranks import kill_session, members
from test_corpus import TEST, VALID, config_of, pairs, quietly

from lit_transformer import corpus, shards
from lit_transformer.corpus import prepare
from lit_transformer.store import Store
from lit_transformer.tokenizer import Tokenizer


@pytest.fixture
def mixed():
    """Pairs of every kind, duplicates far from each other."""
    rng = random.Random(1)
    text = pairs(400)
    text += [("", "x"), ("a\0b", "c"), VALID[0], ("\u2581", "word " * 80)] * 5 + rng.sample(text, 60)
    rng.shuffle(text)
    return text


def files_of(store: Store) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.folder.iterdir()}


@pytest.mark.parametrize("size", [7, 64, 479, 480, 481])
def test_shards_of_any_size_give_the_same_store(tmp_path, monkeypatch, mixed, size):
    assert len(mixed) == 480
    config = config_of(tmp_path, mixed, test=TEST, max_length=60)
    whole = quietly(config, tmp_path / "whole")
    monkeypatch.setattr(shards, "SHARD", size)
    # In this process: what processes change is tested below, and each would take its time to start.
    monkeypatch.setattr(shards, "in_parallel", lambda work, jobs: (work(*job) for job in jobs))
    monkeypatch.setattr(shards, "in_process", lambda waiting, work, *arguments: work(*arguments))
    assert files_of(quietly(config, tmp_path / "parts")) == files_of(whole)


def test_several_processes_give_the_same_store(tmp_path, monkeypatch, mixed):
    config = config_of(tmp_path, mixed, test=TEST, max_length=60)
    whole = quietly(config, tmp_path / "whole")
    monkeypatch.setattr(shards, "SHARD", 100)
    said = []
    parts = Store(prepare(config, tmp_path / "parts", said.append))
    assert files_of(parts) == files_of(whole)
    assert len({line for line in said if "dropped" in line}) == len(whole.meta["report"]["train"]["dropped"])


def test_what_is_done_is_not_done_again(tmp_path, monkeypatch, mixed):
    config = config_of(tmp_path, mixed, test=TEST)
    whole = quietly(config, tmp_path / "whole")
    monkeypatch.setattr(shards, "SHARD", 100)
    done = Counter()

    def counting(work, jobs):
        for job in jobs:
            counts = work(*job)
            done[work.__name__] += 1
            yield counts

    monkeypatch.setattr(shards, "in_parallel", counting)
    monkeypatch.setattr(shards, "in_process", lambda waiting, work, *arguments: work(*arguments))

    class Stop(Exception):
        """Not of the kind that says that something is wrong with the text."""

    for step, wanted in (("clean", 3), ("learn", 5), ("encode", 7)):
        original = getattr(shards, step)

        def stopping(*arguments, original=original, step=step, wanted=wanted):
            if sum(done.values()) == wanted:
                raise Stop
            return original(*arguments)

        stopping.__name__ = step
        monkeypatch.setattr(shards, step, stopping)
        with pytest.raises(Stop):
            quietly(config, tmp_path / "root")
        monkeypatch.setattr(shards, step, original)
    monkeypatch.setattr(shards, "learn", lambda *arguments: pytest.fail("learned again"))
    assert files_of(quietly(config, tmp_path / "root")) == files_of(whole)
    assert done == {"clean": 5, "encode": 5}


COMMAND = """
import sys
from pathlib import Path
from lit_transformer import shards
from lit_transformer.sources import CorpusConfig
from lit_transformer.corpus import prepare
if __name__ == "__main__":
    shards.SHARD = 200
    folder = Path(sys.argv[1])
    files = {split: [str(folder / f"{split}.{side}") for side in ("src", "tgt")] for split in ("train", "valid")}
    print(prepare(CorpusConfig(source="files", vocab_size=300, **files), Path(sys.argv[2])))
"""


def start(folder: Path, root: Path) -> subprocess.Popen:
    program = folder / "program.py"
    program.write_text(COMMAND)
    environment = {**os.environ, "PYTHONPATH": str(Path(shards.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, str(program), str(folder), str(root)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_killed_at_random_moments_it_goes_on_and_leaves_no_process(tmp_path):
    config = config_of(tmp_path, pairs(20_000))
    whole = quietly(config, tmp_path / "whole")
    root, rng = tmp_path / "root", random.Random(2)

    def done() -> int:
        return len(list(root.glob(".*.part/*.json")))

    for kills in range(20):
        process, before = start(tmp_path, root), done()
        while done() <= before and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        if process.poll() is not None:
            assert kills >= 4
            break
        # The first process alone: the others must notice.
        process.send_signal(signal.SIGINT if kills % 3 else signal.SIGKILL)
        process.communicate(timeout=60)
        for _ in range(100):
            if not members(process.pid):
                break
            time.sleep(0.1)
        left = members(process.pid)
        kill_session(process.pid)
        assert not left
    process = start(tmp_path, root)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert files_of(Store(Path(out.strip()))) == files_of(whole)
    assert {entry.name for entry in root.iterdir()} <= {".lock", ".digests.json", Path(out.strip()).name}


@pytest.mark.slow
def test_a_killed_worker_is_one_error_and_the_work_goes_on(tmp_path):
    config = config_of(tmp_path, pairs(30_000))
    root = tmp_path / "root"
    process = start(tmp_path, root)
    while not list(root.glob(".*.part/*.cleaned.json")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    workers = [pid for pid in members(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a process that prepares text has been killed" in errors
    assert list(root.glob(".*.part/*.cleaned.json"))
    whole = quietly(config, tmp_path / "whole")  # in one shard
    out, errors = start(tmp_path, root).communicate(timeout=120)
    assert files_of(Store(Path(out.strip()))) == files_of(whole), errors


def test_equal_values_are_found_wherever_they_stand():
    rng = np.random.default_rng(0)
    for size in (0, 1, 2, 50, 1000):
        values = rng.integers(0, max(1, size // 2), size).astype(np.uint64)
        seen: set[int] = set()
        expected = [not (int(v) in seen or seen.add(int(v))) for v in values]
        assert shards.first_ones(values).tolist() == expected


def test_a_sample_has_its_size_and_depends_on_the_text_alone():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**64, 5000, dtype=np.uint64)
    keep = rng.random(5000) < 0.8
    taken = shards.sample(values, keep, 1000)
    assert taken.sum() == 1000
    assert not (taken & ~keep).any()
    order = rng.permutation(5000)
    assert (shards.sample(values[order], keep[order], 1000) == taken[order]).all()
    assert (shards.sample(values, keep, 4500) == keep).all()
    # Spread over the whole text: each fifth has its share, within five standard deviations.
    shares = [part.sum() for part in np.split(taken, 5)]
    assert max(abs(share - 200) for share in shares) < 5 * np.sqrt(200 * 0.8)


def test_the_tokeniser_learns_from_a_sample_of_a_large_text_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "TOKENIZER_PAIRS", 150)
    monkeypatch.setattr(shards, "SHARD", 100)
    monkeypatch.setattr(shards, "in_parallel", lambda work, jobs: (work(*job) for job in jobs))
    monkeypatch.setattr(shards, "in_process", lambda waiting, work, *arguments: work(*arguments))
    trained = []
    train = Tokenizer.train
    monkeypatch.setattr(shards.Tokenizer, "train", lambda lines, size: train(trained.extend(lines) or trained, size))
    text = pairs(400)
    said = []
    store = Store(prepare(config_of(tmp_path, text), tmp_path / "root", said.append))
    taken = list(zip(trained[::2], trained[1::2], strict=True))
    assert len(taken) == 150
    left = iter(text)
    assert all(pair in left for pair in taken)  # whole pairs, in their order
    assert "corpus: training the tokeniser on 150 of 400 pairs" in said
    assert store.meta["report"]["tokenizer"]["pairs"] == 150
    assert store.meta["report"]["train"]["kept"] == 400


@pytest.mark.parametrize("rule", ["blank", "nul", "overlap", "duplicate", "length", "ratio"])
def test_every_rule_can_be_switched_off(tmp_path, rule):
    breaking = {
        "blank": ("", ""),
        "nul": ("a\0b", "c\0d"),
        "overlap": VALID[0],
        "duplicate": pairs(1)[0],
        "length": ("word " * 30, "wort " * 30),
        "ratio": ("a", "b c d e f g h i j k l m n o p q r s t"),
    }
    text = [*pairs(40), *breaking.values()]
    options = {"max_length": 60, "max_ratio": 9.0}
    rules = [name for name in breaking if name != rule]
    store = quietly(config_of(tmp_path, text, clean=rules, **options), tmp_path / "root")
    report = store.meta["report"]["train"]
    expected = dict.fromkeys(rules, 1)
    if rule == "blank":
        expected.pop("ratio", None)
        expected["ratio"] = 1
    assert report["dropped"] == expected
    assert report["kept"] == 41
    assert quietly(config_of(tmp_path, text, **options), tmp_path / "root").folder != store.folder
