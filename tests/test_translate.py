"""Translator and the translate command: one output for each input, whatever the input holds."""

import contextlib
import gzip
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys

import pytest
import torch

from lit_transformer.__main__ import main
from lit_transformer.decode import search_all
from lit_transformer.tokenizer import EOS_ID, Tokenizer
from lit_transformer.translate import Translator, one_line

WORDS = [consonant + vowel for consonant in "bdkm" for vowel in "aeiou"]
EMOJI = "\U0001f680"
# C4: nothing to see in any of them, so nothing may be invented for them.
INVISIBLE = {
    "empty": "",
    "spaces": "   ",
    "tab": "\t",
    "no-break space": "\u00a0",
    "zero width space": "\u200b",
    "byte order mark": "\ufeff",
    "ideographic space": "\u3000",
    "soft hyphen": "\u00ad",
    "NUL": "\0",
    "mixture": " \t\u00a0\u200b\ufeff ",
}


def sentence(count, seed=0):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def trained(folder, longest, **changes):
    """The checkpoint of a tiny model that was taught to copy, and nothing else of its run."""
    rng = random.Random(0)
    keys = {
        "data.source": "files",
        "data.root": folder / "store",
        "data.vocab_size": 300,
        "data.tokens_per_update": 250,
        "data.max_tokens": 1000,
        "data.num_workers": 0,
        "model.num_layers": 1,
        "model.d_model": 32,
        "model.d_ff": 64,
        "model.num_heads": 2,
        "model.warmup": 10,
        "model.lr_factor": 0.5,
        "model.bleu_every": 0,
        "trainer.accelerator": "cpu",
        "trainer.devices": 1,
        "trainer.max_steps": 12,
        "run.dir": folder / "run",
    }
    for split, count in (("train", changes.pop("lines", 300)), ("valid", 2)):
        text = "".join(f"{' '.join(rng.choices(WORDS, k=rng.randint(1, longest)))}\n" for _ in range(count))
        (folder / f"{split}.txt").write_text(text)
        keys[f"data.{split}"] = json.dumps([str(folder / f"{split}.txt")] * 2)
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        assert main(["fit", *(str(word) for key, value in keys.items() for word in (f"--{key}", value))]) == 0
    (checkpoint,) = (folder / "run" / "checkpoints").iterdir()
    alone = folder / "elsewhere" / "moved.ckpt"
    alone.parent.mkdir()
    shutil.move(checkpoint, alone)
    for name in ("run", "store"):  # a checkpoint must be enough to translate with
        shutil.rmtree(folder / name)
    for path in folder.glob("*.txt"):
        path.unlink()
    return alone


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of a few updates: it babbles, but always the same for the same input, and not nothing."""
    return trained(tmp_path_factory.mktemp("babbler"), longest=8, data__max_length=20)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A model with a table of 24 learned positions, source and target."""
    return trained(tmp_path_factory.mktemp("learned"), longest=8, model__position="learned", model__max_positions=24)


@pytest.fixture(scope="module")
def copier(tmp_path_factory):
    """A model that has learned to copy up to 70 words, in some 20 seconds."""
    return trained(
        tmp_path_factory.mktemp("copier"),
        longest=70,
        lines=2000,
        data__tokens_per_update=1000,
        data__max_tokens=2000,
        model__d_model=64,
        model__d_ff=128,
        model__dropout=0,
        model__warmup=100,
        trainer__max_steps=800,
    )


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def translator(checkpoint, warnings):
    return Translator(checkpoint, warn=warnings.append)


def first(translator, texts, **options):
    return [outputs[0] for outputs in translator.translate(texts, **options)]


def translate_file(checkpoint, folder, data, *options, name="input"):
    """Exit status and output lines of the command on a file with these bytes."""
    (folder / name).write_bytes(data)
    output = folder / "output"
    status = main(["translate", str(checkpoint), "--input", str(folder / name), "--output", str(output), *options])
    return status, lines(output) if output.exists() else None


def lines(path):
    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    return data.decode().split("\n")[:-1]


