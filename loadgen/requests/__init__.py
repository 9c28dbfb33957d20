"""The requests of a run: prompts of exact token counts, data sets of the user, tokenizers, length distributions.

Pure once files are read: request `n` is a function of seed, salt and `n`. Sends nothing and knows no times.
"""
