"""What the README says can be typed."""

import re
import shlex
from pathlib import Path

import pytest

from lit_transformer.__main__ import COMMANDS
from lit_transformer.cli import resolve
from lit_transformer.study import read_study_file

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```\n(.*?)```", README, re.S))
BLOCKS = re.sub(r"\\\n\s*", " ", BLOCKS)
INLINE = re.findall(r"`(lit-transformer [^`]+)`", README)
TYPED = [line.split("    ")[0] for line in BLOCKS.splitlines() if line.startswith("lit-transformer")] + INLINE
IN_FILES = [
    line.lstrip("# ").split("    ")[0]
    for path in sorted([*ROOT.glob("conf/*.yaml"), *ROOT.glob("sweeps/*.yaml")])
    # A launcher's own arguments are not ours to check.
    for line in path.read_text(encoding="utf-8").replace("-m lit_transformer", "  lit-transformer").splitlines()
    if re.match("#   +lit-transformer", line)
]


@pytest.mark.parametrize("line", [*TYPED, *IN_FILES])
def test_a_documented_command_parses(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, command, *args = shlex.split(line.split(" < ")[0].split(" ...")[0])
    assert command in COMMANDS
    if command in ("fit", "plan") and "--print_config" not in args:
        resolve(args)
    if command == "sweep":
        study = read_study_file(Path(args[1]))
        assert study.variants or study.search


def test_commands_were_found():
    assert len(TYPED) >= 6
    assert len(IN_FILES) >= 5


@pytest.mark.parametrize("target", ["demo", "test", "test-slow"])
def test_make_targets_exist(target):
    assert f"make {target}" in README
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


def test_every_file_named_exists():
    for name in re.findall(r"(?:conf|sweeps|tests)/[\w.-]+\.(?:yaml|py)", README):
        assert (ROOT / name).is_file(), name


def test_the_readme_stays_short():
    assert len(README.splitlines()) <= 240


def test_the_repository_names_no_machine():
    made = {".venv", ".venvs", ".work"}  # by make and by benchmarks
    files = [
        p for p in ROOT.rglob("*") if p.suffix in (".py", ".md", ".yaml", ".toml", ".txt") and not made & set(p.parts)
    ]
    own = [p for p in files if not {"runs", "data"} & set(p.relative_to(ROOT).parts[:1])]
    words = ["/" + "work/", "/" + "opt/", "/" + "root/", "pypi." + "org"]
    assert not [(p, word) for p in own for word in words if word in p.read_text(encoding="utf-8", errors="replace")]
