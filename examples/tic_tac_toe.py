"""Tic-tac-toe: an environment for grpo_tools.py, its tasks, and chats for a cold start.

    python examples/tic_tac_toe.py FOLDER

writes FOLDER/train.jsonl and test.jsonl (games against a random player), best.jsonl (against the best player)
and sft/ (chats of a player who plays at random). docs/grpo_tools.md goes on from there.
"""

import functools
import json
import random
import sys
from pathlib import Path

from transformers.utils import get_json_schema

LINES = ("012", "345", "678", "036", "147", "258", "048", "246")  # three in a row, as indices of the board


def winner(board):
    """ "X", "O", or None. board: 9 characters, a digit if the square is free"""
    for a, b, c in LINES:
        if board[int(a)] == board[int(b)] == board[int(c)]:
            return board[int(a)]
    return None


def free_squares(board):
    return [square for square in range(1, 10) if board[square - 1] == str(square)]


def put(board, square, player):
    return board[: square - 1] + player + board[square:]


@functools.cache
def value(board, player):
    """How the game ends for X if both play as well as they can, and it is the player's turn: 1, 0 or -1."""
    if winner(board):
        return 1 if winner(board) == "X" else -1
    other = "O" if player == "X" else "X"
    values = [value(put(board, square, player), other) for square in free_squares(board)]
    return (max if player == "X" else min)(values, default=0)


class TicTacToe:
    """A game. The policy is X. The opponent O plays at random, or as well as possible."""

    def reset(self, seed, first, opponent, **columns):
        """Called before the first turn, with the columns of the task. -> the end of the prompt"""
        self.board, self.random, self.opponent = "123456789", random.Random(seed), opponent
        if first == "O":
            self._opponent_plays()
        return f"\n{self._text()}"

    def play(self, number: int) -> str:
        """Put an X on a free square.

        Args:
            number: the square, from 1 to 9
        """
        if self.is_over() or number not in free_squares(self.board):
            raise ValueError(f"{number} is not free")  # the policy reads it, and may try again
        self.board = put(self.board, number, "X")
        if not self.is_over():
            self._opponent_plays()
        return self._text()

    def is_over(self):
        """Asked after each turn. True ends the trajectory."""
        return winner(self.board) is not None or not free_squares(self.board)

    def get_reward(self):
        """1 if X has won, 0.5 for a draw, 0 if O has won or the game did not end."""
        if not self.is_over():
            return 0.0
        return {"X": 1.0, None: 0.5, "O": 0.0}[winner(self.board)]

    def _opponent_plays(self):
        """Names with an underscore are no tools."""
        squares = free_squares(self.board)
        if self.opponent == "best":
            values = {square: value(put(self.board, square, "O"), "X") for square in squares}
            squares = [square for square in squares if values[square] == min(values.values())]
        self.board = put(self.board, self.random.choice(squares), "O")

    def _text(self):
        rows = self.board[:3], self.board[3:6], self.board[6:]
        return "\n".join(" ".join(row) for row in rows)


def task(seed, opponent="random"):
    prompt = [{"role": "user", "content": "Play tic-tac-toe. You are X."}]
    return {"prompt": prompt, "seed": seed, "first": "XO"[seed % 2], "opponent": opponent}


def chat(seed):
    """A game of a random X, with one move in ten on a square that may not be free. -> a row for sft.py"""
    row, game, generator = task(seed), TicTacToe(), random.Random(f"X {seed}")
    messages = row["prompt"]
    messages[0]["content"] += game.reset(**row)
    while not game.is_over():
        squares = free_squares(game.board) if generator.random() < 0.9 else range(1, 10)
        number = generator.choice(squares)
        call = {"type": "function", "function": {"name": "play", "arguments": {"number": number}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        try:
            result = game.play(number)
        except ValueError as error:
            result = f"error: ValueError: {error}"  # as grpo_tools.py tells it to the policy
        messages.append({"role": "tool", "content": result})
    return {"messages": messages[:-1], "tools": [get_json_schema(game.play)]}


def write(folder):
    files = {
        "train": [task(seed) for seed in range(1000)],
        "test": [task(seed) for seed in range(1000, 1256)],
        "best": [task(seed, "best") for seed in range(1000, 1256)],
        "sft/train": [chat(seed) for seed in range(10_000, 10_600)],
        "sft/test": [chat(seed) for seed in range(20_000, 20_050)],
    }
    for name, rows in files.items():
        path = Path(folder, f"{name}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write(sys.argv[1])
