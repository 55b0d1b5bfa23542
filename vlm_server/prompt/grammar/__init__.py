"""Grammars of JSON schemas and tool calls, compiled and followed in killable child processes.

A hostile schema is stopped in `grammar_process`, where `compiler` compiles it: llguidance's limits,
a bound on memory, an alarm. The engine's side kills that process: `grammar_client` at the deadline
of a compilation, `answer_process` when an answer's masks take too much CPU time, `forked_process`
when it outgrows its memory. `api.parsing.json_schema` has refused schemas too deep or too large.
"""
