"""The documentation says what is there: keys, dependencies, tests that hold the invariants, and code that runs."""

import contextlib
import io
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from blendstore import config as configuration
from blendstore.config import Config, ConfigError

ROOT = Path(__file__).parents[2]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def row(name: str, about: Any) -> str:
    """The line of docs/configuration.md for one key: name, accepted form without remarks, default, meaning."""
    accepted = re.sub(r" \([^)]*\)", "", about["form"].accepted)
    shown = next(line for line in Config().describe().splitlines() if line.startswith(f"{name} "))
    default = shown.removeprefix(name).strip().removesuffix("default").strip()
    return f"| `{name}` | {accepted} | `{default}` | {about['help']} |"


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
def test_every_key_is_documented_as_it_is(built: bool) -> None:
    """A reader finds each key, what it takes, its default and its meaning, in the section that it belongs to."""
    head, behind = read("docs/configuration.md").split("## Keys of features that this version lacks")
    section = (head if built else behind).splitlines()
    wanted = [row(f.name, f.metadata) for f in fields(Config) if f.metadata and f.metadata["built"] is built]
    missing = [line for line in wanted if line not in section]
    assert wanted
    assert not missing, "put into docs/configuration.md:\n" + "\n".join(missing)


def test_every_refused_key_of_lmcache_is_documented() -> None:
    """The list in the documentation is the code's, and what is on it is refused."""
    listed = read("docs/configuration.md").split("## Further keys of LMCache")[1]
    assert set(re.findall(r"`(\w+)`", listed)) == set(configuration._ELSEWHERE)
    with pytest.raises(ConfigError, match="not available in this version"):
        Config.load(env={}, overrides={"enable_controller": True})


def dependencies() -> set[str]:
    """Lower-case names in the manifests and requirement files, without this repository's own packages."""
    names: set[str] = set()
    for path in ROOT.glob("rust/*/Cargo.toml"):
        manifest = tomllib.loads(path.read_text(encoding="utf-8"))
        for table in (manifest, *manifest.get("target", {}).values()):
            for kind in ("dependencies", "dev-dependencies", "build-dependencies"):
                names |= set(table.get(kind, {}))
    required: list[str] = []
    for path in (ROOT / "pyproject.toml", *ROOT.glob("adapters/*/pyproject.toml")):
        manifest = tomllib.loads(path.read_text(encoding="utf-8"))
        project = manifest["project"]
        required += [*project.get("dependencies", []), *manifest["build-system"]["requires"]]
        for extra in project.get("optional-dependencies", {}).values():
            required += extra
    for path in ROOT.glob("requirements/*.txt"):
        # Neither what all of these need nor what an engine imports on a CPU is this project's choice.
        if path.name != "lock.txt" and not path.name.startswith(("sglang-", "vllm-")):
            required += path.read_text(encoding="utf-8").splitlines()
    found = (re.match(r"[A-Za-z0-9][\w.-]*", item) for item in required)
    names |= {match[0] for match in found if match}
    # The parts of one model's file are one package for a reader.
    names = {re.sub(r"-part\d+$", "", name).lower() for name in names}
    return {name for name in names if not name.startswith("blendstore")}


def test_every_dependency_is_justified() -> None:
    """Nothing comes in without a reason, and no reason stays for what has gone."""
    listed = re.findall(r"^\| `([\w.-]+)` \|", read("docs/dependencies.md"), re.MULTILINE)
    assert sorted(listed) == sorted(dependencies())


def test_tests_named_in_the_design_exist() -> None:
    """An invariant is held by a test, not by a sentence."""
    sources = [path for pattern in ("tests/**/*.py", "rust/**/*.rs") for path in ROOT.glob(pattern)]
    known = {name for path in sources for name in re.findall(r"(?:def|fn) (\w+)\(", path.read_text(encoding="utf-8"))}
    named = re.findall(r"`((?:test|case|loom)_\w+)`", read("docs/design.md"))
    assert len(named) > 20
    assert not [name for name in named if name not in known]


PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")))


def anchors(path: Path) -> set[str]:
    """What a page's headings are called in links: lower case, blanks as hyphens, no punctuation."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page: str) -> None:
    """No reader follows a link into nothing: files exist, headings within them too."""
    links = re.findall(r"\]\(([^)\s]+)\)", read(page))
    broken = []
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken
    assert links or page == "CHANGELOG.md" or page.startswith("docs/")


@pytest.mark.real_model
def test_the_readmes_example_runs_as_printed() -> None:
    """The first code that a newcomer copies works: both documents come back in the other order, the answer is right."""
    code = re.search(r"```python\n(.*?)```", read("README.md"), re.DOTALL)
    assert code is not None
    printed, names = io.StringIO(), dict[str, Any]()
    with contextlib.redirect_stdout(printed):
        exec(code[1], names)  # noqa: S102 - our own README
    report = names["answer"].report
    shown = re.search(r"Report\(prompt=(\d+), prefix=0, exact=(\d+), .*?fresh=(\d+)", read("README.md"))
    assert shown is not None
    assert (report.prompt, report.exact, report.fresh) == tuple(map(int, shown.groups()))
    assert report.fallback == ""
    assert report.reused > report.recomputed > 0
    assert "Oskar Lind" in printed.getvalue()
