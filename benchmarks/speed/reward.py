"""A reward that costs nothing, for comparisons of everything else: the number of different letters of a
response."""


def distinct_letters(prompts, completions, **columns):
    return [float(len(set(completion))) for completion in completions]
