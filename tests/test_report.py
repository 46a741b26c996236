"""The report: one page that needs nothing beside it, on which other people's text stays text."""

import base64
import re
from html.parser import HTMLParser

import pytest
from results_folder import result, scores, variant

EVIL = "<script>alert('x')</script> & \"quotes\" </dd><img src=x onerror=alert(1)>"
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Text, tags and attributes; every tag that opens must close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append(" ".join(data.split()))


def page(folder) -> Page:
    return Page((folder.out / "s.html").read_text(encoding="utf-8"))


@pytest.fixture
def studied(folder):
    """A row that writes worse than base in half of its sentences and better in one."""
    references = [f"and god made thing number {i} and it was good" for i in range(20)]
    base = [*references[:19], "no"]
    worse = [line if i % 2 else f"bad {i}" for i, line in enumerate(references[:19])] + [references[19]]
    run = {"command": ["fit", "--config", "conf/my mini.yaml", "--model.dropout", "0.3"], "device": "NVIDIA H200"}
    run["versions"] = {"lit_transformer_commit": "abc123def456", "python": "3.11.7", "torch": "2.13.0"}
    folder.study(
        variant("base"), variant("near"), variant("worse", {"dropout": 0.3}, "D-drop0.2"),
        variant("broken", {"note": EVIL}, failed=f"exit status 1: {EVIL}"), seeds=(1, 2), question="Does it <learn>?",
    )  # fmt: skip
    sources = [f"Quelle {i}" for i in range(20)]
    for seed in (1, 2):
        folder.sentences(result("base", seed, **run), base, references, source=sources)
        folder.sentences(result("near", seed, **run), [*base[:18], "x", "no"], references, source=sources)
        folder.sentences(result("worse", seed, **run), worse, references, source=sources)
    return folder


def test_the_page_needs_nothing_beside_it(studied):
    studied.build()
    html = (studied.out / "s.html").read_text(encoding="utf-8")
    found = page(studied)
    assert not {"script", "link", "iframe", "object", "form"} & set(found.tags)
    for tag, name, value in found.attributes:
        if name in ("src", "href", "srcset", "action"):
            assert (tag, name) == ("img", "src") and value.startswith("data:image/")
    assert not re.search(r"url\(|@import", html)
    images = {value.partition(";")[0]: value for tag, name, value in found.attributes if name == "src"}
    assert set(images) == {"data:image/png", "data:image/svg+xml"}
    for kind, ending in (("data:image/png", "png"), ("data:image/svg+xml", "curves.svg")):
        content = base64.b64decode(images[kind].partition("base64,")[2])
        assert content == (studied.out / f"s.{ending}").read_bytes()


@pytest.mark.usefixtures("unplotted")
def test_it_says_what_the_tables_say(studied):
    studied.build()
    texts = page(studied).texts
    assert texts.count("s") == 2 and "Does it <learn>?" in texts
    for column, cell in studied.table()["worse"].items():
        shown = cell.partition(" (")[0].replace("\\_", "_")
        assert shown in texts, column
    for cell in studied.table(1)["worse"].values():
        assert cell == "" or cell in texts
    for line in studied.markdown.split("\n"):
        if line.startswith("- "):
            assert " ".join(re.sub(r"\\([\\_*`<])", r"\1", line[2:]).split()) in texts
    assert sum("too few rows" in text for text in texts) >= 2


@pytest.mark.usefixtures("unplotted")
def test_each_run_can_be_repeated_from_it(studied):
    studied.build()
    texts = page(studied).texts
    command = "lit-transformer fit --config 'conf/my mini.yaml' --model.dropout 0.3"
    assert texts.count(command) == 6
    for fact in ("abc123def456", "python 3.11.7, torch 2.13.0", "1 x NVIDIA H200", "0.25", "dropout = 0.3"):
        assert fact in texts


