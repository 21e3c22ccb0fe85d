"""The models: their shapes by the published configurations, and the floating-point work of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from relampago.problem import Facts
from relampago.work import Work, visible_pairs

CHECKPOINTS = ("full", "most", "attention", "none")


@dataclass(frozen=True)
class Shape:
    """A decoder of Llama's kind: RMSNorm, rotary positions, SwiGLU, no biases, untied embeddings.

    Args:
        kind: Transformers' model type, "llama" or "mistral".
        hidden: width.
        inner: width of the MLP.
        layers: how many.
        heads: query heads.
        kv_heads: key heads.
        vocabulary: pieces.
        window: keys a row sees, itself included; None for all before it.
        source: where the numbers are from.
    """

    kind: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    window: int | None
    source: str

    @property
    def head_dim(self) -> int:
        """Of queries, keys and values."""
        return self.hidden // self.heads

    def config(self, length: int, attention: str) -> Any:
        """Transformers' configuration."""
        from transformers import LlamaConfig, MistralConfig

        words: dict[str, Any] = {
            "vocab_size": self.vocabulary, "hidden_size": self.hidden, "intermediate_size": self.inner,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "max_position_embeddings": length,
            "tie_word_embeddings": False, "attn_implementation": attention,
        }  # fmt: skip
        if self.kind == "llama":
            return LlamaConfig(**words)
        return MistralConfig(**words, sliding_window=self.window)

    @property
    def projections(self) -> dict[str, int]:
        """Parameters of each matrix of one layer."""
        kv = self.hidden * self.kv_heads * self.head_dim
        wide = self.hidden * self.inner
        square = self.hidden * self.heads * self.head_dim
        return {
            "q": square, "k": kv, "v": kv, "o": square, "gate": wide, "up": wide, "down": wide,
        }  # fmt: skip

    @property
    def head(self) -> int:
        """Parameters of the output's matrix; the embedding has as many."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """All of them, norms included."""
        norms = self.hidden * (2 * self.layers + 1)
        return self.layers * sum(self.projections.values()) + 2 * self.head + norms

    def attention(self, length: int) -> Work:
        """One layer's attention over one sequence."""
        left = None if self.window is None else self.window - 1
        pairs = visible_pairs(length, length, 0, Facts(left=left, right=0)) * self.heads
        rows, keys = self.heads * length, self.kv_heads * length
        return Work(pairs, rows, keys, self.head_dim, self.head_dim, self.heads * length**2)

    def model_flops(self, length: int) -> int:
        """What a step must do: 6 per token and matrix parameter, 12 d per visible pair; nothing twice.

        As PaLM counts (arXiv 2204.02311, appendix B), with attention over visible pairs only.
        """
        matrices = self.layers * sum(self.projections.values()) + self.head
        return 6 * matrices * length + 3 * self.layers * self.attention(length).forward_flops


SHAPES = {
    "llama-7b": Shape("llama", 4096, 11008, 32, 32, 32, 32000, None, "Llama 7B, arXiv 2302.13971"),
    "mistral-7b": Shape("mistral", 4096, 14336, 32, 32, 8, 32000, 4096, "Mistral 7B, arXiv 2310.06825"),
    "tiny": Shape("llama", 128, 352, 2, 4, 4, 1024, None, "for a try on a CPU"),
    "tiny-mistral": Shape("mistral", 128, 448, 2, 4, 2, 1024, 100, "for a try on a CPU"),
}  # fmt: skip


def shape_of(model: str, layers: int | None) -> Shape:
    """A named shape, with fewer layers if asked."""
    shape = SHAPES[model]
    return shape if layers is None else replace(shape, layers=layers)
