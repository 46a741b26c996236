"""The tokeniser gives every text back, in ids that depend on the training lines alone."""

import io
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece

from lit_transformer.tokenizer import BOS_ID, EOS_ID, MAX_LINE_BYTES, PAD_ID, UNK_ID, Tokenizer

LINES = [
    f"{who} {does} {what} {n}."
    for n, who in enumerate(("The old man", "Der alte Mann", "Le vieil homme", "A small dog", "Ein kleiner Hund"))
    for does in ("sees", "hört", "aime", "does not see")
    for what in ("the big house", "das große Haus", "la grande maison", "a bird in the tree")
]
SMALLEST = 300  # fits LINES and every variation of them below


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(LINES, 401)[0]


def is_one_piece(tokenizer: Tokenizer, character: str) -> bool:
    """True where training has seen the character: otherwise it is spelt in bytes."""
    return len(tokenizer.encode([character])[0]) == 1


def test_special_ids_are_the_first_four_and_distinct():
    assert [PAD_ID, UNK_ID, BOS_ID, EOS_ID] == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [SMALLEST, 357, 400, 401])
def test_vocabulary_has_exactly_the_size_asked_for_and_ids_stay_inside(size):
    trained, skipped = Tokenizer.train(LINES, size)
    ids = [i for sentence in trained.encode([*LINES, "Ω😀"]) for i in sentence]
    assert (trained.vocab_size, skipped) == (size, 0)
    assert EOS_ID < min(ids) <= max(ids) < size


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\t",
        "\n",
        "\0",
        "a  b   c",
        "  leading and trailing  ",
        "a\u00a0b\u202fc",
        "a\u2028b\u2029c\u0085d\x0be\x0cf",
        "a\rb\r\nc\nd",
        "tab\there",
        "NUL\0here\0",
        "emoji \U0001f600, family \U0001f468\u200d\U0001f469\u200d\U0001f467",
        "decomposed e\u0301, composed \u00e9",  # must not be normalised into each other
        "ﬁ ligature, ² superscript, Ａ full width",
        "zero\u200bwidth\ufeffmarks\u200e",
        "<s> </s> <pad> <unk> <0x41>",  # names of pieces, as plain text
        "\u2585",
        "a \u2047 b",
        "\ufffd \uffff \U0010ffff",
        "中文 हिन्दी العربية",
    ],
)
def test_hard_texts_come_back_as_they_were(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode([text])[0]) == text


@pytest.mark.parametrize(("text", "back"), [("\u2581", " "), ("a\u2581b", "a b"), ("\u2581\u2581 x\u2581", "   x ")])
def test_sentencepieces_space_mark_alone_comes_back_as_a_space(tokenizer, text, back):
    assert tokenizer.decode(tokenizer.encode([text])[0]) == back


def random_texts(seed: int, count: int) -> Iterator[str]:
    rng = random.Random(seed)
    spiced = ["\u2581", "\u2585", " \u2047 ", " ", "  ", "\t", "\n", "\r", "\0", "\u2028", "\u0085", "\ufeff", "\u0301"]
    spiced += ["<s>", "</s>", "<pad>", "<unk>", "<0x0A>", "the ", "große", "😀"]
    ranges = [(0, 0x80), (0x80, 0x250), (0x2000, 0x2070), (0x250, 0xD800), (0xE000, 0x110000)]  # no surrogates
    for _ in range(count):
        yield "".join(
            rng.choice(spiced) if rng.random() < 0.4 else chr(rng.randrange(*rng.choice(ranges)))
            for _ in range(rng.randrange(14))
        )


