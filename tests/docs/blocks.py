"""The fenced blocks of the documentation, and what a test does with each of them.

bash        Every line runs, and every `phalanx` command parses. A line that needs what a test does not have (other
            hosts, a GPU, a terminal: see NEEDS) is only parsed.
python      Runs. A sketch, which contains `…`, is only checked: it compiles, and the calls in it exist.
with title  A file of that name, for the commands on the same page.
diff        Equals the difference between the two files that it names, which are below examples/.
yaml        Parses, and so does each `command:` in it.

A comment before a block says what else is needed, or which exit code to expect:

    <!-- needs: a run that hangs -->
    <!-- exits: 1 -->
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GENERATED = ("docs/reference/options.md", "docs/reference/commands.md")  # by tools/reference.py

# What a line of bash needs, by its words. Such a line is parsed, and not run.
NEEDS = {
    "several hosts": r"--hosts\b|--hostfile|--master\b|--node-rank|--nnodes|--slurm|(^|\s)-n \d",
    "a cluster": r"\$SLURM|\b(srun|sbatch|salloc|scontrol|mpirun|ssh|kubectl|docker)\b",
    "GPUs": r"--share-gpu|--devices|--precision|make gpu-test",
    "a terminal or a browser": r"--screen|\bphalanx (watch|attach|ui)\b",
    "a live run": r"\bphalanx stop\b|--pid\b|(^|[;&|] *)kill\b|\blogs .*-f\b",
    "a network": r"\bpip install\b|pre-commit",
    "a checkout; it takes minutes": r"^make\b|^\.ci/|-m tests\.|-m pytest|\bphalanx (demo|tour|bench)\b",
    "programs that CI does not install": r"\bjq\b|tensorboard",
    "nothing: tests/e2e runs the examples": r"\bexamples/",
}

_FENCE = re.compile(r"^( *)(```+)(\w*) *(.*)$")
_MARK = re.compile(r"<!-- *(needs|exits): *(.*?) *-->")
_SNIPPET = re.compile(r"^--8<--\n(\S+)\n--8<--$", re.M)  # this form is no Python, which ruff would format
_SEPARATOR = re.compile(r"[();<>|&]+$")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str  # relative to the root
    line: int
    language: str
    title: str
    text: str
    needs: str = ""
    exits: int = 0

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_file(self) -> bool:
        """Whether it shows a file, and not commands."""
        return bool(self.title) or self.text.startswith("#!")


def pages() -> list[str]:
    """All pages with blocks: the site, and what GitHub shows."""
    found = ["README.md", "CONTRIBUTING.md", "examples/README.md"]
    found += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
    return [page for page in found if page not in GENERATED]


@cache
def blocks(page: str) -> tuple[Block, ...]:
    """The blocks of a page."""
    return tuple(_blocks(page))


def _blocks(page: str) -> Iterator[Block]:
    lines = iter(enumerate((ROOT / page).read_text().splitlines(), start=1))
    marks: dict[str, str] = {}
    for number, line in lines:
        opened = _FENCE.match(line)
        if opened is None:
            mark = _MARK.fullmatch(line.strip())
            if mark is not None:
                marks[mark[1]] = mark[2]
            elif line.strip():
                marks = {}
            continue
        indent, fence, language, rest = opened.groups()
        text = []
        for _, inner in lines:
            if inner.strip() == fence:
                break
            text.append(inner.removeprefix(indent))
        title = re.search(r'title="([^"]+)"', rest)
        whole = _SNIPPET.sub(lambda found: (ROOT / found[1]).read_text().rstrip(), "\n".join(text))
        yield Block(
            page=page,
            line=number,
            language=language,
            title=title[1] if title else "",
            text=whole,
            needs=marks.get("needs", ""),
            exits=int(marks.get("exits", "0")),
        )
        marks = {}


def of_language(*languages: str) -> list[Block]:
    """All blocks in these languages."""
    return [block for page in pages() for block in blocks(page) if block.language in languages]


def prose(page: str) -> str:
    """The page without its blocks."""
    return re.sub(r"^( *)```.*?^ *```$", "", (ROOT / page).read_text(), flags=re.M | re.S)


def lines(block: Block) -> list[str]:
    """The commands of a block of bash, one per line."""
    whole = block.text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in whole if line.strip() and not line.strip().startswith("#")]


def needs(line: str) -> str:
    """What a line needs that a test does not have; empty: nothing."""
    command = " ".join(words(line))
    return next((what for what, pattern in NEEDS.items() if re.search(pattern, command)), "")


def words(line: str) -> list[str]:
    """The words and operators of a line, without its comment."""
    reader = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    reader.whitespace_split = True
    reader.commenters = "#"
    return list(reader)


def commands(line: str) -> list[list[str]]:
    """What `phalanx` is called with in a line; also behind `srun`, `docker run` and variables."""
    found: list[list[str]] = []
    current: list[str] = []
    redirected = False
    for word in [*words(line), ";"]:
        if not _SEPARATOR.match(word):
            if not redirected:
                current.append(word)
            continue
        redirected = word.startswith((">", "<"))
        if redirected:
            continue
        while "phalanx" in current:
            current = current[current.index("phalanx") + 1 :]
            found.append(current)
        current = []
    return found


def inline_commands(page: str) -> list[str]:
    """Commands in the text and in tables: `phalanx why RUN`."""
    return [text.replace("\\|", "|") for text in re.findall(r"`((?:\w+ )*phalanx [^`\n]+)`", prose(page))]


def diff(before: Path, after: Path) -> str:
    """The difference as the pages show it: changed lines only."""
    old, new = (path.read_text().splitlines() for path in (before, after))
    found = difflib.unified_diff(old, new, before.name, after.name, lineterm="", n=0)
    return "\n".join(line for line in found if not line.startswith("@@"))