def never_ends(model, monkeypatch):
    """A model that would rather write anything than the end of the sentence."""
    original = model.step

    def step(tokens, state):
        logits = original(tokens, state)
        logits[..., EOS_ID] = -torch.inf
        return logits

    monkeypatch.setattr(model, "step", step)


# One output for each input


def test_an_empty_line_between_two_others_stays_an_empty_line(checkpoint, tmp_path):
    status, found = translate_file(checkpoint, tmp_path, b"Hello.\n\nWorld.\n")
    assert status == 0
    assert len(found) == 3
    assert found[0] != ""
    assert found[1] == ""
    assert found[2] != ""


@pytest.mark.parametrize("text", INVISIBLE.values(), ids=INVISIBLE)
def test_nothing_is_invented_for_a_line_without_a_visible_character(text, checkpoint, translator, tmp_path):
    assert translator.translate(["ba be", text, "bi"])[1] == [""]
    status, found = translate_file(checkpoint, tmp_path, f"ba be\n{text}\nbi\n".encode())
    assert (status, len(found), found[1]) == (0, 3, "")
    assert found[0] == first(translator, ["ba be"])[0] != ""


def test_all_invisible_lines_together_give_as_many_empty_lines(checkpoint, translator, tmp_path, warnings):
    texts = list(INVISIBLE.values())
    assert translator.translate(texts, n_best=3) == [[""] * 3] * len(texts)
    status, found = translate_file(checkpoint, tmp_path, "".join(f"{text}\n" for text in texts).encode())
    assert (status, found) == (0, [""] * len(texts))
    assert warnings == []


def test_no_input_gives_no_output(checkpoint, translator, tmp_path):
    assert translator.translate([]) == []
    assert translate_file(checkpoint, tmp_path, b"") == (0, [])


def test_a_newline_in_a_text_from_python_is_a_character_like_others(translator):
    assert len(translator.translate(["a\nb"])) == 1
    assert len(translator.translate(["a\nb", "c\r\nd\n", "\n"])) == 3
    assert translator.translate(["\n"]) == [[""]]


@pytest.mark.parametrize(
    "written",
    ["so\nit", "\n", "so\r\nit\n", "so\rit", "\n\n\n", "so\u2028it", "so\x85it", "so\x0bit"],
    ids=lambda text: ascii(text),
)
def test_whatever_the_model_writes_a_file_keeps_its_number_of_lines(written, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: written)
    status, found = translate_file(checkpoint, tmp_path, b"ba\nbe\n\nbi\n", "--n_best", "2")
    assert status == 0
    assert len(found) == 8
    assert found[0] == found[7] == one_line(written)
    assert found[4:6] == ["", ""]


def test_one_line_changes_line_ends_alone():
    assert one_line("a\nb\r\nc\rd") == "a b  c d"
    assert one_line("a  b\u2028c\td") == "a  b\u2028c\td"


def test_five_lines_with_one_very_long_and_an_emoji_come_back_in_order(checkpoint, tmp_path, capsys):
    texts = ["ba be", sentence(300), EMOJI, "", "mu"]
    status, found = translate_file(checkpoint, tmp_path, "".join(f"{text}\n" for text in texts).encode())
    shown = capsys.readouterr().err
    assert status == 0
    assert len(found) == 5
    assert found[3] == ""
    alone = Translator(checkpoint, warn=lambda line: None)
    for index in (0, 2, 4):
        assert found[index] == first(alone, [texts[index]])[0]
    long = [line for line in shown.splitlines() if "trained on at most" in line]
    assert len(long) == 1
    assert long[0].startswith("line 2 has ")
    assert str(len(alone.tokenizer.encode([texts[1]])[0])) in long[0]
    assert "at most 20" in long[0]


@pytest.mark.parametrize(("extra", "warned"), [(0, False), (1, True)])
def test_the_warning_starts_behind_the_longest_length_of_training(extra, warned, translator, warnings):
    text, count = "ba", 0
    while (count := len(translator.tokenizer.encode([text])[0])) < 20 + extra:
        text += " ba"
    assert count == 20 + extra
    translator.translate([text], beam_size=1)
    assert any("trained on at most" in line for line in warnings) == warned


