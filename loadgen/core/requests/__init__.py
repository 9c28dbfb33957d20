"""Create what is sent: prompts with exact token counts, data sets, length distributions.

Request `n` is a function of the seed, the salt and `n`.
"""
