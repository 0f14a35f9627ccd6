"""A chat model as the reward of any RL script (--reward-fn): it grades each response from 0 to 10.

    pip install openai
    vllm serve Qwen/Qwen2.5-7B-Instruct --port 8000       # or any other OpenAI-compatible server
    export JUDGE_URL=http://localhost:8000/v1 JUDGE_MODEL=Qwen/Qwen2.5-7B-Instruct
    python grpo_math.py --reward-fn examples/rubric_reward.py:rubric

A grader can be hacked like any reward. So look at the samples, and let another judge decide at the end.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import openai

RUBRIC = """Grade the answer to a task from 0 to 10:
- 6 points if the final answer is right,
- 2 points if each step follows from the one before,
- 2 points if there is nothing superfluous.

Task:
{task}

Answer:
{answer}

End your reply with the grade, as in: Grade: 7"""


def text_of(x):
    """A text is itself. Of a list of messages, the last one's content."""
    return x if isinstance(x, str) else x[-1]["content"]


def rubric(prompts, completions, **kwargs):
    """The grade of each completion, from 0.0 to 1.0; None if the chat model does not give one.

    If the server fails, the run ends with openai's error. Continue it with --resume.
    """
    client = openai.OpenAI(base_url=os.environ["JUDGE_URL"], api_key=os.environ.get("OPENAI_API_KEY", "none"))

    def grade(prompt, completion):
        question = RUBRIC.format(task=text_of(prompt), answer=text_of(completion))
        answer = client.chat.completions.create(
            model=os.environ["JUDGE_MODEL"],
            messages=[{"role": "user", "content": question}],
            temperature=0.0,
        )
        found = re.findall(r"Grade:\s*(10|\d)(?![\d.])", answer.choices[0].message.content or "")
        return int(found[-1]) / 10 if found else None

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(grade, prompts, completions))
