"""install(): let `import flash_attn` find relampago where flash-attn is not installed.

A finder answers for flash-attn's module names, and for its distribution: Transformers and others ask the package
metadata whether flash-attn is there, and in which version.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from relampago.errors import InvalidInput

VERSION = "2.8.3"  # the interface that is spoken
VERSION_3 = "3.0.0"
HOME = "relampago.flash_attn"
MODULES = {
    "flash_attn": HOME,
    "flash_attn.flash_attn_interface": HOME,
    "flash_attn.bert_padding": f"{HOME}.padding",
    "flash_attn.layers": None,
    "flash_attn.layers.rotary": f"{HOME}.rotary",
}
MODULES_3 = {"flash_attn_interface": f"{HOME}.interface3"}
# What Transformers remembers about packages that were there, or not, when it first looked.
MEMORIES = (
    "_package_distribution_mapping",
    "is_flash_attn_2_available",
    "is_flash_attn_3_available",
)


def install(*, flash_attn_3: bool = False, replace: bool = False) -> None:
    """Let `import flash_attn` (and whatever asks for it, as `attn_implementation="flash_attention_2"`) find relampago.

    Args:
        flash_attn_3: also `import flash_attn_interface`, FlashAttention-3's module.
        replace: stand before a flash-attn that is installed; without it, one is not shadowed.

    Raises:
        InvalidInput: flash-attn is installed and replace is False. Nothing is changed then.

    Example:
        >>> import relampago.flash_attn
        >>> relampago.flash_attn.install()
        >>> from flash_attn import flash_attn_func
    """
    wanted = {**MODULES, **MODULES_3} if flash_attn_3 else dict(MODULES)
    uninstall()
    for name in ("flash_attn", "flash_attn_interface"):
        found = importlib.util.find_spec(name) if name in wanted else None
        if found is not None and not replace:
            where = found.origin or next(iter(found.submodule_search_locations or ["memory"]))
            raise InvalidInput(
                f"{name} is installed ({where}); expected none, or replace=True to stand before it"
            )
    _forget(wanted)
    sys.meta_path.insert(0, Finder(wanted))
    _clear_memories()


def uninstall() -> None:
    """Undo `install`; modules that were imported meanwhile are forgotten."""
    for finder in [f for f in sys.meta_path if isinstance(f, Finder)]:
        sys.meta_path.remove(finder)
        _forget(finder.modules)
    _clear_memories()


def _forget(names: Any) -> None:
    roots = tuple({name.split(".")[0] for name in names})
    for name in list(sys.modules):
        if name.split(".")[0] in roots:
            del sys.modules[name]


def _clear_memories() -> None:
    importlib.invalidate_caches()
    holders = [m for name, m in sys.modules.items() if name.startswith("transformers.")]
    for module in holders:
        listing = module.__dict__.get(
            "PACKAGE_DISTRIBUTION_MAPPING"
        )  # before 5.20: read once, at import
        if isinstance(listing, dict):
            listing.clear()
            listing.update(importlib.metadata.packages_distributions())
        for name in MEMORIES:
            forget = getattr(module.__dict__.get(name), "cache_clear", None)
            if forget is not None:
                forget()


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules, and the distributions that would have brought them."""

    def __init__(self, modules: dict[str, str | None]) -> None:
        self.modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of one of flash-attn's modules; None for any other name."""
        if fullname not in self.modules:
            return None
        package = any(name.startswith(f"{fullname}.") for name in self.modules)
        loader = Loader(self.modules[fullname])
        return importlib.machinery.ModuleSpec(fullname, loader, origin=HOME, is_package=package)

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        """flash-attn's, and FlashAttention-3's where its module is given."""
        known = [Stand("flash-attn", VERSION, "flash_attn")]
        if "flash_attn_interface" in self.modules:
            known.append(Stand("flash-attn-3", VERSION_3, "flash_attn_interface"))
        wanted = getattr(context, "name", None)
        for stand in known:
            if wanted is None or wanted.replace("_", "-").lower() == stand.name:
                yield stand


class Loader(importlib.abc.Loader):
    """Fills a module with what another one offers."""

    def __init__(self, source: str | None) -> None:
        self.source = source

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """None: the import system makes one."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Copy the public names."""
        module.__version__ = VERSION  # type: ignore[attr-defined]
        if self.source is not None:
            offered = importlib.import_module(self.source)
            public = {k: v for k, v in vars(offered).items() if not k.startswith("_")}
            module.__dict__.update(public)


class Stand(importlib.metadata.Distribution):
    """Stands for a distribution: a name, a version and the module it brings."""

    def __init__(self, name: str, version: str, module: str) -> None:
        self.texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": f"{module}\n",
        }
        self._called = name

    @property
    def name(self) -> str:
        """The distribution's name."""
        return self._called

    def read_text(self, filename: Any) -> str | None:
        """A file of the metadata; None where there is none."""
        return self.texts.get(str(filename))

    def locate_file(self, path: Any) -> Path:
        """Where a file would be: relampago's own folder."""
        return Path(__file__).parent / str(path)