def test_lines_are_numbered_over_the_whole_file(checkpoint, tmp_path, capsys):
    data = b"\n" * 299 + sentence(30).encode() + b"\n" + b"\n" * 300 + sentence(30).encode() + b"\n"
    status, found = translate_file(checkpoint, tmp_path, data, "--beam_size", "1")
    assert (status, len(found)) == (0, 601)
    assert [index for index, line in enumerate(found) if line] == [299, 600]
    numbers = re.findall(r"^line (\d+) has", capsys.readouterr().err, re.MULTILINE)
    assert numbers == ["300", "601"]


def test_many_lines_keep_their_order(checkpoint, tmp_path, translator):
    texts = [sentence(1 + index % 7, index) for index in range(300)]
    status, found = translate_file(checkpoint, tmp_path, "\n".join(texts).encode(), "--beam_size", "1")
    assert (status, len(found)) == (0, 300)
    for index in (0, 1, 255, 256, 299):
        assert found[index] == first(translator, [texts[index]], beam_size=1)[0]


def test_lines_together_and_one_by_one_give_the_same(translator):
    texts = [sentence(1 + index % 9, index) for index in range(20)] + [EMOJI, "so\u00e0", "ba  be"]
    together = translator.translate(texts, n_best=2)
    assert together == [translator.translate([text], n_best=2)[0] for text in texts]
    assert together[::-1] == translator.translate(texts[::-1], n_best=2)
    assert len({outputs[0] for outputs in together}) > 3  # a model that always says the same would prove nothing


def test_dropout_is_off_and_translating_twice_gives_the_same(translator):
    torch.manual_seed(1)
    once = translator.translate([sentence(6)])
    torch.manual_seed(2)
    assert translator.translate([sentence(6)]) == once
    assert not translator.model.training


@pytest.mark.parametrize(
    "text",
    ["a\0b", "\u2581", "\u2047", "<s>", "</s>", "<pad>", "<0x0A>", "\u202eba", "e\u0301", "\ud55c\uae00", "\x1b[0m"],
    ids=ascii,
)
def test_odd_characters_give_one_output_each(text, translator):
    assert len(translator.translate(["ba", text, "be"])) == 3
    assert [translator.translate([other]) for other in ("ba", "be")] == [
        [outputs] for outputs in translator.translate(["ba", text, "be"])[::2]
    ]


# Length limits


def test_a_model_that_never_ends_is_cut_at_input_plus_50_and_flagged(translator, warnings, monkeypatch):
    never_ends(translator.model, monkeypatch)
    sources = [[*ids, EOS_ID] for ids in translator.tokenizer.encode(["ba", sentence(10)])]
    found = search_all(translator.model, sources)
    assert [len(best.ids) for (best,) in found] == [len(source) + 50 for source in sources]
    assert not any(best.finished for (best,) in found)
    outputs = translator.translate(["ba", "", sentence(10)])
    assert len(outputs) == 3
    assert outputs[1] == [""]
    assert outputs[0] == [translator.tokenizer.decode(found[0][0].ids)]
    assert [line.split(":")[0] for line in warnings if "cut" in line] == ["line 1", "line 3"]


def test_the_warning_of_a_cut_output_gives_the_length_it_was_cut_at(learned, monkeypatch):
    warnings = []
    translator = Translator(learned, warn=warnings.append)
    never_ends(translator.model, monkeypatch)
    translator.translate(["ba be"])
    (cut,) = [line for line in warnings if "cut" in line]
    assert "24" in cut  # the table ends long before input + 50
    assert "+ 50" not in cut


