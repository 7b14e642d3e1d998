"""The host side: strings in, floats out.

  pipeline   Reward, Pipeline, score: many functions, any of which may fail
  calls      one call of one function: what counts as a value
  lanes      where calls run: threads, and workers, processes that can be killed
  memory     what is kept between calls: known values, who is muted

  answers    math answers, formats, length     (latex, equality, symbolic)
  tool_calls tool calls against the right ones
  code       programs in a sandbox             (sandbox, trial, exchange)
  text       measures on plain text
  judged     rewards by model

Nothing here imports jax, not even indirectly.
"""