@pytest.mark.parametrize("seed", range(4))
def test_any_unicode_text_comes_back_with_the_space_mark_as_a_space(tokenizer, seed):
    texts = list(random_texts(seed, 2000))
    encoded = tokenizer.encode(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == [text.replace("\u2581", " ") for text in texts]
    assert not {PAD_ID, UNK_ID, BOS_ID, EOS_ID} & {i for ids in encoded for i in ids}


def test_a_text_is_encoded_alike_alone_and_among_others(tokenizer):
    texts = list(random_texts(9, 200))
    assert tokenizer.encode(texts) == [tokenizer.encode([text])[0] for text in texts]
    assert tokenizer.encode([]) == []


def test_decode_leaves_special_ids_out(tokenizer):
    ids = tokenizer.encode(["The old man"])[0]
    assert tokenizer.decode([BOS_ID, *ids[:2], PAD_ID, *ids[2:], EOS_ID, PAD_ID, PAD_ID]) == "The old man"
    assert tokenizer.decode([]) == tokenizer.decode([BOS_ID, EOS_ID, PAD_ID]) == ""


def test_same_lines_give_the_same_fingerprint_from_any_iterable(tokenizer):
    again = Tokenizer.train((line for line in list(LINES)), 401)[0]
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode(LINES) == tokenizer.encode(LINES)


@pytest.mark.parametrize(
    ("lines", "size"),
    [(LINES, 400), (LINES[:-20], 401), ([*LINES, "zebra zebra zebra"], 401), ([x.upper() for x in LINES], 401)],
)
def test_other_lines_or_another_size_give_another_fingerprint(tokenizer, lines, size):
    assert Tokenizer.train(lines, size)[0].fingerprint != tokenizer.fingerprint


def test_a_saved_model_loads_as_the_same_tokeniser(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(tokenizer.model)
    loaded = Tokenizer.load(path)
    assert (loaded.fingerprint, loaded.vocab_size) == (tokenizer.fingerprint, tokenizer.vocab_size)
    assert loaded.encode(LINES) == tokenizer.encode(LINES)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda model: b"garbage, not a model", id="garbage"),
        pytest.param(lambda model: bytes(1000), id="zeros"),
        pytest.param(lambda model: model[: len(model) // 2], id="half"),
        pytest.param(lambda model: model[:-1], id="last byte gone"),
        pytest.param(lambda model: b"", id="empty"),
    ],
)
def test_loading_a_damaged_file_names_it(tokenizer, tmp_path, damage):
    path: Path = tmp_path / "some.model"
    path.write_bytes(damage(tokenizer.model))
    with pytest.raises(ValueError, match=r"some\.model"):
        Tokenizer.load(path)


def test_special_ids_of_others_are_refused():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, vocab_size=100, model_type="bpe", minloglevel=2
    )
    with pytest.raises(ValueError, match="special ids"):
        Tokenizer(model.getvalue())


def test_one_line_over_the_limit_is_counted_and_what_it_alone_held_still_comes_back():
    long = "Ω" * (MAX_LINE_BYTES // 2 + 1)
    trained, skipped = Tokenizer.train([*LINES[:9], long], SMALLEST)
    assert skipped == 1
    assert not is_one_piece(trained, "Ω")
    assert trained.decode(trained.encode(["Ω"])[0]) == "Ω"


@pytest.mark.parametrize(
    ("line", "skipped"),
    [
        ("Ω" * 5000, 0),  # 10 kB: beyond sentencepiece's own limit of 4,192 bytes
        ("Ω" * (MAX_LINE_BYTES // 2), 0),
        ("Ω" * (MAX_LINE_BYTES // 2) + "x", 1),
        ("Ω " * (MAX_LINE_BYTES // 3) + "x" * (MAX_LINE_BYTES % 3), 0),
        ("Ω " * (MAX_LINE_BYTES // 3) + "x" * (MAX_LINE_BYTES % 3 + 1), 1),
    ],
)
def test_a_line_is_learned_from_up_to_exactly_the_limit_in_bytes(line, skipped):
    trained, count = Tokenizer.train([*LINES, line], SMALLEST)
    assert (count, is_one_piece(trained, "Ω")) == (skipped, not skipped)


def test_no_line_is_left_out_without_being_counted():
    # sentencepiece silently skips lines that hold its mark for unknown text.
    trained, skipped = Tokenizer.train([*LINES, "Ω" * 500 + " \u2585"], SMALLEST)
    assert is_one_piece(trained, "Ω") == (skipped == 0)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["x" * (MAX_LINE_BYTES + 1)] * 3, id="all too long"),
        pytest.param([], id="no line"),
        pytest.param(["", "  ", "\t"], id="blank lines"),
    ],
)
def test_without_a_usable_line_there_is_a_plain_error(lines):
    with pytest.raises(ValueError, match=f"no line to train a tokeniser on.*{sum(len(x) > 9 for x in lines)} lines"):
        Tokenizer.train(lines, SMALLEST)


@pytest.mark.parametrize("size", [1, 100, 37000])
def test_a_size_that_does_not_suit_the_text_names_vocab_size(size):
    with pytest.raises(ValueError, match=rf"vocab_size = {size} .*: \S+"):
        Tokenizer.train(LINES, size)


@pytest.mark.parametrize("error", [ValueError("text.tsv, line 7: no tab"), KeyboardInterrupt("stop"), OSError("gone")])
def test_an_error_while_lines_are_read_comes_out_as_it_is(error):
    def lines() -> Iterator[str]:
        yield from LINES
        raise error

    with pytest.raises(BaseException) as caught:  # noqa: PT011
        Tokenizer.train(lines(), SMALLEST)
    assert (type(caught.value), str(caught.value)) == (type(error), str(error))