@pytest.mark.parametrize("words", [1, 8, 20])
def test_learned_positions_end_the_output_where_their_table_ends(words, learned, monkeypatch):
    translator = Translator(learned, warn=lambda line: None)
    never_ends(translator.model, monkeypatch)
    (source,) = ([*ids, EOS_ID] for ids in translator.tokenizer.encode([sentence(words)]))
    assert len(source) <= 24
    ((best,),) = search_all(translator.model, [source])
    assert len(best.ids) == 24
    assert not best.finished
    assert len(translator.translate([sentence(words)])) == 1


def test_an_input_as_long_as_the_learned_table_works_and_one_more_is_refused_by_line(learned, tmp_path, capsys):
    translator = Translator(learned, warn=lambda line: None)
    text = "ba"
    while len(translator.tokenizer.encode([text])[0]) < 23:  # and the end of the sentence
        text += " ba"
    assert len(translator.translate([text])) == 1
    status, found = translate_file(learned, tmp_path, f"ba\n\nbe\n{text} ba\nbi\n".encode())
    assert status == 1
    assert found is None
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1
    assert "line 4 has 25 tokens" in shown[0]
    assert "24" in shown[0]


def test_sinusoidal_positions_have_no_end(translator):
    assert len(translator.translate([sentence(600)], beam_size=1)) == 1


@pytest.mark.slow
def test_a_model_that_copies_gives_60_tokens_for_60(copier):
    translator = Translator(copier)
    for seed in range(3):
        # A first word may be two pieces, for want of the space before it.
        text = next(
            t for t in (sentence(60, seed), sentence(59, seed)) if len(translator.tokenizer.encode([t])[0]) == 60
        )
        (output,) = first(translator, [text])
        assert len(translator.tokenizer.encode([output])[0]) == 60


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--beam_size", "1"], []], ids=["greedy", "beam"])
def test_a_model_that_copies_copies_files(options, copier, tmp_path):
    texts = [sentence(count, count) for count in (3, 40, 12, 60, 25)]
    status, found = translate_file(copier, tmp_path, "".join(f"{text}\n" for text in texts).encode(), *options)
    assert status == 0
    assert len(found) == 5
    # Not each word must be right after 800 updates, but each line must be its own.
    for text, output in zip(texts, found, strict=True):
        assert len(output.split()) == len(text.split())
        same = sum(a == b for a, b in zip(output.split(), text.split(), strict=True))
        assert same > 0.9 * len(text.split())


# Several translations of a line


def test_n_best_starts_with_the_one_best_and_holds_different_ones(translator):
    texts = ["ba be", sentence(5)]
    one, four = translator.translate(texts), translator.translate(texts, n_best=4)
    assert [outputs[:1] for outputs in four] == one
    assert [len(outputs) for outputs in four] == [4, 4]
    assert len({outputs[0] for outputs in four} | {outputs[1] for outputs in four}) > 2


def test_n_best_lines_stand_one_behind_the_other(checkpoint, translator, tmp_path):
    status, found = translate_file(checkpoint, tmp_path, b"ba be\n\nmu\n", "--n_best", "3", "--beam_size", "5")
    assert status == 0
    expected = translator.translate(["ba be", "", "mu"], beam_size=5, n_best=3)
    assert found == [one_line(text) for outputs in expected for text in outputs]
    assert len(found) == 9


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--n_best", "5"], "n_best = 5"),
        (["--n_best", "0"], "n_best = 0"),
        (["--n_best", "-1"], "n_best = -1"),
        (["--beam_size", "0"], "beam_size = 0"),
        (["--length_penalty", "-1"], "length_penalty"),
        (["--length_penalty", "nan"], "length_penalty"),
        (["--device", "abacus"], "abacus"),
        (["--device", "cuda"], "cuda"),
    ],
    ids=str,
)
@pytest.mark.parametrize("data", [b"ba\n", b"\n"], ids=["a word", "a blank line"])
def test_options_out_of_range_are_refused_in_one_line(options, word, data, checkpoint, tmp_path, capsys):
    if torch.cuda.is_available() and "cuda" in options:
        pytest.skip("nothing wrong here")
    assert translate_file(checkpoint, tmp_path, data, *options) == (1, None)
    shown = capsys.readouterr().err
    assert word in shown.lower()
    assert len(shown.splitlines()) == 1


