"""Imports go down only, need neither triton nor a GPU, and work in a fresh process."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "relampago"

# Each module may import from its own level and the levels before it.
LEVELS = (
    ("errors", "dropout", "shapes"),
    ("masks", "mods"),
    ("problem", "merge", "cache", "quant", "tape", "start"),
    ("plan", "work"),
    ("backends",),
    ("select",),
    ("op",),
    ("transforms",),
    ("derivatives",),
    ("measure", "warm"),
    ("validate",),
    ("defaults",),
    ("options", "lower"),
    ("answer",),
    ("api",),
    ("explain", "cases"),
)
RANK = {name: level for level, names in enumerate(LEVELS) for name in names}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """relampago's own modules that a file imports at run time, as dotted paths below the package."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "relampago"
        ):
            rest = node.module.split(".")[1:]
            found |= {".".join(rest)} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                a.name.partition(".")[2] for a in node.names if a.name.startswith("relampago.")
            }
    return {name for name in found if name}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_direction(path: Path) -> None:
    rank = RANK.get(room(path), len(LEVELS))
    for name in imported(path):
        above = RANK.get(name.split(".")[0], len(LEVELS))
        assert above <= rank, f"{path.relative_to(ROOT)} imports {name}, which stands above it"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "backends").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_backends_never_import_one_another(path: Path) -> None:
    parts = path.relative_to(ROOT / "backends").parts
    own = parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for name in imported(path):
        if name.startswith("backends."):
            assert name.split(".")[1] == own, f"backend {own} imports {name}"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked")
sys.meta_path.insert(0, Block())
import torch, relampago as rl
q = torch.randn(1, 9, 2, 8, requires_grad=True)
rl.attention(q, q, q, causal=True).sum().backward()
print(rl.explain(q, q, q))
"""


def test_works_without_triton_and_without_what_the_cli_needs() -> None:
    done = run(
        BLOCKED.format(blocked=["triton", "typer", "rich", "transformers", "matplotlib", "numpy"])
    )
    assert done.returncode == 0, done.stderr
    assert "backend cpu" in " ".join(done.stdout.split())


def test_import_is_light_and_has_no_side_effects() -> None:
    done = run(
        "import torch, sys; before = set(sys.modules)\n"
        "state = (torch.get_num_threads(), torch.backends.mkldnn.matmul.fp32_precision)\n"
        "import relampago\n"
        "heavy = {'typer', 'rich', 'numpy', 'transformers'} & (set(sys.modules) - before)\n"
        "assert not heavy, heavy\n"
        "assert state == (torch.get_num_threads(), torch.backends.mkldnn.matmul.fp32_precision)\n"
    )
    assert done.returncode == 0, done.stderr


def test_public_names() -> None:
    import relampago

    assert sorted(relampago.__all__) == list(relampago.__all__)
    assert all(hasattr(relampago, name) for name in relampago.__all__)


def test_sizes() -> None:
    for path in modules():
        lines = path.read_text(encoding="utf-8").count("\n")
        assert lines < 600, f"{path.relative_to(ROOT)} has {lines} lines; the limit is 600"
        assert path.stem not in ("util", "utils", "common", "helpers", "misc"), (
            f"{path} is a drawer"
        )