@pytest.mark.usefixtures("unplotted")
def test_the_sentences_are_of_the_row_furthest_from_base(studied):
    studied.build()
    texts = page(studied).texts
    start = texts.index("Sentences: worse beside base")
    lose, win = texts.index("Where worse loses most"), texts.index("Where worse wins most")
    lost, won = texts[lose:win], texts[win:]
    assert start < lose and lost.count("reference") == 5 and won.count("reference") == 1
    assert {line for line in lost if line.startswith("bad ")} <= {f"bad {i}" for i in range(0, 19, 2)}
    assert won[won.index("source") :] == [
        "source", "Quelle 19", "reference", "and god made thing number 19 and it was good", "base", "no",
        "worse", "and god made thing number 19 and it was good",
    ]  # fmt: skip
    differences = [float(text) for text in lost if re.fullmatch(r"[+-]\d+\.\d", text)]
    assert differences == sorted(differences) and len(differences) == 5 and differences[-1] < 0


@pytest.mark.usefixtures("unplotted")
def test_other_peoples_text_stays_text(folder):
    """In sentences, settings and reasons."""
    references = ["and it was good", EVIL, "ünïcode \u2028 „so“"]
    folder.study(variant("base"), variant("other", {"note": EVIL}), variant("broken", failed=EVIL))
    folder.sentences(result("base"), references, references, source=[EVIL] * 3)
    folder.sentences(result("other"), ["and", f"{EVIL} {EVIL}", "ü"], references, source=[EVIL] * 3)
    folder.build()
    found = page(folder)
    assert not {"script", "img"} & (set(found.tags) - {"img"})
    assert found.tags.count("img") == 2 and not [name for _, name, _ in found.attributes if name.startswith("on")]
    shown = " ".join(EVIL.split())
    assert sum(shown in text for text in found.texts) >= 6
    assert "ünïcode „so“" in " ".join(found.texts)


@pytest.mark.usefixtures("unplotted")
def test_half_a_character_does_not_stop_it(folder):
    """A byte-level model may write what no encoding can hold."""
    folder.study(variant("base"), variant("other"))
    folder.sentences(result("base"), ["good and good"], ["good and good"], source=["\ud800"])
    folder.sentences(result("other"), ["\udc80 bad"], ["good and good"], source=["\ud800"])
    folder.build()
    assert "? bad" in page(folder).texts


@pytest.mark.usefixtures("unplotted")
def test_without_sentences_there_is_no_part_on_them(whole):
    texts = page(whole).texts
    assert not [text for text in texts if text.startswith("Sentences:")]
    assert "failed: exit status 1: out of memory" in texts
    assert "6 of 12 runs finished · 9 or 1,500 updates, 80,000 target tokens" in texts


@pytest.mark.usefixtures("unplotted")
def test_a_study_without_any_result_has_its_page(folder):
    folder.study(variant("base"), variant("A-h1"))
    folder.build()
    texts = page(folder).texts
    assert "No run has finished yet." in texts and "0 of 2 runs finished" in texts
    assert "What does each change do to base, and does it do the same in the paper?" in texts
    assert "The runs" not in texts


@pytest.mark.usefixtures("unplotted")
@pytest.mark.parametrize("field", ["command", "versions", "unfinished", "device", "processes"])
def test_a_result_that_lacks_a_fact_is_shown_without_it(folder, field):
    old = scores("base", 1, 10.0, 20.0)
    old.pop(field, None)
    folder.study(variant("base"))
    folder.add(old)
    folder.build()
    assert "20.00" in page(folder).texts


@pytest.mark.usefixtures("unplotted")
def test_only_clear_differences_are_marked(studied):
    studied.build()
    html = (studied.out / "s.html").read_text(encoding="utf-8")
    rows = re.findall(r"<tr>.*?</tr>", html.partition("</table>")[0], re.S)
    marked = {re.search(r'scope="row">(\w+)', row)[1]: "certain" in row for row in rows[1:]}
    clear = {name: row["p_holm"] != "" and float(row["p_holm"]) < 0.05 for name, row in studied.csv().items()}
    assert marked == clear
    assert clear["worse"] and not clear["base"]
