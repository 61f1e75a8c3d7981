"""Served speed, of any OpenAI-compatible server: the same prompts through several arms (plain, MTP, EAGLE-3, DFlash), at fixed numbers of
requests in flight. docs/benchmark.md has the definitions.

workloads (the prompts) -> stream (one request, timed) and counters (what engines say of acceptance) -> run (arms, cells, the closed loop) ->
figures (means, percentiles, speed-up and its interval, files joined) -> output (tables).
"""
