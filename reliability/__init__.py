"""Long-running checks: random calls, mutations, kills, sanitizers. docs/reliability.md has their results."""
