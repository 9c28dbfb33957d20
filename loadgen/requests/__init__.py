"""What is sent: prompts of exact token counts, the user's own data sets, tokenizers, laws of length.

Pure after reading: request `n` is a function of seed, salt and `n`. Sends nothing, and knows no instants.
"""