def test_alpha_changes_what_is_found(translator):
    texts = [sentence(count, count) for count in range(2, 9)]
    short, long = (first(translator, texts, length_penalty=alpha) for alpha in (0.0, 3.0))
    assert sum(map(len, short)) < sum(map(len, long))


def test_a_model_without_a_number_left_still_gives_as_many_outputs_as_asked_for(translator, warnings):
    with torch.no_grad():
        for parameter in translator.model.parameters():
            parameter.fill_(torch.nan)
    assert translator.translate(["ba", "", "be"], n_best=3) == [["", "", ""]] * 3
    assert [line.split(":")[0] for line in warnings] == ["line 1", "line 3"]


# Files


def test_a_gzipped_input_is_read(checkpoint, translator, tmp_path):
    status, found = translate_file(checkpoint, tmp_path, gzip.compress(b"ba be\n\nmu\n"), name="input.gz")
    assert status == 0
    assert found == first(translator, ["ba be", "", "mu"])


def test_a_gzipped_input_that_was_cut_short_is_refused(checkpoint, tmp_path, capsys):
    data = gzip.compress(sentence(500).encode())[:-20]
    assert translate_file(checkpoint, tmp_path, data, name="input.gz") == (1, None)
    assert "input.gz: damaged or cut short" in capsys.readouterr().err


@pytest.mark.parametrize(
    "data",
    [b"ba be\r\nmu\r\n", b"\xef\xbb\xbfba be\nmu\n", b"ba be\nmu"],
    ids=["carriage returns", "byte order mark", "no newline at the end"],
)
def test_what_a_file_adds_to_its_lines_is_not_translated(data, checkpoint, translator, tmp_path):
    assert translate_file(checkpoint, tmp_path, data) == (0, first(translator, ["ba be", "mu"]))


@pytest.mark.parametrize("character", ["\u2028", "\x85", "\x0b", "\x0c", "\x1c", "\r"], ids=ascii)
def test_only_a_newline_ends_a_line(character, checkpoint, tmp_path):
    status, found = translate_file(checkpoint, tmp_path, f"ba{character}be\nmu\n".encode())
    assert (status, len(found)) == (0, 2)


