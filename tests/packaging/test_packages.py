"""Wheel and sdist: what they hold, and that the wheel runs in an environment with torch's own needs and no more."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS = ("torch", "typer", "rich")
FOLDERS = ("src", "tests", "examples", "benchmarks", "docs")
CALL = """
import sys, torch, relampago as rl
assert "site-packages" in rl.__file__ and "numpy" not in sys.modules and "triton" not in sys.modules, rl.__file__
q = torch.randn(1, 40, 4, 16, requires_grad=True)
out = rl.attention(q, q, q, causal=True)
out.sum().backward()
want = torch.nn.functional.scaled_dot_product_attention(*(3 * [q.transpose(1, 2)]), is_causal=True)
torch.testing.assert_close(out, want.transpose(1, 2))
print("attention", tuple(out.shape))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with wheel and sdist, built by hatchling without a network."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(out)], cwd=ROOT, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


def closure(names: tuple[str, ...]) -> set[str]:
    """Names with all that they need, of what is installed here."""
    found: set[str] = set()
    queue = list(names)
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in found or name in ("numpy", "triton"):
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # needed elsewhere only
        found.add(name)
        queue += [
            re.split(r"[\s;<>=!~\[(]", need, maxsplit=1)[0]
            for need in needs
            if "extra ==" not in need
        ]
    return found  # fmt: skip


def test_wheel_runs_with_torch_alone(built: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "empty").glob("lib/python*/site-packages")
    for name in closure(NEEDS):
        for file in importlib.metadata.files(name) or ():
            top = file.parts[0]
            source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if top not in ("..", "__pycache__", "bin") and not (site / top).exists():
                (site / top).symlink_to(source)
    assert not list(site.glob("*relampago*"))
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as held:
        assert {n.split("/")[0] for n in held.namelist()} == {
            "relampago",
            "relampago-0.1.0.dist-info",
        }
        assert sum(n.endswith(".toml") for n in held.namelist()) == len(
            list(ROOT.glob("src/relampago/**/*.toml"))
        )
        held.extractall(site)
    python = tmp_path / "empty" / "bin" / "python"
    for words in (["-c", CALL], ["-c", "from relampago.cli import main; main()", "doctor"]):
        done = subprocess.run(
            [str(python), "-I", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "attention (1, 40, 4, 16)" in done.stdout or "backends" in done.stdout


def test_sdist_holds_every_file(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as held:
        names = {name.split("/", 1)[1] for name in held.getnames() if "/" in name}
    skipped = {"__pycache__", ".venv"}
    wanted = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not skipped & set(path.parts) and path.suffix != ".pyc"
    }
    wanted |= {"pyproject.toml", "README.md", "README.es.md", "LICENSE", "Makefile", "mkdocs.yml"}
    assert wanted <= names, sorted(wanted - names)[:10]
