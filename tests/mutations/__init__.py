"""A guard against rules that no test protects.

Each entry of `table.toml` changes one line of a rule. The guard applies the change to a copy of the
package and runs the tests named there; at least one of them has to fail in every mode.

A refactoring that rewrites such a line updates the `old` and `new` text of its entry and keeps the
rule. `PYTHONPATH=tests python -m mutations.draw --seed N` draws more changes. `pytest -m mutations`
runs all entries, and `python tests/make_mutations.py` also publishes them in
`benchmarks/mutations.md`.
"""
