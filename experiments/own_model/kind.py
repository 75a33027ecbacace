"""A reward function: is the last word of the response the kind that was asked for?"""


def score(response_text: str, answer: str, metadata: object) -> bool:
    words = response_text.lower().strip(" .\n").split()
    return len(words) <= 2 and words[-1:] == [answer]
