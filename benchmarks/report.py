"""Write the tables of README and docs from the committed JSON: python benchmarks/report.py [--check]."""

from relampago.cli.report.pages import main

if __name__ == "__main__":
    raise SystemExit(main())
