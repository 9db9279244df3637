"""How fast Sidings is, beside bare SQL and beside other queues, on one machine in one run.

    python -m benchmarks list
    python -m benchmarks run drain groups --json out.json
    python -m benchmarks report out.json --html report.html
    python -m benchmarks profile

Reading order: `results` (what a result is), `suite` (scenarios, and how their variants take turns), `meter` (CPU and
WAL), `server` (Postgres and its databases), `ours` and `floors` (what is compared), `scenarios/`, `peers/`, `report`.
`docs/benchmarks.md` says how to read the figures.
"""
