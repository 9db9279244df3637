"""How fast Sidings is, beside bare SQL and beside other queues, on one machine in one run.

    python -m benchmarks list
    python -m benchmarks run drain groups --json out.json
    python -m benchmarks report out.json --html report.html
    python -m benchmarks profile

Reading order: `results` (what a result is), `suite` (scenarios, and how their variants take turns), `meter` (CPU and
WAL) and `memory`, `server` (Postgres and its databases), `ours` and `floors` (what is compared), `relay` with `deimos`
(the outbox, and another's), `scenarios/`, `peers/`; processes of their own: `worker`, `producer`, `replica`; then
`report` with `wording` and `page`, and `profile` (where the time goes).
`docs/benchmarks.md` says how to read the figures.
"""
