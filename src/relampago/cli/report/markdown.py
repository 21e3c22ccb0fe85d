"""How a table looks in README and docs."""

from __future__ import annotations


def markdown(title: str, head: list[str], rows: list[list[str]], note: str) -> str:
    """A titled table and a line below it."""
    lines = [
        f"**{title}**",
        "",
        "| " + " | ".join(head) + " |",
        "|---" + "|---:" * (len(head) - 1) + "|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", note])
