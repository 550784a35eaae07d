"""The docs are true: examples run, commands and their options exist, links lead somewhere."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

import oomph
from oomph import cli
from oomph.hardware import find_gpu
from oomph.jobs.models import find_model

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>run|file: (?P<file>\S+)) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
#: Of a `console` block the lines with a prompt are commands; of a `sh` block those of oomph.
PROMPT = "$ "


@dataclass(frozen=True, kw_only=True)
class CodeBlock:
    """A piece of code on a page."""

    kind: str
    text: str
    mark: str
    """`run`, `file: NAME` or nothing."""
    file: str


def blocks(page: Path) -> list[CodeBlock]:
    return [
        CodeBlock(
            kind=one["kind"], text=one["text"], mark=one["mark"] or "", file=one["file"] or ""
        )
        for one in BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def commands(page: Path) -> Iterator[list[str]]:
    """Every oomph command of a page, as a shell would split it."""
    for block in blocks(page):
        if block.kind not in ("console", "sh"):
            continue
        lines = block.text.replace("\\\n", " ").splitlines()
        if block.kind == "console":
            lines = [line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT)]
        for line in lines:
            words = shlex.split(line, comments=True)
            if words[:1] == ["oomph"]:
                ends = [at for at, word in enumerate(words) if word in (">", "||", "|", "&&")]
                yield words[1 : min(ends, default=None)]


def headings(page: Path) -> set[str]:
    """The anchors of a page, as Markdown makes them of its headings."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in found}


WITH_COMMANDS = [page for page in (ROOT / "README.md", *PAGES) if [*commands(page)]]
RUNNABLE = [page for page in PAGES if any(block.mark == "run" for block in blocks(page))]


def test_there_is_something_to_check() -> None:
    assert {page.stem for page in RUNNABLE} >= {"tutorial", "runs", "techniques", "explain"}
    assert {page.stem for page in WITH_COMMANDS} >= {"README", "tutorial", "faq", "plan"}


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.stem)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    names: dict[str, object] = {"__name__": "docs"}
    for number, block in enumerate(blocks(page)):
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
            assert oomph.job_from_factory(f"{block.file}:make").batch is not None
        elif block.mark == "run":
            exec(compile(block.text, f"{page.name}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_commands_and_their_options_exist(page: Path) -> None:
    app = typer.main.get_command(cli.app)
    for words in commands(page):
        command, rest = app, list(words)
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        assert command is not app, f"{page.name}: there is no command {words}"
        command.make_context(words[0], rest)  # complains of whatever it does not know


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_cards_and_models_of_commands_exist(page: Path) -> None:
    for words in commands(page):
        for option, value in itertools.pairwise(words):
            if option == "--gpu" and value not in ("any", "cpu", "NAME"):
                find_gpu(value)
            if option == "--model" and ":" not in value and not value.endswith(".json"):
                find_model(value)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in headings(linked), f"{page.name} links to {target}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r"^  - .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == [page.name for page in PAGES]
