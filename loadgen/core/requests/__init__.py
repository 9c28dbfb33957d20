"""What is sent: prompts of exact token counts, the user's own data sets, tokenizers, laws of length.

Request `n` is a function of seed, salt and `n`. Reads files before the run, sends nothing, and knows no instants.
"""
