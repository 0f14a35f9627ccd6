"""A reward that costs nothing, for comparisons of everything else: the number of different letters of a
response."""


def distinct_letters(prompts, responses):
    return [float(len(set(response))) for response in responses]
