"""What vtensor costs, beside what it replaces: one harness, one result format, one command.

``python -m benchmarks`` from the repository root runs everything that ``BENCHMARKS`` names. Each of them is a
module with ``run(settings) -> list[Figure]``, and holds its baselines, written as their own authors would.
"""

BENCHMARKS = (
    "extend",
    "mapping",
    "append",
    "shims",
    "growth",
    "generate",
    "fork",
    "bands",
    "heap",
    "serving",
    "sharing",
    "mapper",
    "trace_cost",
    "import_time",
)