def test_input_that_is_not_utf8_is_refused_by_line_and_leaves_no_output(checkpoint, tmp_path, capsys):
    assert translate_file(checkpoint, tmp_path, b"ba\nbe\nb\xe4\nbi\n") == (1, None)
    shown = capsys.readouterr().err
    assert "input, line 3, byte 2: not UTF-8" in shown
    assert len(shown.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["input"]


def test_an_error_in_a_later_part_leaves_an_earlier_output_as_it_was(checkpoint, tmp_path):
    (tmp_path / "output").write_text("yesterday\n")
    status, found = translate_file(checkpoint, tmp_path, b"\n" * 600 + b"\xff\n")
    assert (status, found) == (1, ["yesterday"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input", "output"]


def test_a_file_can_be_translated_in_place(checkpoint, translator, tmp_path):
    path = tmp_path / "text"
    path.write_text("ba be\n\nmu\n")
    assert main(["translate", str(checkpoint), "--input", str(path), "--output", str(path)]) == 0
    assert lines(path) == first(translator, ["ba be", "", "mu"])


def test_an_output_folder_is_made(checkpoint, tmp_path):
    (tmp_path / "input").write_text("ba\n")
    output = tmp_path / "new" / "deep" / "output"
    assert main(["translate", str(checkpoint), "--input", str(tmp_path / "input"), "--output", str(output)]) == 0
    assert len(lines(output)) == 1


def test_translations_go_to_standard_output_and_warnings_to_standard_error(checkpoint, tmp_path, capfdbinary):
    (tmp_path / "input").write_bytes(f"ba be\n\n{sentence(30)}\n".encode())
    assert main(["translate", str(checkpoint), "--input", str(tmp_path / "input")]) == 0
    shown = capfdbinary.readouterr()
    assert shown.out.count(b"\n") == 3
    assert shown.out.split(b"\n")[1] == b""
    assert b"line 3 has" in shown.err
    assert b"line 3 has" not in shown.out


def test_a_pipe_through_a_process_gives_what_files_give(checkpoint, translator):
    # In a locale of bytes: what is read and written is UTF-8 whatever the machine believes.
    text = f"ba be\n\n{EMOJI}\n\u00a0\nmu"
    done = subprocess.run(
        [sys.executable, "-m", "lit_transformer", "translate", str(checkpoint)],
        input=text.encode(),
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C", "PYTHONUTF8": "0"},
    )
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    expected = [one_line(output) for output in first(translator, text.split("\n"))]
    assert done.stdout.decode().split("\n") == [*expected, ""]


# What is translated with


def test_a_run_folder_means_its_newest_checkpoint(checkpoint, learned, translator, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    shutil.copy(learned, folder / "step-00000009.ckpt")
    shutil.copy(checkpoint, folder / "step-00000010.ckpt")
    shutil.copy(learned, folder / "average-2-step-00000010.ckpt")
    status, found = translate_file(tmp_path / "run", tmp_path, b"ba be\nmu\n")
    assert (status, found) == (0, first(translator, ["ba be", "mu"]))


def test_an_average_translates_like_a_checkpoint(checkpoint, translator, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for step in (1, 2):  # the mean of twice the same is the same
        shutil.copy(checkpoint, folder / f"step-{step:08d}.ckpt")
    assert main(["average", str(tmp_path / "run"), "--last", "2", "--out", str(tmp_path / "mean.ckpt")]) == 0
    assert translate_file(tmp_path / "mean.ckpt", tmp_path, b"ba be\n") == (0, first(translator, ["ba be"]))


def broken(kind, checkpoint, folder):
    path = folder / "broken.ckpt"
    if kind == "text":
        path.write_text("not a checkpoint")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut short":
        path.write_bytes(checkpoint.read_bytes()[:-5000])
    elif kind == "no model":
        torch.save({"weights": torch.zeros(2)}, path)
    elif kind == "a list":
        torch.save([1, 2], path)
    elif kind == "weights alone":
        torch.save({"state_dict": {"a": torch.zeros(2)}}, path)
    elif kind == "a folder without checkpoints":
        path.mkdir()
    elif kind == "weights of another model":
        saved = torch.load(checkpoint, weights_only=True)
        saved["state_dict"].popitem()
        torch.save(saved, path)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "text",
        "empty",
        "cut short",
        "no model",
        "a list",
        "weights alone",
        "a folder without checkpoints",
        "weights of another model",
        "nothing there",
    ],
)
def test_what_is_no_checkpoint_is_refused_in_one_line(kind, checkpoint, tmp_path, capsys):
    path = broken(kind, checkpoint, tmp_path)
    (tmp_path / "input").write_text("ba\n")
    output = tmp_path / "output"
    assert main(["translate", str(path), "--input", str(tmp_path / "input"), "--output", str(output)]) == 1
    shown = capsys.readouterr().err
    assert str(path) in shown
    assert len(shown.splitlines()) == 1
    assert not output.exists()


def test_a_checkpoint_never_runs_code(tmp_path, checkpoint):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    torch.save({"state_dict": {}, "bomb": Bomb()}, tmp_path / "bomb.ckpt")
    with pytest.raises(ValueError, match="plain data"):
        Translator(tmp_path / "bomb.ckpt")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["nowhere", "a folder"])
def test_an_input_that_cannot_be_read_is_named(name, checkpoint, tmp_path, capsys):
    (tmp_path / "a folder").mkdir()
    output = tmp_path / "output"
    assert main(["translate", str(checkpoint), "--input", str(tmp_path / name), "--output", str(output)]) == 1
    shown = capsys.readouterr().err
    assert str(tmp_path / name) in shown
    assert len(shown.splitlines()) == 1
    assert not output.exists()
