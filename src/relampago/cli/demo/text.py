"""Real text that every Python carries: the chapters of its language reference, as `help()` prints them."""

from __future__ import annotations


def chapters() -> list[str]:
    """The chapters in alphabetical order: English technical prose, 460 kB in all (PSF licence)."""
    from pydoc_data import topics

    return [topics.topics[name] for name in sorted(topics.topics)]


def passages(count: int, words: int) -> list[str]:
    """`count` passages from chapters evenly spread over the book; of unlike lengths, the longest `words` words."""
    book = [chapter for chapter in chapters() if len(chapter.split()) >= words]
    chosen = [book[i * len(book) // count] for i in range(count)]
    lengths = [words * (i + 1) // count for i in range(count)]
    return [" ".join(c.split()[:n]) for c, n in zip(chosen, lengths, strict=True)]
