"""A reward that costs nothing: the number of different letters in a response."""


def distinct_letters(prompts, completions, **columns):
    return [float(len(set(completion))) for completion in completions]
