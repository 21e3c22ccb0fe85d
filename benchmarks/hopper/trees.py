"""Another state of the library in the same process: what a commit changed is timed side by side.

mkdir -p .trees/first && git archive c5786ff src/relampago | tar -x -C .trees/first
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from relampago.plan import Plan
from relampago.problem import Arrays

ROOT = Path(__file__).parents[2] / ".trees"
NEEDED = ("problem", "plan", "masks.rules", "backends.gluon.launch")


class Tree:
    """The modules of one folder, which see each other and none of ours."""

    def __init__(self, folder: Path) -> None:
        ours = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_library(name)}
        package = ModuleType("relampago")  # bare: the real one would define its ops a second time
        package.__path__ = [str(folder / "src" / "relampago")]
        sys.modules["relampago"] = package
        try:
            self.modules = {n: importlib.import_module(f"relampago.{n}") for n in NEEDED}
            assert str(folder) in str(self.modules["plan"].__file__)
        finally:
            for name in [name for name in sys.modules if _is_library(name)]:
                del sys.modules[name]
            sys.modules.update(ours)

    def __getitem__(self, name: str) -> Any:
        return self.modules[name]

    def forward(self, plan: Plan, x: Arrays, multiprocessors: int) -> Callable[[], Any]:
        """A call of the tree's forward by as much of a plan as it knows, on the same tensors."""
        known = self["plan"].Plan.__dataclass_fields__
        plan = self["plan"].Plan(**{k: v for k, v in asdict(plan).items() if k in known})
        band = self["masks.rules"].Band(*x.band)
        same = {name: getattr(x, name) for name in ("q", "k", "v", "scale", "len_q", "len_k")}
        arrays = self["problem"].Arrays(band=band, **same)
        return lambda: self["backends.gluon.launch"].forward(plan, arrays, multiprocessors)


def _is_library(name: str) -> bool:
    return name == "relampago" or name.startswith("relampago.")


def trees() -> dict[str, Tree]:
    """All that have been unpacked, by name."""
    folders = sorted(ROOT.iterdir()) if ROOT.is_dir() else []
    return {folder.name: Tree(folder) for folder in folders}
