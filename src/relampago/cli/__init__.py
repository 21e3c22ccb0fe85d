"""The command line: `relampago {doctor, explain, bench, matrix, plan, tune, train-step, demo}`, one file per command.

Heavy imports (torch's GPU state, transformers, matplotlib) happen inside the commands, so that `--help` stays quick.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from relampago.cli import bench, demo, doctor, explain, matrix, plan, train_step, tune
from relampago.cli.console import complain
from relampago.errors import InvalidInput, Unsupported


class Plain(TyperGroup):
    """Commands whose `InvalidInput` and `Unsupported` end in a red line and exit code 2, not in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (InvalidInput, Unsupported) as error:
            complain(str(error))
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Plain,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="FlashAttention in pure Python: exact attention in O(N) memory.",
)
for command in (
    doctor.doctor,
    explain.explain,
    bench.bench,
    matrix.matrix,
    plan.plan,
    tune.tune,
    train_step.train_step,
    demo.demo,
):
    app.command()(command)


def main() -> None:
    """The entry point."""
    app()
