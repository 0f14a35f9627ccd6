"""Tools for grpo_tools.py: a calculator, and a game whose state changes with each call.

What a policy writes is untrusted text: the calculator reads it as a syntax tree, and never calls eval().
"""

import ast
import operator

MOST_CHARACTERS = 200  # of an expression
LARGEST = 10**30  # of any number on the way
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculator(expression: str) -> str:
    """Compute sums, differences, products and quotients.

    Args:
        expression: numbers, + - * / and parentheses, for example 3 * (4 + 5)
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError("the expression is too long")
    number = value_of(ast.parse(expression.strip(), mode="eval").body)
    return str(int(number)) if number == int(number) else f"{number:.10g}"


def value_of(node):
    """The value of a syntax tree. -> int or float"""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](value_of(node.operand))
    else:
        raise ValueError("only numbers, + - * / and parentheses")
    if not abs(value) <= LARGEST:
        raise ValueError("a number is too large")
    return value


class GuessTheNumber:
    """A secret number, which the policy finds by guessing. The reward is higher for fewer guesses."""

    MOST_GUESSES = 8

    def reset(self, secret, **columns):
        """Called once, before the first turn, with the columns of the task."""
        self.secret = secret
        self.num_guesses = 0
        self.is_found = False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess
        """
        if self.is_found or self.num_guesses == self.MOST_GUESSES:
            raise ValueError("the game is over")
        self.num_guesses += 1
        if number == self.secret:
            self.is_found = True
            return "right"
        return "higher" if number < self.secret else "lower"

    def get_reward(self):
        """0 if the number was not found, 1 if it was found by the last guess, and up to 2 for fewer guesses."""
        if not self.is_found:
            return 0.0
        return 1.0 + (self.MOST_GUESSES - self.num_guesses) / self.MOST_GUESSES
